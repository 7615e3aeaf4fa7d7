"""Whatever a configuration says, all ways to run a model and a program give the numbers of a plain computation.

A few cases of most families run in the suite, always the same; `./scripts/test tests/test_drawn.py --cases 300` draws
so many of each, others every time.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from transformers import AutoModelForCausalLM

import surgeon
from surgeon.analysis.engine.machine import PlanMachine, run_plan
from surgeon.analysis.engine.sharing import share
from surgeon.exports.export import plan_export, write_export
from surgeon.exports.in_memory import edit
from surgeon.language.program import Program
from surgeon.models.edit import program_of, restore
from surgeon.models.families import family_of
from surgeon.opened import load_streamed, open_model
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.worker.rank import RankOptions
from surgeon.runtime.worker.ranks import Ranks
from tests.checkpoint.helpers import IDS, load_shipped, logits_of, plain_logits, relative_error
from tests.drawn import DTYPES, Case, cases
from tests.runtime.on_ranks import logits_in_chunks
from tests.selection import case
from tests.tiny_models import DENSE_FAMILIES

TOLERANCE = 1e-4
# Families whose layers are those of another one with other flags, which cases draw.
# Others are flags of these, or like them.
BY_DEFAULT = ("llama", "gpt2", "gpt_neox", "gemma3_text", "opt", "olmo3")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(RankOptions(2)) as started:
        yield started


@pytest.mark.parametrize(
    "family", [case(family, default=family in BY_DEFAULT) for family in DENSE_FAMILIES]
)
def test_all_paths_agree(family: str, ranks: Ranks, drawn_settings: settings) -> None:
    @drawn_settings
    @given(case=cases(family))
    def check(case: Case) -> None:
        with tempfile.TemporaryDirectory() as folder:
            check_all_paths(case, Path(folder), ranks)

    check()


@pytest.mark.parametrize(
    "program", ["A0 F0 [A1 A2] [F1 F2] A3 F3", "A0 F0@up8 {A1/2:0 F1/2:0 | A1/2:1 F1/2:1} A2~A3 F3#24"]
)
def test_norms_without_gains_and_shifts(program: str, ranks: Ranks, tmp_path: Path) -> None:
    check_all_paths(
        Case("opt", 4, 0.0, "float32", program, {"layer_norm_elementwise_affine": False}),
        tmp_path,
        ranks,
    )


def check_all_paths(case: Case, folder: Path, ranks: Ranks) -> None:
    """Compare what every path makes of the case's program with what tests/reference.py does."""
    model = case.model()
    stock = logits_of(model)
    assert torch.equal(logits_of(edit(model, program_of(model))), stock)
    expected = plain_logits(restore(model), case.program)
    agrees(logits_of(edit(model, case.program)), expected)
    source = folder / "source"
    restore(model).to(DTYPES[case.dtype]).save_pretrained(source)
    agrees(streamed(source, case.program), expected)
    write_export(
        plan_export(open_model(source), Program.parse(case.program), dtype="float32"), folder / "target"
    )
    agrees(logits_of(as_a_user_loads(folder / "target")), expected)
    agrees(logits_of(surgeon.load(folder / "target")), expected)
    chunks = list(IDS.split([5, 1, 3], 1))
    for place, program in ((source, case.program), (folder / "target", None)):
        plan = make_plan(place, 2, IDS.shape[1], program, dtype="float32")
        for logits, _, _ in ranks.call(logits_in_chunks, plan, chunks):
            agrees(logits, expected)


def agrees(found: Tensor, expected: Tensor) -> None:
    assert relative_error(found.float(), expected) < TOLERANCE


def streamed(folder: Path, program: str) -> Tensor:
    """Logits as a scan of a model that is larger than memory computes them."""
    model = load_streamed(folder)
    ((_, stream),) = run_plan(share([Program.parse(program)]), PlanMachine(model, IDS))
    family = family_of(model.config)
    with torch.no_grad():
        logits: Tensor = model.get_submodule(family.head)(model.get_submodule(family.final_norm)(stream))
    scale = family.scales.logits(model.config)
    logits = logits if scale is None else logits * scale
    attribute = family.scales.logit_cap
    cap = None if attribute is None else getattr(model.config, attribute)
    return logits if cap is None else (logits / cap).tanh() * cap


def as_a_user_loads(folder: Path) -> Any:
    """By the stock class, or by the modeling file that lies in the folder."""
    if json.loads((folder / "surgeon.json").read_text())["form"] == "plain":
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return load_shipped(folder)
