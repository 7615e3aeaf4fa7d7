"""`surgeon generate` from the command line: the same texts for any number of ranks, figures apart, clear refusals."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from surgeon.checkpoint.texts import Continuation
from surgeon.commands.app import main
from surgeon.runtime import service
from surgeon.runtime.worker import ranks
from tests import warm
from tests.codas import save_codas
from tests.tiny_models import chat_checkpoint, damage, save_checkpoint
from tests.waiting import PATIENCE, wait_until

REPOSITORY = Path(__file__).parents[2]
PROMPT = "The quick brown fox"
PROMPTS = [PROMPT, "went on sleeping:", "the lazy dog, and the dog (who had", "  fox jumps"]
NEW = 12


def generate(model: Path, *more: str) -> int:
    return main(["generate", str(model), "--prompt", PROMPT, "--max-new-tokens", str(NEW), *more])


def continued(folder: Path, prompt: str, **options: Any) -> str:
    """What `transformers` writes after a prompt."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.tensor([tokenizer(prompt).input_ids])
    tokens = model.generate(ids, max_new_tokens=NEW, do_sample=False, **options)[0]
    text: str = tokenizer.decode(tokens, skip_special_tokens=True)
    return text.removeprefix(prompt)


@pytest.fixture
def endless(tiny_checkpoint: Path) -> Path:
    """A model whose texts do not end by themselves, with many positions."""
    changes = {"config.json": {"eos_token_id": None, "max_position_embeddings": 4096}}
    for name, changed in (changes | {"generation_config.json": {"eos_token_id": None}}).items():
        file = tiny_checkpoint / name
        file.write_text(json.dumps(json.loads(file.read_text()) | changed))
    return tiny_checkpoint


@pytest.mark.parametrize(
    "options",
    [
        ["--tp", "1"],
        ["--tp", "2"],
        ["--tp", "4", "--collectives", "gloo"],
        ["--tp", "2", "--decoding", "static", "--dtype", "float32"],
    ],
)
def test_text_on_stdout_and_figures_on_stderr(
    options: list[str], tiny_checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert generate(tiny_checkpoint, *options) == 0
    out, err = capfd.readouterr()
    assert out == continued(tiny_checkpoint, PROMPT) + "\n"
    ranks = int(options[1])
    assert f"ranks    {ranks} (cpu, " in err
    assert f"{0 if ranks == 1 else 8} all-reduces per token, as the program has" in err
    assert re.search(r"decode   \d+ tokens at [\d.]+ tokens/s", err)
    assert "room for" not in err  # said where some texts have to wait for others


@pytest.mark.parametrize(
    "options",
    [
        pytest.param([], id="greedy"),
        pytest.param(["--temperature", "1", "--seed", "3"], marks=pytest.mark.thorough),
    ],
)
def test_a_pipeline_writes_the_same_texts(
    options: list[str], tiny_checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    save_codas(tiny_checkpoint, AutoModelForCausalLM.from_pretrained(tiny_checkpoint), cut=1, noise=0.3)
    expected = records(capfd, tiny_checkpoint, PROMPTS[:2], *options)
    piped = ["--pipeline", "--ranks", "2", *options]
    for batch in ("1", "2"):  # fewer texts than ranks are drafted for
        found = records(capfd, tiny_checkpoint, PROMPTS[:2], *piped, "--max-batch", batch)
        assert [one["tokens"] for one in found] == [one["tokens"] for one in expected]
        assert any(one["drafted"] for one in found) == (batch == "1" and not options)
    assert generate(tiny_checkpoint, *piped) == 0
    err = capfd.readouterr().err
    assert "nodes    0:2, 2:8, a stretch on each rank" in err
    assert options or re.search(r"drafts   \d+ of \d+ tokens of the coda's were right", err)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--pipeline"], "say --ranks N"),
        (["--ranks", "2"], "--ranks is of --pipeline"),
        (["--pipeline", "--ranks", "2", "--tp", "2"], "leave --tp out"),
        (["--pipeline", "--ranks", "2", "--draft", "lp"], "leave the draft out"),
        (["--pipeline", "--ranks", "2", "--halves", "on"], "a pipeline has none"),
        (["--pipeline", "--ranks", "2", "--compress", "int8"], "leave the compression out"),
        (["--pipeline", "--ranks", "5"], "the model has 4"),
    ],
)
def test_a_pipeline_that_cannot_be(
    options: list[str],
    said: str,
    tiny_checkpoint: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Before it is known to be in vain.
    monkeypatch.setattr(ranks, "early_ranks", lambda _: nullcontext())
    assert generate(tiny_checkpoint, *options) == 1
    assert said in capfd.readouterr().err


@pytest.mark.parametrize(
    ("way", "sent"),
    [
        ("gather", "8 all-reduces and 2 all-gathers per token, 2 of them between factors"),
        ("replicate", "8 all-reduces per token, as the program has"),
    ],
)
def test_what_is_sent_between_factors(
    way: str, sent: str, tiny_checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    program = "A0@q4,k4 F0@up4 A1 F1 A2 F2 A3 F3"
    assert generate(tiny_checkpoint, "--program", program, "--tp", "2", "--low-rank", way) == 0
    assert sent in capfd.readouterr().err


def test_other_dtypes_and_ways_of_decoding(
    tiny_checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert generate(tiny_checkpoint, "--dtype", "bfloat16") == 0
    assert "ranks    1 (cpu, shm, bfloat16)" in capfd.readouterr().err
    for option, message in [
        (("--dtype", "int3"), "there is no dtype 'int3'"),
        (("--decoding", "captured"), "there is no decoding 'captured'"),
        (("--kv", "lowrank"), "no attention here has factors of both"),
    ]:
        assert generate(tiny_checkpoint, *option) == 1
        assert message in capfd.readouterr().err


def test_another_program(tiny_checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    # As of an export with fewer layers than its original.
    record = {"program": "A0 F0 A2 F2 A3 F3 A5 F5", "source": {"model": "m", "num_layers": 6}}
    (tiny_checkpoint / "surgeon.json").write_text(json.dumps(record))
    assert generate(tiny_checkpoint, "--tp", "2", "--program", "A0 F0 [A1 A2] [F1 F2] >A3 >F3") == 0
    err = " ".join(capfd.readouterr().err.split())
    assert "effective depth 3 of 6 layers" in err
    assert "6 all-reduces per token, as the program has; 768 bytes per token and rank" in err
    (tiny_checkpoint / "surgeon.json").write_text("{")
    assert generate(tiny_checkpoint) == 1
    out, err = capfd.readouterr()
    assert (out, "surgeon.json is not valid JSON" in err) == ("", True), "it is said before any text"


def test_norms_of_all_heads_are_sums_of_their_own(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of a pair on two ranks each has one whole attention, and needs to know of no others."""
    folder, program = save_checkpoint(tmp_path / "model", "olmo3"), "A0 F0 [A1 A2] [F1 F2] A3 F3"
    assert generate(folder, "--tp", "2", "--program", program) == 0
    assert "8 all-reduces per token, 2 of them for norms of all heads" in capfd.readouterr().err


@pytest.mark.parametrize("given", ["options", "text", "jsonl"])
def test_several_prompts(
    given: str, endless: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In their order, whole, each below its beginning; those of a file like those of the command line."""
    arguments = [word for prompt in PROMPTS for word in ("--prompt", prompt)]
    if given == "text":
        file = tmp_path / "prompts.txt"
        file.write_bytes("\ufeff".encode() + "\r\n\n".join(PROMPTS).encode())
        arguments = ["--prompts", str(file)]
    elif given == "jsonl":
        file = tmp_path / "prompts.jsonl"
        file.write_text("\n".join(json.dumps({"id": 1, "prompt": prompt}) for prompt in PROMPTS[1:]))
        arguments = ["--prompts", str(file), "--prompt", PROMPTS[0]]
    arguments += ["--max-new-tokens", str(NEW), "--tp", "2", "--max-batch", "3"]
    assert main(["generate", str(endless), *arguments]) == 0
    out, err = capfd.readouterr()
    blocks = [
        f"==> {number} of 4: {prompt.strip()} <==\n{continued(endless, prompt)}\n"
        for number, prompt in enumerate(PROMPTS, start=1)
    ]
    assert out == "\n".join(blocks)
    assert re.search(r"decode   48 tokens of 4 texts at [\d.]+ tokens/s", err)
    assert "8 all-reduces per pass, as the program has; 1024 bytes per token and rank" in " ".join(
        err.split()
    )


def records(
    capfd: pytest.CaptureFixture[str], folder: Path, prompts: list[str], *options: str
) -> list[dict[str, Any]]:
    """What --json writes."""
    arguments = [word for prompt in prompts for word in ("--prompt", prompt)]
    assert (
        main(["generate", str(folder), *arguments, "--json", "--max-new-tokens", str(NEW), *options])
        == 0
    )
    return [json.loads(line) for line in capfd.readouterr().out.splitlines()]


def test_json(endless: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(endless)
    text = continued(endless, PROMPT)
    stop = text[len(text) // 2 : len(text) // 2 + 3]
    first, second = records(capfd, endless, PROMPTS[:2], "--stop", "not this", "--stop", stop)
    assert list(first) == ["prompt", "text", "finish_reason", "tokens"]
    assert (first["prompt"], first["text"], first["finish_reason"]) == (
        PROMPT,
        text.partition(stop)[0],
        "stop",
    )
    assert stop in tokenizer.decode(first["tokens"])
    assert len(first["tokens"]) < NEW
    assert second["text"] == continued(endless, PROMPTS[1]).partition(stop)[0]


def test_a_seed_draws_the_same_texts_on_any_ranks_and_beside_any_prompts(
    endless: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    drawn = ["--temperature", "1.2", "--top-p", "0.95", "--top-k", "60", "--min-p", "0.001"]
    together = records(capfd, endless, PROMPTS, *drawn, "--seed", "7", "--tp", "2")
    beside = records(
        capfd, endless, [PROMPTS[0], "dog", PROMPTS[2]], *drawn, "--seed", "7", "--max-batch", "1"
    )
    alone = records(capfd, endless, PROMPTS[:1], *drawn, "--seed", "7", "--tp", "4")
    other = records(capfd, endless, PROMPTS[:1], *drawn, "--seed", "8")
    assert [beside[0], beside[2]] == [together[0], together[2]]
    assert alone == together[:1]
    assert other[0]["tokens"] != alone[0]["tokens"]
    assert alone[0]["text"] != continued(endless, PROMPTS[0])


def test_every_prompt_of_a_seed_draws_numbers_of_its_own(
    endless: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Of 24 equal prompts, each goes on in its own way; with a second run all of them in the same."""
    file = tmp_path / "prompts.txt"
    file.write_text(f"{PROMPT}\n" * 24)
    options = [
        "--prompts",
        str(file),
        "--json",
        "--max-new-tokens",
        str(NEW),
        "--temperature",
        "1",
        "--seed",
        "3",
    ]
    texts = []
    for more in ([], ["--tp", "2", "--max-batch", "5"]):
        assert main(["generate", str(endless), *options, *more]) == 0
        texts.append([tuple(json.loads(line)["tokens"]) for line in capfd.readouterr().out.splitlines()])
    assert texts[0] == texts[1]
    assert len(set(texts[0])) == 24
    assert len({tokens[0] for tokens in texts[0]}) > 8


@pytest.mark.parametrize(
    "option", [["--top-k", "1"], ["--top-p", "0"], ["--top-p", "0.0001"], ["--min-p", "1"]]
)
def test_filters_that_leave_one_token_are_greedy(
    option: list[str], endless: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert generate(endless, "--temperature", "5", *option) == 0
    assert capfd.readouterr().out == continued(endless, PROMPT) + "\n"


def test_repetition_penalty(endless: Path, capfd: pytest.CaptureFixture[str]) -> None:
    expected = continued(endless, PROMPT, repetition_penalty=1.7)
    assert expected != continued(endless, PROMPT)
    (record,) = records(capfd, endless, [PROMPT], "--repetition-penalty", "1.7", "--tp", "2")
    assert record["text"] == expected


def test_a_slow_link_and_compressed_reductions(endless: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--tp", "2", "--link-delay", "5ms", "--link-bandwidth", "1GB", "--compress", "int8"]
    assert generate(endless, *options) == 0
    out, err = capfd.readouterr()
    assert out.endswith("\n")
    assert "ranks    2 (cpu, shm, link of 5ms, 1 GB/s, int8, float32)" in err
    # 32 features: one exact (4 bytes) and its place (2), a scale (4), 32 integers.
    said = " ".join(err.split())
    assert (
        f"8 all-gathers in int8 per token, as the program has; {8 * 42} bytes per token and rank" in said
    )
    assert "vocab    1 all-reduce and 1 all-gather per token" in err
    rate = re.search(r"decode   12 tokens at ([\d.]+) tokens/s", err)
    assert rate is not None
    assert float(rate[1]) <= 1 / (10 * 0.005)


def test_what_changes_nothing_is_said(endless: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert generate(endless, "--top-p", "0.5", "--seed", "1", "--link-delay", "1ms") == 0
    out, err = capfd.readouterr()
    assert out == continued(endless, PROMPT) + "\n"
    assert "warning: top_p, seed: of no effect without a temperature" in err
    assert "warning: one rank sends nothing" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--tp", "100"],
            "error: 100 ranks cannot share this model, whose layers have 4 heads and .*; use at most .*",
        ),
        (["--program", "A0 B0"], "error: .*'B0'.*"),
        (["--program", "A0 F9"], "error: F9 is out of range: the model's layers are 0 to 3"),
        (["--prompt", ""], "error: --prompt 2: the prompt is empty.*"),
        (["--prompt", "\udcff"], "error: --prompt 2: the prompt is not text in UTF-8.*"),
        (["--collectives", "shn"], "error: there are no collectives 'shn'; did you mean 'shm'.*"),
        (
            ["--collectives", "none"],
            "error: collectives none leave the ranks unconnected, .* use auto .*",
        ),
        (
            ["--max-new-tokens", "500"],
            "error: prompt and output together are 5.. tokens, .* 128 positions.*",
        ),
        (
            ["--prompt", "fox " * 99],
            "error: prompt and output together are .* tokens, .* 128 positions.*",
        ),
        (
            ["--prompt", "fox " * 5000],
            "error: --prompt 2: the prompt has 20000 characters; at most .* 128 positions.*",
        ),
        (["--temperature", "-1"], "error: temperature must be at least 0, not -1.0"),
        (["--temperature", "nan"], "error: temperature must be at least 0, not nan"),
        (["--top-p", "1.5"], "error: --top-p must be in 0..1, not 1.5"),
        (["--top-k", "-2"], "error: --top-k must be at least 0 .*, not -2"),
        (["--min-p", "2"], "error: --min-p must be in 0..1, not 2.0"),
        (["--repetition-penalty", "0"], "error: --repetition-penalty must be above 0 .*, not 0.0"),
        (["--stop", ""], r"error: stop must be up to 64 texts, none of them empty, not \('',\)"),
        (["--compress", "int7"], "error: there is no compression 'int7'; did you mean 'int.'.*"),
        (["--link-delay", "soon"], "error: 'soon' is no delay; write e.g. 1ms, 200us or 0.5s"),
        (["--link-bandwidth", "fast"], "error: 'fast' is no amount of memory.*"),
        (["--prompts", "missing.txt"], "error: missing.txt: No such file or directory"),
        (["--prompts", "missing.jsonl"], "error: there is no file missing.jsonl"),
        (["--prompts", "."], r"error: \.: Is a directory"),
    ],
    ids=str,
)
def test_refusals_leave_no_rank(
    options: list[str],
    message: str,
    tiny_checkpoint: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[subprocess.Popen[bytes]] = []
    start = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *a, **k: started.append(start(*a, **k)) or started[-1]
    )
    if options == ["--prompt", ""]:
        tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
        tokenizer.backend_tokenizer.post_processor = None
        tokenizer.save_pretrained(tiny_checkpoint)
    ranks = [] if "--tp" in options else ["--tp", "2"]
    assert generate(tiny_checkpoint, *ranks, *options) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert re.fullmatch(message + "\n", err)
    assert all(process.poll() is not None for process in started)


def test_ranks_start_before_the_model_is_looked_at(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Both take seconds."""
    order: list[str] = []
    start, plan = subprocess.Popen, service.make_plan

    def note(command: list[str], **options: Any) -> subprocess.Popen[Any]:
        if "surgeon.runtime" in command:  # and no compiler that is asked its version
            order.append("rank")
        return start(command, **options)

    monkeypatch.setattr(ranks, "usable_cores", lambda: 2)
    monkeypatch.setattr(subprocess, "Popen", note)
    monkeypatch.setattr(service, "make_plan", lambda *a, **k: order.append("plan") or plan(*a, **k))
    assert generate(tiny_checkpoint, "--tp", "2") == 0
    assert order == ["rank", "rank", "plan"]
    assert "ranks    2 (cpu, shm" in capfd.readouterr().err


def test_more_ranks_than_cores_wait_for_the_plan(
    tiny_checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ranks, "usable_cores", lambda: 2)
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: pytest.fail("a process was started"))
    assert generate(tiny_checkpoint, "--tp", "100") == 1
    assert "100 ranks cannot share this model" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", b"", "p.txt is empty; write one prompt on each line"),
        ("p.txt", b" \n\n", "p.txt is empty; write one prompt on each line"),
        ("p.txt", b"ab\xff", "p.txt is not UTF-8 text (byte 2)"),
        ("p.jsonl", b"", "p.jsonl is empty; give a file with rows in it"),
        (
            "p.jsonl",
            b'{"prompt": "a"}\n{"text": "b"}',
            "p.jsonl:2: the row has no 'prompt'; every row needs one",
        ),
        (
            "p.jsonl",
            b'{"prompt": "a"}\n{"prompt": null}',
            "p.jsonl:2: the row has no 'prompt'; every row needs one",
        ),
        ("p.jsonl", b'{"text": "b"}', "p.jsonl has no column 'prompt'; the columns are text"),
        ("p.txt", "the fox".encode("utf-16"), "p.txt begins as text in UTF-16 does (FF FE); convert it"),
        ("p.txt", "the fox".encode("utf-16-le"), "p.txt is no text: byte 1 is NUL"),
        ("p.jsonl", b'{"prompt": 3}', "p.jsonl:1: column 'prompt' should hold text, not 3"),
        ("p.jsonl", b'{"prompt": ', "p.jsonl:1: not valid JSON"),
    ],
)
def test_files_without_prompts(
    name: str,
    content: bytes,
    message: str,
    tiny_checkpoint: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / name).write_bytes(content)
    assert main(["generate", str(tiny_checkpoint), "--prompts", str(tmp_path / name)]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"error: {tmp_path}/{message}")


def test_no_prompt_at_all(tiny_checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", str(tiny_checkpoint)]) == 1
    assert (
        capfd.readouterr().err
        == "error: there is nothing to go on from; give --prompt TEXT or --prompts FILE\n"
    )


@pytest.mark.parametrize("decoding", ["dynamic", "static"])
def test_settings_of_the_checkpoint_apply(
    decoding: str, endless: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    plain = continued(endless, PROMPT)
    tokenizer = AutoTokenizer.from_pretrained(endless)
    first, *others = tokenizer(plain, add_special_tokens=False).input_ids
    file = endless / "generation_config.json"
    settings = {
        "repetition_penalty": 3.0,
        "suppress_tokens": [others[-1], 5000],
        "begin_suppress_tokens": [first],
    }
    texts = {plain}
    for name in settings:
        file.write_text(
            json.dumps({"eos_token_id": None, "no_repeat_ngram_size": 0, name: settings[name]})
        )
        expected = continued(endless, PROMPT)
        assert (
            generate(endless, "--tp", "2" if decoding == "dynamic" else "1", "--decoding", decoding) == 0
        )
        out, err = capfd.readouterr()
        assert out == expected + "\n"
        assert "warning" not in err
        texts.add(out)
    assert len(texts) == 4
    file.write_text(
        json.dumps({"eos_token_id": None, "repetition_penalty": 3.0, "bad_words_ids": [[9]]})
    )
    assert generate(endless, "--repetition-penalty", "1", "--decoding", decoding) == 0
    out, err = capfd.readouterr()
    assert out == plain + "\n"
    assert "warning: generation_config.json sets bad_words_ids ([[9]]), which is not applied" in err


@pytest.mark.parametrize(
    "options", [[], ["--temperature", "1"], ["--decoding", "static", "--json"]], ids=str
)
def test_logits_that_are_not_finite(
    options: list[str], tiny_checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    damage(tiny_checkpoint, AutoTokenizer.from_pretrained(tiny_checkpoint).bos_token_id)
    assert generate(tiny_checkpoint, *options) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert re.fullmatch(
        r"error: the model's logits are not finite \(NaN or infinity\).* 0 new ones.*\n", err
    )


def test_a_checkpoint_without_tokenizer(
    tiny_checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for file in tiny_checkpoint.glob("tokenizer*"):
        file.unlink()
    assert generate(tiny_checkpoint) == 1
    assert "has no tokenizer that can be read" in capfd.readouterr().err


def in_the_middle(folder: Path, *more: str) -> subprocess.Popen[str]:
    """A command that takes long, on two ranks."""
    # So many tokens, and reductions as slow as gloo's, that this is the middle on a busy machine, too.
    arguments = [
        "generate",
        str(folder),
        "--prompt",
        PROMPT,
        "--tp",
        "2",
        "--max-new-tokens",
        "3000",
        *more,
    ]
    command = [*arguments, "--collectives", "gloo"]
    script = f"import sys; from surgeon.commands.app import main; sys.exit(main({command}))"
    return warm.Popen(
        [sys.executable, "-c", script],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("target", "name", "code", "message"),
    [
        ("rank", "SIGKILL", 1, r"error: rank 1 \(process \d+\) was ended by SIGKILL.*"),
        ("command", "SIGINT", 130, "interrupted.*"),
    ],
)
def test_ending_in_the_middle(target: str, name: str, code: int, message: str, endless: Path) -> None:
    beginning = continued(endless, PROMPT)
    with in_the_middle(endless) as command:
        assert command.stdout is not None
        shown = command.stdout.read(len(beginning))
        ranks = [rank.pid for rank in warm.ranks_of(command.pid)]
        os.kill(ranks[1] if target == "rank" else command.pid, signal.Signals[name])
        _, err = command.communicate(timeout=PATIENCE)
    assert command.returncode == code
    assert re.fullmatch(message + "\n", err)
    assert shown == beginning
    assert len(ranks) == 2
    for rank in ranks:
        wait_until(lambda rank=rank: not Path(f"/proc/{rank}").exists())  # type: ignore[misc]


def test_texts_that_are_done_are_there_when_it_is_interrupted(endless: Path) -> None:
    text = continued(endless, PROMPT)
    first = f"==> 1 of 2: {PROMPT} <==\n{text[:-2]}\n"
    with in_the_middle(
        endless, "--prompt", "sleeping", "--max-batch", "1", "--stop", text[-2:]
    ) as command:
        assert command.stdout is not None
        shown = command.stdout.read(len(first))
        command.send_signal(signal.SIGINT)
        rest, err = command.communicate(timeout=PATIENCE)
    assert (shown, rest) == (first, "")
    assert err.startswith("interrupted")


class Bytes:
    """A tokenizer of one byte per token, so that characters come in pieces."""

    def decode(
        self, tokens: list[int], skip_special_tokens: bool, clean_up_tokenization_spaces: bool
    ) -> str:
        assert skip_special_tokens
        assert not clean_up_tokenization_spaces
        return bytes(tokens).decode(errors="replace")


def test_characters_come_whole() -> None:
    text = Continuation(Bytes(), list(b"caf"))
    assert [text.add(token) for token in "é — x".encode()] == ["", "é", " ", "", "", "—", " ", "x"]
    assert text.add(0xE2) == ""
    assert text.rest() == "\ufffd"


@pytest.mark.parametrize(
    "options", [[], ["--tp", "2", "--draft", "lookup", "--draft-tokens", "2"]], ids=str
)
def test_prompts_in_the_chat_template(
    options: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = chat_checkpoint(tmp_path / "chat")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = []
    for prompt in PROMPTS[:2]:
        messages = [{"role": "system", "content": "the dog"}, {"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)[
            "input_ids"
        ]
        model = AutoModelForCausalLM.from_pretrained(folder)
        tokens = model.generate(torch.tensor([ids]), max_new_tokens=NEW, do_sample=False)[0, len(ids) :]
        texts.append(tokens.tolist())
    found = records(capfd, folder, PROMPTS[:2], "--chat", "--system", "the dog", *options)
    assert [one["tokens"] for one in found] == texts
    assert [one["prompt"] for one in found] == PROMPTS[:2]


def test_chats_that_cannot_be(tiny_checkpoint: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for options, said in (
        (["--system", "a"], r"ask for chat \(--chat\)"),
        (["--chat"], "tiny-llama has no chat template"),
    ):
        assert generate(tiny_checkpoint, *options) == 1
        assert re.search(said, capfd.readouterr().err)
