"""Commands whose ranks torchrun has started: the same text, and an end of all processes whatever happens to one."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from surgeon.commands.app import main
from surgeon.processes.torchrun import (
    HOSTED,
    VARIABLES,
    TorchrunEnvironment,
    ranks_of_this_machine,
    read_environment,
)
from surgeon.runtime.worker.rank import RankOptions, choose_collectives, choose_device
from surgeon.runtime.worker.ranks import Ranks
from tests import warm
from tests.waiting import PATIENCE

REPOSITORY = Path(__file__).parents[2]
PROMPT = "The quick brown fox"
COMMAND = [sys.executable, "-c", "import sys; from surgeon.commands.app import main; sys.exit(main())"]
HOST = socket.gethostname()
# Rank 0 says where it is, and goes on when the other one has come there.
MEET = f"""
import select
from surgeon.processes.rendezvous import rendezvous_at
from surgeon.processes.torchrun import read_environment
assert select.select([rendezvous_at(read_environment())._listener], [], [], {PATIENCE})[0]
"""
PLACE = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}

Start = Callable[..., "subprocess.Popen[str]"]


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts the process of one rank as torchrun would, all of them meeting at the same port."""
    port, started = free_port(), list[subprocess.Popen[str]]()

    def start_one(
        rank: int, *arguments: object, cwd: Path = REPOSITORY, before: str = "", **more: str
    ) -> subprocess.Popen[str]:
        own = PLACE | {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": port}
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY)} | own | more
        *python, code = COMMAND
        command = [*python, f"{before}\n{code}", *map(str, arguments)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        started.append(warm.Popen(command, cwd=cwd, env=environment, text=True, **pipes))
        return started[-1]

    yield start_one
    for process in started:
        process.kill()
        process.communicate()


def ended(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=PATIENCE)
    return process.returncode, out, err


@pytest.fixture
def expected(tiny_checkpoint: Path) -> str:
    """What `transformers` writes after the prompt, with 12 tokens."""
    tokenizer = AutoTokenizer.from_pretrained(tiny_checkpoint)
    model = AutoModelForCausalLM.from_pretrained(tiny_checkpoint)
    ids = torch.tensor([tokenizer(PROMPT).input_ids])
    text = tokenizer.decode(
        model.generate(ids, max_new_tokens=12, do_sample=False)[0], skip_special_tokens=True
    )
    return str(text).removeprefix(PROMPT) + "\n"


def test_two_processes_write_what_one_model_writes(
    start: Start, tiny_checkpoint: Path, expected: str
) -> None:
    arguments = ["generate", tiny_checkpoint, "--prompt", PROMPT, "--max-new-tokens", "12"]
    other, first = start(1, *arguments), start(0, *arguments)
    code, out, err = ended(first)
    assert (code, out) == (0, expected)
    assert "ranks    2 (cpu, gloo, float32)" in err
    assert "8 all-reduces per token, as the program has" in err
    assert ended(other) == (0, "", "")


@pytest.mark.long
@pytest.mark.thorough
def test_under_torchrun_itself(tiny_checkpoint: Path, expected: str) -> None:
    own = {name: value for name, value in os.environ.items() if name not in PLACE}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "2"]
    meeting = ["--master-addr", "127.0.0.1", "--master-port", free_port(), "--no-python"]
    command = [
        *COMMAND,
        "generate",
        tiny_checkpoint,
        "--prompt",
        PROMPT,
        "--max-new-tokens",
        "12",
        "--tp",
        "2",
    ]
    run = subprocess.run(
        [*torchrun, *meeting, *command],
        cwd=REPOSITORY,
        env=own,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert (run.returncode, run.stdout) == (0, expected)
    assert "ranks    2 (cpu, gloo, float32)" in run.stderr


def test_a_server(start: Start, tiny_checkpoint: Path) -> None:
    arguments = ["serve", tiny_checkpoint, "--port", "0", "--served-model-name", "tiny"]
    first, other = start(0, *arguments), start(1, *arguments)
    assert first.stderr is not None
    url = re.fullmatch(r"serving tiny at (http://127.0.0.1:\d+/v1)\n", first.stderr.readline())
    assert url is not None, ended(first)
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3, "temperature": 0}
    request = urllib.request.Request(f"{url[1]}/completions", json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    with urllib.request.urlopen(request, timeout=PATIENCE) as response:
        assert json.load(response)["usage"]["completion_tokens"] == 3
    first.terminate()
    assert ended(first)[0] == 0
    assert ended(other) == (0, "", "")


def endless(folder: Path) -> list[object]:
    """A command that is in the middle of its work for long."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(
        json.dumps(config | {"max_position_embeddings": 8192, "eos_token_id": None})
    )
    (folder / "generation_config.json").write_text('{"eos_token_id": null}')
    return ["generate", folder, "--prompt", PROMPT, "--max-new-tokens", "8000"]


@pytest.mark.parametrize("killed", [0, 1])
def test_a_process_that_is_killed(killed: int, start: Start, tiny_checkpoint: Path) -> None:
    arguments = endless(tiny_checkpoint)
    processes = [start(rank, *arguments) for rank in range(2)]
    assert processes[0].stdout is not None
    assert processes[0].stdout.read(1), ended(processes[0])
    processes[killed].send_signal(signal.SIGKILL)
    code, _, err = ended(processes[1 - killed])  # long before its text would have ended
    assert code == 1
    if killed:
        name = rf"rank 1 \(process {processes[1].pid} on {HOST}\) has gone: it ended, or the connection broke; .*"
    else:
        name = "rank 0 at 127.0.0.1 has gone, and so does rank 1"
    assert re.fullmatch(f"error: {name}\n", err)


def test_a_machine_without_the_checkpoint(start: Start, tiny_checkpoint: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "other-machine"
    elsewhere.mkdir()
    arguments = ["generate", tiny_checkpoint.name, "--prompt", PROMPT]
    first, other = start(0, *arguments, cwd=tiny_checkpoint.parent), start(1, *arguments, cwd=elsewhere)
    code, _, err = ended(first)
    assert code == 1, (code, err)
    assert re.fullmatch(f"error: rank 1 on {HOST} failed: .*{tiny_checkpoint.name}.*\n", err)
    assert ended(other) == (1, "", err)


def test_rank_0_that_never_starts_its_ranks_ends_the_others(start: Start, tiny_checkpoint: Path) -> None:
    arguments = ["generate", tiny_checkpoint, "--prompt", PROMPT, "--program", "A0 F9"]
    other, first = start(1, *arguments), start(0, *arguments, before=MEET)
    assert ended(first) == (1, "", "error: F9 is out of range: the model's layers are 0 to 3\n")
    code, _, err = ended(other)
    assert code == 1, (code, err)
    assert re.fullmatch(r"error: rank 0 at 127.0.0.1.* has (gone|ended).*\n", err)


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets torchrun's variables, changed or (with None) left out, in this process."""

    def set_all(values: Mapping[str, str] = PLACE, **changes: str | None) -> None:
        for name in (*VARIABLES, HOSTED, "TORCHELASTIC_RESTART_COUNT"):
            monkeypatch.delenv(name, raising=False)
        for name, value in {**values, **changes}.items():
            if value is not None:
                monkeypatch.setenv(name, value)

    return set_all


def test_what_a_process_is_told_is_what_it_reads(environment: Callable[..., None]) -> None:
    place = TorchrunEnvironment(3, 4, 1, 2, "127.0.0.1", 29500, hosted=True)
    environment(place.variables())
    assert read_environment() == place


def test_places(environment: Callable[..., None]) -> None:
    environment({})
    assert read_environment() is None
    environment({"MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": "1"})  # which other tools leave behind
    assert read_environment() is None
    assert ranks_of_this_machine(4) == 4
    environment(RANK="3", WORLD_SIZE="4", LOCAL_RANK="1")
    assert read_environment() == TorchrunEnvironment(3, 4, 1, 2, "127.0.0.1", 29500)
    assert ranks_of_this_machine(4) == 2
    environment(
        TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="2", SURGEON_JOIN_SECONDS="7.5"
    )
    assert read_environment() == TorchrunEnvironment(
        0, 2, 0, 2, "127.0.0.1", 29500, hosted=True, attempt=2, patience=7.5
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"RANK": None, "MASTER_PORT": ""},
            "^the environment has WORLD_SIZE=2, but RANK, MASTER_PORT not set; start .* torchrun, or unset WORLD_SIZE",
        ),
        ({"WORLD_SIZE": None}, "^the environment has RANK=0, but WORLD_SIZE not set"),
        ({"LOCAL_WORLD_SIZE": None}, "LOCAL_WORLD_SIZE not set"),
        ({"RANK": "one"}, "^RANK must be a number, not 'one'"),
        ({"RANK": "2"}, "^RANK must be less than WORLD_SIZE, which is 2, not 2"),
        ({"LOCAL_RANK": "5"}, "^LOCAL_RANK must be less than LOCAL_WORLD_SIZE, which is 2, not 5"),
        ({"MASTER_PORT": "70000"}, r"^MASTER_PORT must lie in 1\.\.65535, not 70000"),
        (
            {"SURGEON_JOIN_SECONDS": "soon"},
            "^SURGEON_JOIN_SECONDS must be a number of seconds, not 'soon'",
        ),
        ({"SURGEON_JOIN_SECONDS": "0"}, "^SURGEON_JOIN_SECONDS must be a number of seconds, not '0'"),
    ],
)
def test_variables_that_make_no_sense(
    changes: dict[str, str | None], message: str, environment: Callable[..., None]
) -> None:
    environment(**changes)
    with pytest.raises(ValueError, match=message):
        read_environment()


def test_another_number_of_ranks(
    environment: Callable[..., None], tiny_checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    environment()
    assert main(["generate", str(tiny_checkpoint), "--prompt", PROMPT, "--tp", "3"]) == 1
    message = "3 ranks are asked for, another number than torchrun has started (WORLD_SIZE 2); ask for none, or"
    assert capfd.readouterr() == ("", f"error: {message} for 2\n")
    with pytest.raises(ValueError, match="WORLD_SIZE 2"):
        Ranks(RankOptions(3))
    environment(RANK="1", LOCAL_RANK="1")
    with pytest.raises(
        ValueError, match="this process has RANK 1 of torchrun's, and only that with RANK 0 has ranks"
    ):
        Ranks(RankOptions(2))


def test_ranks_that_do_not_come(
    environment: Callable[..., None], tiny_checkpoint: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    for rank, message in [
        ("0", "rank 1 of 2 did not join rank 0 at 127.0.0.1 within 1 s; .*"),
        ("1", r"rank 1 did not find rank 0 at 127.0.0.1, port \d+, within 1 s; .*"),
    ]:
        environment(RANK=rank, LOCAL_RANK=rank, MASTER_PORT=free_port(), SURGEON_JOIN_SECONDS="1")
        assert main(["generate", str(tiny_checkpoint), "--prompt", PROMPT]) == 1
        out, err = capfd.readouterr()
        assert out == ""
        assert re.fullmatch(f"error: {message}\n", err)


def test_choices_under_torchrun(
    environment: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment(WORLD_SIZE="8")
    assert choose_collectives("auto", "cpu") == "gloo"
    assert choose_collectives("auto", "cuda") == "nccl"
    with pytest.raises(
        ValueError, match="shm connects only ranks that surgeon starts itself; under torchrun use gloo"
    ):
        choose_collectives("shm", "cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto", 8) == "cuda"  # there are two ranks on each machine
    environment({})
    assert choose_device("auto", 8) == "cpu"
