"""`surgeon generate` from the command line: the same text for any number of ranks, figures apart, clear refusals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from surgeon.cli.app import main
from surgeon.runtime.text import Continuation

REPOSITORY = Path(__file__).parents[2]
PROMPT = "The quick brown fox"


def generate(model: Path, *more: str) -> int:
    return main(["generate", str(model), "--prompt", PROMPT, "--max-new-tokens", "12", *more])


@pytest.fixture
def expected(tiny_checkpoint: Path) -> str:
    """What `transformers` writes after the prompt."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    ids = torch.tensor([tokenizer(PROMPT).input_ids])
    return tokenizer.decode(model.generate(ids, max_new_tokens=12, do_sample=False)[0], skip_special_tokens=True)


@pytest.mark.parametrize("options", [["--tp", "1"], ["--tp", "2"], ["--tp", "4", "--collectives", "gloo"]])
def test_text_on_stdout_and_figures_on_stderr(
    options: list[str], tiny_checkpoint: Path, expected: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert generate(tiny_checkpoint, *options) == 0
    out, err = capfd.readouterr()
    assert out == expected.removeprefix(PROMPT) + "\n"
    ranks = int(options[1])
    assert f"ranks    {ranks} (cpu, " in err
    assert f"{0 if ranks == 1 else 8} all-reduces per token, as the program has" in err
    assert re.search(r"decode   \d+ tokens at [\d.]+ tokens/s", err)


def test_another_program(tiny_checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert generate(tiny_checkpoint, "--tp", "2", "--program", "A0 F0 [A1 A2] [F1 F2] >A3 >F3") == 0
    err = capfd.readouterr().err
    assert "effective depth 3 of 4 layers" in err
    assert "6 all-reduces per token, as the program has; 768 bytes per token and rank" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--tp", "3"], "error: 3 ranks cannot share this model: the 4 heads and 2 KV heads of A0 .*; 1, 2 or 4 can"),
        (["--program", "A0 B0"], "error: .*'B0'.*"),
        (["--program", "A0 F9"], "error: F9 is out of range: the model's layers are 0 to 3"),
        (["--prompt", ""], "error: the prompt is empty.*"),
        (["--prompt", "\udcff"], "error: the prompt is not text in UTF-8.*"),
        (["--collectives", "shn"], "error: there are no collectives 'shn'; did you mean 'shm'.*"),
        (["--max-new-tokens", "500"], "error: prompt and output together are 5.. tokens, .* 128 positions.*"),
    ],
)
def test_refusals_start_no_rank(
    options: list[str],
    message: str,
    tiny_checkpoint: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    if options == ["--prompt", ""]:
        tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
        tokenizer.backend_tokenizer.post_processor = None
        tokenizer.save_pretrained(tiny_checkpoint)
    assert generate(tiny_checkpoint, *options) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert re.fullmatch(message + "\n", err)


def test_a_checkpoint_without_tokenizer(tiny_checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for file in tiny_checkpoint.glob("tokenizer*"):
        file.unlink()
    assert generate(tiny_checkpoint) == 1
    assert "has no tokenizer that can be read" in capfd.readouterr().err


def children_of(pid: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(word) for word in found.stdout.split()]


@pytest.mark.parametrize(
    ("target", "name", "code", "message"),
    [
        ("rank", "SIGKILL", 1, r"error: rank 1 \(process \d+\) was ended by SIGKILL.*"),
        ("command", "SIGINT", 130, "interrupted.*"),
    ],
)
def test_ending_in_the_middle(target: str, name: str, code: int, message: str, tiny_checkpoint: Path) -> None:
    config = json.loads((tiny_checkpoint / "config.json").read_text())
    (tiny_checkpoint / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
    # So many tokens, and reductions as slow as gloo's, that this is the middle on a busy machine, too.
    arguments = ["generate", str(tiny_checkpoint), "--prompt", PROMPT, "--tp", "2", "--max-new-tokens", "3000"]
    script = f"import sys; from surgeon.cli.app import main; sys.exit(main({[*arguments, '--collectives', 'gloo']}))"
    command = subprocess.Popen(
        [sys.executable, "-c", script], cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert command.stdout is not None
    with command:
        command.stdout.read(1)
        ranks = children_of(command.pid)
        os.kill(ranks[1] if target == "rank" else command.pid, signal.Signals[name])
        _, err = command.communicate(timeout=60)
    assert command.returncode == code
    assert re.fullmatch(message + "\n", err)
    assert len(ranks) == 2
    for rank in ranks:
        deadline = time.monotonic() + 20
        while Path(f"/proc/{rank}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        with pytest.raises(ProcessLookupError):
            os.kill(rank, 0)


class Bytes:
    """A tokenizer of one byte per token, so that characters come in pieces."""

    def decode(self, tokens: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert skip_special_tokens
        assert not clean_up_tokenization_spaces
        return bytes(tokens).decode(errors="replace")


def test_characters_come_whole() -> None:
    text = Continuation(Bytes(), list(b"caf"))
    assert [text.add(token) for token in "é — x".encode()] == ["", "é", " ", "", "", "—", " ", "x"]
    assert text.add(0xE2) == ""
    assert text.rest() == "\ufffd"
