"""What scripts/gpu/check measures: a tiny model on the CPU, and the verdict in words."""

from __future__ import annotations

import subprocess
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
import torch

from scripts.gpu import run, speeds
from scripts.gpu.run import speed_line, verdict
from scripts.gpu.sides import Setup
from scripts.gpu.speeds import Load
from surgeon.runtime.plan.checks import make_plan

SPEEDS = {
    "memory bandwidth": {"rate": 2e12},
    "surgeon, 1 x 64": {
        "batch": 1,
        "seconds": 4e-3,
        "bytes": 6.4e9,
        "peak": 7 << 30,
        "planned": 5 << 30,
    },
    "surgeon, 32 x 1000": {"batch": 32, "seconds": 8e-3, "bytes": 8e9, "planned": 8 << 30},
    "transformers, 1 x 64": {"batch": 1, "seconds": 2e-2},
    "transformers, compiled, 1 x 64": {"batch": 1, "seconds": 5e-3},
}


def test_a_verdict_in_words() -> None:
    first, second, third, last = verdict({"scan": True, "eval": True}, SPEEDS, ["vLLM, 1 x 64"])
    assert first == "2 of 2 comparisons are right"
    assert second == (
        "decoding 1 text behind 64 tokens reaches 80% of the measured bandwidth, is 5.00 times as fast as "
        "transformers, is 1.25 times as fast as transformers, compiled, allocates 1.40 times what the memory plan says"
    )
    assert third == "decoding 32 texts behind 1000 tokens reaches 50% of the measured bandwidth"
    assert last == "not measured: vLLM, 1 x 64"
    wrong = verdict({"scan": False, "eval": True}, {}, [])
    assert wrong == ["1 of 2 comparisons are right, 1 WRONG: scan"]


def test_a_line_of_the_table() -> None:
    assert speed_line("memory bandwidth", SPEEDS).split() == ["memory", "bandwidth", "2000", "GB/s"]
    ours = speed_line("surgeon, 1 x 64", SPEEDS)
    assert ours.split()[4:7] == ["250.0", "4.00", "80%"]
    assert ours.endswith("7.52 GB (5.37 GB)")
    assert speed_line("transformers, 1 x 64", SPEEDS).split()[4:] == ["50.0", "20.00"]


def test_what_the_plan_counts(tmp_path: Path) -> None:
    """Weights, and the cache in whole blocks; on a GPU without kernels copies of keys and values, too."""
    setup = Setup("cpu", 0, str(tmp_path))
    folder, config, load = speeds.model_of(setup), speeds.SMALL, Load(3, 20, 10)
    attention = (
        config.hidden_size
        * config.head_dim
        * (2 * config.num_attention_heads + 2 * config.num_key_value_heads)
    )
    layers = config.num_hidden_layers * (attention + 3 * config.hidden_size * config.intermediate_size)
    weights = layers + config.hidden_size * config.vocab_size
    kept = 2 * config.num_key_value_heads * config.head_dim * 16  # of one block and layer
    plan = make_plan(folder, 1, 30, device="cpu", dtype="float32")
    assert speeds.planned_bytes(plan, "cpu", load) == 4 * (
        weights + 3 * 2 * config.num_hidden_layers * kept
    )


def test_speed_does_not_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A measurement that fails is told apart, and the exit status is 0."""
    child = tmp_path / "child.py"
    child.write_text(
        "import json, sys\nfile = open(sys.argv[3], 'a')\n"
        "for name in sys.argv[4:]:\n"
        "    if name == 'vllm': print(json.dumps({'failed': 'vLLM is not installed'}), file=file); sys.exit(1)\n"
        "    value = {'rate': 1e9}\n"
        "    print(json.dumps({'row': 'memory bandwidth', 'value': value, 'seconds': 1}), file=file)\n"
        "    print(json.dumps({'done': name}), file=file, flush=True)\n"
    )
    monkeypatch.setattr(run, "CHILD", child)
    assert run.main(["--small", "--only", "bandwidth", "vllm"]) == 0
    _, head, first, *lines = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["speed", "tokens/s"]
    assert first.split()[-2:] == ["1", "GB/s"]
    assert [line.split(" not measured: ")[1] for line in lines[:2]] == ["vLLM is not installed"] * 2
    assert lines[2:] == ["0 of 0 comparisons are right", "not measured: vLLM, 1 x 20; vLLM, 2 x 40"]


def test_vllm_runs_by_its_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def ran(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        asked.append((command[2:], options["input"]))
        answers = ["null", "[0.1, [9.0]]", "[0.1, [0.01, 0.02, 0.03]]"]
        return subprocess.CompletedProcess(
            command, 0, "INFO {}\n" + "".join(f"CELL {one}\n" for one in answers)
        )

    monkeypatch.setattr(speeds, "find_spec", lambda name: ModuleSpec(name, None))
    monkeypatch.setattr(subprocess, "run", ran)
    monkeypatch.setattr(speeds, "model_of", lambda _: tmp_path)
    found = dict(speeds.by_vllm(Setup("cpu", 0, str(tmp_path))))
    assert found == {
        "vLLM, 1 x 20": {"batch": 1, "seconds": pytest.approx(0.02)},
        "vLLM, 2 x 40": {"batch": 2, "seconds": pytest.approx(0.02)},
    }
    assert asked[0] == ([str(tmp_path), "1", "26", "1", "--dtype", "bfloat16"], "1 20 2\n1 20 6\n")


@pytest.mark.long
def test_a_tiny_model_on_the_cpu(tmp_path: Path) -> None:
    """Surgeon, also in pairs of layers, and transformers: each load has its row."""
    setup = Setup("cpu", 0, str(tmp_path))
    for name in ("surgeon", "dynamic", "pairs", "transformers"):
        found = dict(speeds.SPEEDS[name][0](setup))
        assert list(found) == speeds.speed_rows(name, "cpu")
        assert all(row["seconds"] > 0 for row in found.values())
        assert [row["batch"] for row in found.values()][:2] == [1, 2]


@pytest.mark.long
@pytest.mark.thorough
def test_transformers_compiled(tmp_path: Path) -> None:
    found = dict(speeds.by_compiled_transformers(Setup("cpu", 0, str(tmp_path))))
    assert list(found) == speeds.speed_rows("compiled", "cpu")
    torch.compiler.reset()
