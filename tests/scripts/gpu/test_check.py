"""scripts/gpu/check: the CPU in place of a GPU, what is told from what is right, and processes that fail."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from scripts.gpu import checks as script
from scripts.gpu import run, sides, sixteen_bits
from scripts.gpu.checks import MODELS, checks, sum_each_way, without_kernels
from scripts.gpu.sides import (
    Setup,
    judge_bench,
    judge_error,
    judge_numbers,
    judge_overlap,
    judge_product,
    judge_switch,
    judge_tokens,
)
from scripts.gpu.sixteen_bits import kernels_in_16_bits, rows_in_16_bits
from surgeon.runtime.kernels.build import kernels_used
from surgeon.runtime.kernels.triton.functions import TritonKernels
from surgeon.runtime.worker.rank import Rank, RankOptions
from tests import warm

SCRIPT = Path(run.__file__).with_name("check")
# Stands for child.py: says something of each check, and fails, is killed or hangs in some.
CHILD = r"""
import json, os, signal, sys, time
side, setup, lines, *names = sys.argv[1:]
def tell(**said):
    with open(lines, "a") as file:
        file.write(json.dumps(said) + "\n")
with open(lines + ".started", "a") as file:
    file.write(side + " " + " ".join(names) + "\n")
values = {
    "basics": {"float32 products": {"error": 1e-7}, "cuDNN attention": side == "found"},
    "scan": {"scan": {"merge 3 4": 6.0}},
    "generate": {"generate": {"tokens": [[1, 2]]}},
    "eval": {"eval, factors of files": {"perplexity": 7.0}, "eval, 16 bits": {"perplexity": 6.0}},
    "heal": {"heal, two steps": {"step 2": 8.0}},
}
for name in names:
    if side == "found" and name == "scan":
        tell(failed="CUDA error: an illegal memory access was encountered")
        sys.exit(1)
    if side == "found" and name == "generate":
        print("Segmentation fault", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    for row, value in values.get(name, {}).items():
        tell(row=row, value=value, seconds=0.5)
        if side == "found" and name == "eval":
            time.sleep(60)
    tell(done=name)
"""


class ForkedChild(warm.RankPopen):
    """A process of checks that is a fork, and so are its ranks."""

    def read_command(self, command: Any) -> tuple[str, list[str]] | None:
        if command[1:2] != [str(run.CHILD)]:
            return super().read_command(command)
        return "import sys; from scripts.gpu.child import main; sys.exit(main(sys.argv[1:]))", command[
            2:
        ]


@pytest.fixture
def _children_are_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", ForkedChild)


@pytest.mark.thorough
@pytest.mark.usefixtures("_children_are_forks")
def test_a_few_checks_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "table.txt"
    assert run.main(["--small", "--only", "basics", "passes", "-o", str(table)]) == 0
    said = capsys.readouterr().out
    assert said == table.read_text()
    head, columns, *rows, last = said.splitlines()
    assert head.startswith("the CPU itself, in place of a GPU; surgeon ")
    assert columns.split() == ["what", "expected", "found", "s", "verdict"]
    names = ["float32 products", "cuDNN attention", "passes in bfloat16", "passes in float16"]
    assert [row[:30].strip() for row in rows] == names
    assert all(len(row) <= 90 and row.endswith(" right") for row in rows)
    assert last == "4 of 4 comparisons are right"


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.usefixtures("_children_are_forks")
def test_all_checks_on_the_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    every = checks(Setup("cpu", 0, ""))
    code, said = run.main(["--small", "--only", *every]), capsys.readouterr().out
    assert code == 0, said
    rows = sum(len(one.rows) for one in every.values())
    assert said.splitlines()[-1] == f"{rows} of {rows} comparisons are right"


@pytest.mark.slow
@pytest.mark.thorough
def test_from_the_shell(tmp_path: Path) -> None:
    """In whatever folder, by the Python that is named, and with processes that begin as a user's do."""
    environment = os.environ | {"PYTHON": sys.executable}
    command = [SCRIPT, "--small", "--only", "basics"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1] == "2 of 2 comparisons are right"


def test_processes_that_fail_cost_their_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An error, a signal and one that hangs: each has its words, and what is after it has another process."""
    child = tmp_path / "child.py"
    child.write_text(CHILD)
    monkeypatch.setattr(run, "CHILD", child)
    monkeypatch.setattr(run, "CHECK_SECONDS", 1.5)
    names = ["basics", "generate", "scan", "eval", "heal"]
    work = tmp_path / "work"
    assert run.main(["--small", "--folder", str(work), "--only", *names]) == 1
    *lines, last = capsys.readouterr().out.splitlines()
    rows = {line[:30].strip(): line[30:].split() for line in lines[2:]}
    assert rows["float32 products"] == ["below", "1e-05", "off", "1.0e-07", "off", "0.5", "right"]
    assert rows["cuDNN attention"] == ["off", "on", "0.5", "WRONG"]
    assert " ".join(rows["scan"]) == "CUDA error: an illegal memory access was encountered 0.0 WRONG"
    assert " ".join(rows["generate"]) == "the process was ended by SIGKILL: Segmentation fault 0.0 WRONG"
    assert rows["eval, factors of files"][-1] == "right"
    assert " ".join(rows["eval, 16 bits"]).startswith("was ended after ")
    assert rows["heal, two steps"][-1] == "right"
    names_of_wrong = "cuDNN attention; generate; scan; eval, 16 bits"
    assert last == f"3 of 7 comparisons are right, 4 WRONG: {names_of_wrong}"
    started = [line.split()[1:] for line in (work / "found.jsonl.started").read_text().splitlines()]
    assert started == [names, names[2:], names[3:], names[4:]]
    assert (work / "expected.jsonl.started").read_text().split() == ["expected", MODELS, *names]


def test_what_is_left_when_the_time_is_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--small", "--folder", str(tmp_path), "--only", "scan", "--seconds", "0"]) == 1
    said = capsys.readouterr().out
    assert "on the CPU, scan failed: not run: the time was over" in said
    assert said.splitlines()[-1] == "0 of 1 comparisons are right, 1 WRONG: scan"


def kernels_of(_: Rank) -> str:
    """What computes on a rank."""
    return kernels_used("cpu", "float32")


@pytest.mark.thorough
@pytest.mark.long
def test_kernels_are_off_where_they_shall_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that is started for it says so, and the environment is as before."""
    monkeypatch.setenv("SURGEON_KERNELS", "on")
    seen = []

    def tokens_on(ranks: Any, *_: object, **__: object) -> list[list[int]]:
        seen.append(ranks.call(kernels_of)[0])
        return [[1]]

    monkeypatch.setattr("scripts.gpu.checks._on", tokens_on)
    found = dict(without_kernels(Setup("cpu", 0, str(tmp_path)), "found"))
    assert found.keys() == checks(Setup("cpu", 0, ""))["no-kernels"].rows.keys()
    assert set(seen) == {"none (SURGEON_KERNELS=off)"}
    assert os.environ["SURGEON_KERNELS"] == "on"


@pytest.mark.thorough
def test_kernels_in_16_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Interpreted each is right in both dtypes; one that is two percent off is told."""
    pytest.importorskip("triton", reason="triton is not installed")
    setup, rows = Setup("cpu", 0, ""), rows_in_16_bits()["kernels"]
    expected, found = (dict(kernels_in_16_bits(setup, side)) for side in ("expected", "found"))
    assert expected.keys() == found.keys() == rows.keys()
    assert all(judge(expected[name], found[name]).right for name, judge in rows.items())
    norm = TritonKernels.norm
    monkeypatch.setattr(
        TritonKernels, "norm", lambda *given, **more: [1.02 * one for one in norm(*given, **more)]
    )
    monkeypatch.setattr(sixteen_bits, "KERNELS", {"norm": sixteen_bits.norm, "gate": sixteen_bits.gate})
    found = dict(kernels_in_16_bits(setup, "found"))
    wrong = [name for name in found if not rows[name](expected[name], found[name]).right]
    assert (len(found), wrong) == (4, ["norm in bfloat16", "norm in float16"])


@pytest.mark.parametrize(
    ("gpus", "version", "ways"),
    [
        (0, 22809, {"gloo"}),
        (2, 22809, {"nccl", "gloo"}),
        (1, 22809, {"memory", "gloo"}),
        (1, None, {"memory", "gloo"}),
        (1, 23004, {"nccl", "memory", "gloo"}),
    ],
)
def test_rows_over_nccl_where_it_lets_two_ranks_meet(
    gpus: int, version: int | None, ways: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the library that is loaded; PyTorch tells the version that it was built with."""

    class Library:
        def __init__(self, _: str) -> None:
            if version is None:
                raise OSError("libnccl.so.2: cannot open shared object file")

        def ncclGetVersion(self, pointer: Any) -> None:
            pointer._obj.value = version

    monkeypatch.setattr(sides, "CDLL", Library)
    rows = checks(Setup("cuda", gpus, ""))["ranks"].rows
    assert {row.split(": ")[1] for row in rows} == ways


@pytest.mark.parametrize(
    ("how", "collectives", "shared"),
    [
        ("nccl", "nccl", {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}),
        ("memory", "gloo", {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}),
        ("gloo", "gloo", {}),
    ],
)
def test_bench_has_what_two_ranks_on_one_gpu_need(
    how: str, collectives: str, shared: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Setup, "collectives", (how,))
    monkeypatch.setattr(script.Needs, "plan", lambda *_: None)

    class Started(Exception):
        pass

    def start(options: RankOptions) -> None:
        names = ("NCCL_MULTI_RANK_GPU_ENABLE", "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES")
        assert {name: os.environ[name] for name in names if name in os.environ} == shared
        assert (options.device, options.collectives) == ("cuda", collectives)
        raise Started

    monkeypatch.setattr(script, "Ranks", start)
    with pytest.raises(Started):
        next(script.benched(Setup("cuda", 1, ""), "found"))


@pytest.mark.parametrize(("factor", "error"), [(3, 0.0), (2, 12286.0)])
def test_sums_of_two_ranks(factor: int, error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other rank has twice as much, so that a sum is three times what this one has."""

    class Way(SimpleNamespace):
        def fits(self, _: Tensor) -> bool:
            return True

        def __call__(self, tensor: Tensor, aside: bool) -> None:
            calls.append(aside)
            tensor.mul_(factor)

    calls: list[bool] = []
    ways = [Way(name="one shot"), Way(name="two shots")]
    monkeypatch.setattr(script, "ways_through_memory", lambda *_: ways)
    monkeypatch.setattr(script, "side_stream", lambda _: lambda compute: compute() or (lambda: None))
    monkeypatch.setattr(script, "CudaRecorder", lambda _: lambda compute: compute)
    inner = Mock(rank=0, group=(0, 1), capturable=False)
    rank: Any = SimpleNamespace(collectives=Mock(inner=inner), device="cpu", rank=0)
    found = sum_each_way(rank)
    assert found == {"sum, one shot": {"error": error}, "sum, two shots": {"error": error}}
    assert calls == [True, False] * 2
    rows = checks(Setup("cuda", 1, ""))["sums"].rows
    assert rows.keys() == found.keys()
    assert {judge(None, found[name]).right for name, judge in rows.items()} == {not error}
    assert not checks(Setup("cuda", 2, ""))["sums"].rows


@pytest.mark.parametrize(
    ("judge", "expected", "found", "words", "right"),
    [
        (judge_error(1e-2), [[1.0, 2.0]], [[1.0, 2.001]], "4.5e-04 off", True),
        (judge_error(1e-2), [[1.0, 2.0]], [[1.0, 2.1]], "4.5e-02 off", False),
        (judge_error(1e-2), [[1.0, 2.0]], [[1.0, float("nan")]], "nan off", False),
        (judge_error(1e-2), [[1.0, 2.0]], [[1.0]], "inf off", False),
        (judge_numbers(1e-2), {"a": 2.0, "b": 4.0}, {"a": 2.0, "b": 4.02}, "5.0e-03 off", True),
        (judge_numbers(1e-2), {"a": 2.0}, {"a": 2.1}, "5.0e-02 off", False),
        (judge_numbers(1e-2), {"a": 2.0}, {"a": float("nan")}, "nan off", False),
        (judge_numbers(1e-2), {"a": 2.0, "b": 4.0}, {"a": 2.0, "b": float("nan")}, "nan off", False),
        (judge_numbers(1e-2), {"a": 2.0, "b": 4.0}, {"a": 2.0}, "0.0e+00 off", False),
        (
            judge_tokens,
            {"tokens": [[1, 2], [3, 4]]},
            {"tokens": [[1, 2], [3, 4]], "ms": 2},
            "same, 2 ms each",
            True,
        ),
        (
            judge_tokens,
            {"tokens": [[1, 2], [3, 4]]},
            {"tokens": [[1, 2], [3, 5]]},
            "from token 1 of text 1",
            False,
        ),
        (judge_tokens, {"tokens": [[1, 2], [3, 4]]}, {"tokens": [[1, 2], [3]]}, "3 tokens", False),
        (judge_product, None, {"error": 1e-3}, "1.0e-03 off", False),
        (judge_switch, False, True, "on", False),
        (judge_overlap, math.nan, 0.125, "0.125 ms", True),
        (judge_overlap, math.nan, 0.0, "0 ms", False),
        (judge_overlap, math.nan, math.nan, "nan ms", False),
    ],
)
def test_judges(judge: Any, expected: Any, found: Any, words: str, right: bool) -> None:
    judgement = judge(*json.loads(json.dumps([expected, found])))
    assert words in judgement.found
    assert judgement.right is right


def test_rounding_may_decide_between_tokens_that_are_as_likely() -> None:
    expected = {"tokens": [[1, 2, 3], [4, 5, 6]], "gaps": [[0.1, 1e-5, 0.1], [0.1, 0.1, 0.1]]}
    tie = judge_tokens(expected, {"tokens": [[1, 7, 8], [4, 5, 6]]})
    assert (tie.found, tie.right) == ("the same but for ties", True)
    wrong = judge_tokens(expected, {"tokens": [[1, 7, 8], [4, 5, 9]]})
    assert (wrong.found, wrong.right) == ("others from token 2 of text 1 on", False)


def test_what_a_pass_sends_is_the_same() -> None:
    sent = {"all_reduces": 20, "all_gathers": 2, "bytes": 640, "rate": 3.0}
    assert judge_bench(sent, sent | {"rate": 500.0}).found == "the same, 500 tokens/s"
    other = judge_bench(sent, sent | {"bytes": 1280})
    assert (other.expected, other.found, other.right) == (
        "20+2, 640 bytes",
        "20+2, 1280 bytes, 3 tokens/s",
        False,
    )
    assert not judge_bench(sent, sent | {"rate": float("inf")}).right


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run.main([])
    assert ended.value.code == 2
    assert (
        "no GPU that this PyTorch can use; --small tries the script on the CPU"
        in capsys.readouterr().err
    )
