"""What operations declare, and that scans, benches, help texts and reports go by nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

import surgeon.language.operations
from surgeon.analysis.scan import SCANNED, check_operations, select, selected_cells
from surgeon.analysis.similarity import readers
from surgeon.findings.scan import Scan, changed_layers
from surgeon.language.operations.base import (
    HEATMAPS,
    OPERATIONS,
    VARIANTS,
    Heatmap,
    Variant,
    find_stretch,
    operation,
)
from surgeon.language.operations.variants import is_variant, variant, variant_names
from surgeon.language.program import Program
from surgeon.language.recipe import parse_recipe
from tests.analysis.scanning import scan_cells
from tests.findings.read_page import page_of
from tests.findings.run_folders import make_scan

PACKAGE = Path(surgeon.language.operations.__file__).parent


@pytest.fixture
def rotate() -> Iterator[None]:
    """An operation that nothing but these lines knows: every group of layers begins at another one of its own."""
    before = {name: dict(table) for name, table in TABLES.items()}

    @operation(
        heatmaps={
            "rotate-pairs": Heatmap(
                "Rotate pairs", {"size": 2, "seed": 0}, place=0, group=2, curves=True, verb="turn"
            ),
            "rotate": Heatmap("Rotate"),
        },
        variants={
            "rotated:S": Variant(argument="size", meaning="how many layers a group has", over="fused")
        },
    )
    def rotate(program: Program, layers: range, size: int = 3, seed: int = 0) -> Program:
        """Turn groups."""
        steps = 1 if len(program.nodes[0].sublayers) > 1 else 2  # type: ignore[union-attr]
        order = [start + (k + 1 + seed) % size for start in layers[::size] for k in range(size)]
        stretch = find_stretch(program, layers)
        moved = (program.nodes[k * steps : (k + 1) * steps] for k in order if k in layers)
        return stretch.replaced_by(*(node for nodes in moved for node in nodes))

    yield
    for name, table in TABLES.items():
        table.clear()
        table.update(before[name])


TABLES: dict[str, dict] = {"operations": OPERATIONS, "heatmaps": HEATMAPS, "variants": VARIANTS}  # type: ignore[type-arg]


def test_the_tables_are_as_they_were_before_operations_declared_them() -> None:
    assert list(HEATMAPS) == [
        "shuffle",
        "prune",
        "merge",
        "parallel",
        "2-parallel",
        "3-parallel",
        "lp",
        "ladder",
        "prune-attention",
        "prune-mlp",
        "lowrank",
        "repeat",
        "width-heads",
        "width-neurons",
        "experts",
    ]
    assert tuple(HEATMAPS)[:5] == SCANNED
    assert [name for name, heatmap in HEATMAPS.items() if heatmap.is_seeded] == ["shuffle"]
    varied = {name: heatmap.varied for name, heatmap in HEATMAPS.items() if heatmap.varied}
    assert varied == {
        "lowrank": "keep",
        "width-heads": "heads",
        "width-neurons": "neurons",
        "experts": "drop",
    }
    assert {name: heatmap.group for name, heatmap in HEATMAPS.items() if heatmap.curves} == {
        "2-parallel": 2,
        "lp": 2,
        "ladder": 1,
    }
    styles = [
        "lp",
        "prune",
        "prune-attention",
        "prune-mlp",
        "merge",
        "parallel",
        "2-parallel",
        "3-parallel",
    ]
    assert [HEATMAPS[name].style for name in styles] == list(range(8))
    assert {name: heatmap.verb for name, heatmap in HEATMAPS.items() if heatmap.verb} == {
        "prune": "remove",
        "lp": "pair",
    }
    names = (
        "dense",
        "lp",
        "ladder",
        "ladder-over-lp",
        "fused",
        "tracks:D",
        "desync",
        "halves",
        "upper-bound",
    )
    assert variant_names() == names


@pytest.mark.usefixtures("rotate")
def test_one_declaration_is_all_a_scan_needs() -> None:
    assert check_operations(["rotate", "rotate-pairs", "lp"]) == ["rotate-pairs", "lp", "rotate"]
    cells = {
        (c.operation, c.first, c.last): c for c in scan_cells(["rotate", "rotate-pairs"], 4, seed=5)
    }
    assert str(cells["rotate-pairs", 0, 3].program) == "A1 F1 A0 F0 A3 F3 A2 F2"
    assert cells["rotate-pairs", 0, 3].seeds == ()
    selection = select(["rotate"], 3, permutations=3)
    (whole,) = (c for c in selected_cells([selection], 3, seed=1) if (c.first, c.last) == (0, 2))
    assert len(whole.seeds) == len(whole.programs) == 3
    assert str(whole.program) == "A2 F2 A0 F0 A1 F1"
    assert readers("rotate-pairs", 0, 2, 4) == [1]
    assert (HEATMAPS["rotate-pairs"].group, changed_layers("rotate-pairs", 0, 2)) == (2, 2)


@pytest.mark.usefixtures("rotate")
def test_one_declaration_is_all_a_bench_needs() -> None:
    assert "rotated:S" in variant_names()
    assert is_variant("rotated:2")
    assert not is_variant("rotated")
    dense = Program.dense(4)
    assert str(variant("rotated:2", dense, range(0, 4), 1)) == "[A1 F1] [A0 F0] [A3 F3] [A2 F2]"
    for name in ("rotated:S", "rotated:0"):
        with pytest.raises(
            ValueError,
            match=f"^{name} of layers 0:4: write how many layers a group has, as in rotated:4",
        ):
            variant(name, dense, range(0, 4), 1)


@pytest.mark.usefixtures("rotate")
def test_one_declaration_is_all_a_report_needs(tmp_path: Path) -> None:
    assert HEATMAPS["rotate-pairs"].title == "Rotate pairs"
    page = page_of(make_scan(tmp_path / "scan", ("rotate-pairs", "rotate"), 6)).html
    assert "Rotate pairs: where the stretch ends" in page
    assert "no measured way to turn" in page
    cells = pd.DataFrame(
        [("rotate-pairs", 0, last, 10.0 + last, 0.1, 100) for last in range(4)],
        columns=["operation", "first", "last", "perplexity", "divergence", "tokens"],
    )
    assert "curves-rotate-pairs" in Scan(cells, 9.0).pictures()


@pytest.mark.usefixtures("rotate")
def test_one_declaration_is_all_a_recipe_needs() -> None:
    text = 'surgeon: 1\nmodel: demo\noperations:\n  - rotate: {layers: "0:2", size: 2}\n'
    assert str(parse_recipe(text).program(2)) == "A1 F1 A0 F0"
    assert {*OPERATIONS["rotate"].heatmaps, *OPERATIONS["rotate"].variants} == {
        "rotate",
        "rotate-pairs",
        "rotated:S",
    }


@pytest.mark.usefixtures("rotate")
def test_names_are_taken_once() -> None:
    def prune(program: Program, layers: range) -> Program:
        raise NotImplementedError

    def other(program: Program, layers: range) -> Program:
        raise NotImplementedError

    for function, declared, present in (
        (prune, {}, "surgeon.language.operations.prune.prune"),
        (other, {"heatmaps": {"lp": Heatmap("Mine")}}, "surgeon.language.operations.pair.pair"),
        (
            other,
            {"variants": {"fused": Variant()}},
            "surgeon.language.operations.fuse_attention_mlp.fuse_attention_mlp",
        ),
    ):
        with pytest.raises(
            ValueError, match=f"cannot be called '.*': {present} is; choose another name"
        ):
            operation(**declared)(function)  # type: ignore[arg-type]
    assert "other" not in OPERATIONS
    assert HEATMAPS["lp"].function is OPERATIONS["pair"].function
    operation()(SimpleNamespace(**vars(OPERATIONS["prune"])).function)  # the same one may come again


def test_a_file_is_all_it_takes(tmp_path: Path) -> None:
    """A module put into the folder is there, in its place in every table, and in the help texts."""
    folder, package = tmp_path / "surgeon", PACKAGE.parents[1]
    (folder / "language" / "operations").mkdir(parents=True)
    for path in [*package.iterdir(), *PACKAGE.parent.iterdir(), *PACKAGE.glob("*.py")]:
        if path not in (PACKAGE.parent, PACKAGE):
            (folder / path.relative_to(package)).symlink_to(path)
    folder = folder / "language"
    (folder / "operations" / "aardvark.py").write_text(
        "from surgeon.language.operations.base import operation\n"
        "from surgeon.language.operations.base import Heatmap, Variant\n"
        '@operation(heatmaps={"ant-eater": Heatmap("Ant eater", note="eats ants")}, variants={"ants": Variant()})\n'
        "def aardvark(program, layers):\n    return program\n"
    )
    script = (
        "from surgeon.commands.app import main\n"
        "from surgeon.language.operations import HEATMAPS, VARIANTS, aardvark, pair\n"
        "print(list(HEATMAPS)[0], list(HEATMAPS)[-1], list(VARIANTS)[-1], callable(aardvark), callable(pair))\n"
        "main(['scan', '--help'])\nmain(['bench', '--help'])"
    )
    environment = {"PYTHONPATH": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert done.stdout.startswith("shuffle ant-eater ants True True\n")
    text = " ".join(done.stdout.split()).replace("- ", "-")  # lines end at hyphens, too
    assert "prune-mlp, lowrank (" in text
    assert ", ant-eater (eats ants), or all; " in text
    assert "desync, ants, halves (itself" in text
