"""scripts/gpu/decode.py: on the CPU, with a tiny model, in an environment that has what it needs and no more."""

from __future__ import annotations

import re
import subprocess
import venv
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from transformers import LlamaForCausalLM

from scripts.gpu import decode

SCRIPT = Path(decode.__file__)
NEEDED = ("torch", "transformers", "safetensors")
FORBIDDEN = (
    "surgeon",
    "accelerate",
    "datasets",
    "optuna",
    "fastapi",
    "matplotlib",
    "pandas",
    "psutil",
    "scipy",
)


def closure(names: tuple[str, ...]) -> set[str]:
    """Distributions, with everything that they require to be installed beside them."""
    found: set[str] = set()
    open_names = list(names)
    while open_names:
        name = re.sub(r"[-_.]+", "-", open_names.pop()).lower()
        if name in found:
            continue
        try:
            requirements = distribution(name).requires or []
        except PackageNotFoundError:  # for another machine, or left out on purpose
            continue
        found.add(name)
        parsed = [Requirement(text) for text in requirements]
        open_names += [one.name for one in parsed if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that finds nothing but torch, transformers and safetensors with their own requirements."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, symlinks=True, with_pip=False)
    (packages,) = folder.glob("lib/python3*/site-packages")
    for name in closure(NEEDED):
        for file in distribution(name).files or []:
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (packages / top).exists():
                (packages / top).symlink_to(Path(str(distribution(name).locate_file(top))))
    return folder / "bin" / "python"


@pytest.mark.thorough
def test_it_runs_with_nothing_else_installed(bare_python: Path, tmp_path: Path) -> None:
    """Two ranks over gloo included: they are processes of the same bare Python."""
    missing = f"import importlib.util as u; print([n for n in {FORBIDDEN} if u.find_spec(n)])"
    assert subprocess.check_output([bare_python, "-c", missing], text=True, cwd=tmp_path) == "[]\n"
    table = tmp_path / "table.md"
    options = ["--small", "--prompt", "20", "--new", "14", "--rounds", "1", "--batch", "1", "2", "-o", str(table)]
    done = subprocess.run([bare_python, SCRIPT, *options], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == table.read_text()
    head, *rows = [line for line in done.stdout.splitlines() if line.startswith("|") and "--:" not in line]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in rows]
    assert all(len(row) == len(head.strip("|").split("|")) for row in cells)
    assert [row[:2] for row in cells] == [
        ["static passes", "1"],
        ["static passes", "2"],
        ["dynamic passes", "1"],
        ["dynamic passes", "2"],
        ["layers in sequence", "1"],
        ["fused pairs", "1"],
        ["pairs side by side", "1"],
        ["static passes, float32", "3"],
        ["two ranks over gloo, float32", "3"],
    ]
    for row in cells[:7]:
        batch, rate, milliseconds = (float(cell) for cell in row[1:4])
        assert rate == pytest.approx(1000 * batch / milliseconds, rel=0.02, abs=0.1)
    assert [row[-1] for row in cells[7:]] == ["tokens of dynamic passes: yes"] * 2


def test_what_a_pass_reads(tmp_path: Path) -> None:
    """Every weight once but the norms', in float32 here, and keys and values of half the way."""
    shape = decode.SMALL
    texts = decode.Load(3, 20, 10)
    setup = decode.Setup("cpu", shape, [texts], 1)
    dense = decode.open_engine(decode.make_model(tmp_path / "dense", shape, "cpu"), setup, "static")
    fused = decode.open_engine(decode.make_model(tmp_path / "fused", shape.fused(), "cpu"), setup, "static")
    attention = shape.hidden * shape.head_dim * (2 * shape.heads + 2 * shape.kv_heads)
    layer = attention + 3 * shape.hidden * shape.intermediate
    kept = 2 * shape.layers * shape.kv_heads * shape.head_dim * 3 * 25
    expected = 4 * (shape.layers * layer + shape.hidden * shape.vocabulary + kept)
    assert decode.bytes_read(dense, texts) == decode.bytes_read(fused, texts) == expected
    assert fused.plan.layers == 2
    assert decode.continued(dense, texts)[0] != decode.continued(fused, texts)[0]


def test_the_shape_of_three_billion_parameters() -> None:
    with torch.device("meta"):
        models = [LlamaForCausalLM(decode.config_of(shape)) for shape in (decode.LARGE, decode.LARGE.fused())]
    dense, fused = (sum(parameter.numel() for parameter in model.parameters()) for model in models)
    assert 3.1e9 < dense < 3.3e9
    assert dense - fused == decode.LARGE.layers * decode.LARGE.hidden  # half of two norms in each layer


def test_bandwidth_is_that_of_the_faster_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([0.5, 0.2])
    monkeypatch.setattr(decode, "shortest", lambda *_: next(times))
    assert decode.bandwidth("cpu", 4000) == pytest.approx(4000 / 0.2)  # the copy moves 8000 bytes in half a second


def test_different_tokens_fail(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(decode, "agreement", lambda *_: {"static passes": True, "two ranks over gloo": False})
    monkeypatch.setattr(decode, "decode_rows", lambda *_: iter(()))
    monkeypatch.setattr(decode, "pair_rows", lambda *_: iter(()))
    assert decode.main(["--small"]) == 1
    assert "| two ranks over gloo, float32 | 3 | | | | | tokens of dynamic passes: NO |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--small", "--new", "1"], "--new must be at least 2, not 1"),
        (["--small", "--batch", "4", "0"], "--batch must be at least 1, not 0"),
        pytest.param([], "--small", marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")),
    ],
)
def test_options_that_do_not_fit(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        decode.main(arguments)
    assert message in capsys.readouterr().err
