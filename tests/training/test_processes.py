"""Two processes reach what one reaches: replicas of an edited model (DDP), and its parameters shared out (FSDP)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests import warm
from tests.processes.test_torchrun import free_port
from tests.selection import case
from tests.training.process import main
from tests.waiting import PATIENCE

REPOSITORY = Path(__file__).parents[2]
PAIRED = "A0 F0 [A1 A2] [F1 F2]"
DERIVED = "{A0/2:0 F0/2:0 | A0/2:1 F0/2:1} A1~A2 >F1 A2@q4"
CODE = "import sys; from tests.training.process import main; main(*sys.argv[1:])"


def together(*arguments: str) -> None:
    """Two processes as torchrun starts them."""
    shared = os.environ | {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(free_port()), "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    started = [
        warm.Popen(
            [*warm.CODE, CODE, *arguments],
            env=shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    for process in started:
        said, _ = process.communicate(timeout=PATIENCE)
        assert process.returncode == 0, said


def require_alike(one: Path, two: Path) -> None:
    """The same curves, and the same weights at the end, to what sums in another order differ by."""
    for name, columns in (("training.csv", ["step", "loss", "logits"]), ("held_out.csv", ["perplexity", "divergence"])):
        expected, found = (pd.read_csv(folder / name)[columns].to_numpy().ravel() for folder in (one, two))
        assert found.tolist() == pytest.approx(expected.tolist(), rel=1e-5), name
    expected_norms, norms = (json.loads((folder / "norms.json").read_text()) for folder in (one, two))
    assert norms == pytest.approx(expected_norms, rel=1e-5)


@pytest.mark.parametrize(
    ("sharded", "program", "lora", "hidden"),
    [
        ("ddp", PAIRED, "2", "0.5"),
        case("fsdp", PAIRED, "0", "0.5", default=False),  # the next one has all of it
        ("fsdp", DERIVED, "0", "0"),
        ("fsdp", PAIRED, "2", "0"),
    ],
)
def test_two_processes_reach_what_one_does(sharded: str, program: str, lora: str, hidden: str, tmp_path: Path) -> None:
    main(str(tmp_path / "one"), "no", program, lora, hidden)
    together(str(tmp_path / "two"), sharded, program, lora, hidden)
    require_alike(tmp_path / "one", tmp_path / "two")


@pytest.mark.long
@pytest.mark.thorough
def test_the_command_under_torchrun(tmp_path: Path, tiny_checkpoint: Path, tiny_text: Path) -> None:
    """As users start it, with a checkpoint at the end that only the first process writes."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "surgeon.cli"]
    command = ["heal", str(tiny_checkpoint), "--program", "A0 F0 [A1 A2] [F1 F2] A3 F3", "--data", str(tiny_text)]
    quick = ["--window", "8", "--eval-tokens", "16", "--batch", "2", "--steps", "2", "--trainer-arg", "fsdp=true"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MASTER_PORT": str(free_port())}
    done = subprocess.run(
        [*torchrun, *command, *quick, "-o", str(tmp_path / "healed")],
        env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(tmp_path / "healed")
    assert done.stderr.count("healed   perplexity") == 1
    assert (tmp_path / "healed" / "surgeon.json").is_file()
