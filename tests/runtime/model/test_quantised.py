"""Ranks that read quantised weights, each its own slices, against one process with the numbers that they stand for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from surgeon.exports.in_memory import edit
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.worker.rank import RankOptions
from surgeon.runtime.worker.ranks import Ranks
from tests.checkpoint.helpers import save_source
from tests.quantised import quantise_folder
from tests.runtime.on_ranks import logits_in_chunks
from tests.tiny_models import VOCABULARY

PROGRAMS = ("A0 F0 A1 F1", "[A0 A1] [F0 F1]", "A0~A1 F0/2:1 >F1@up8")
IDS = torch.randint(2, VOCABULARY, (2, 8), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module", params=[2, 3], ids="{} ranks".format)
def ranks(request: pytest.FixtureRequest) -> Ranks:
    with Ranks(RankOptions(request.param)) as started:
        yield started  # type: ignore[misc]


@pytest.mark.filterwarnings("ignore:the weights of")
@pytest.mark.thorough
@pytest.mark.parametrize("scheme", ["fp8", "gptq", "awq", "nf4"])
def test_parity(ranks: Ranks, scheme: str, tmp_path: Path) -> None:
    from surgeon.opened import load

    save_source(tmp_path / "quantised", num_layers=2)
    folder = quantise_folder(tmp_path / "quantised", scheme, tmp_path / "dense")
    dense = load(tmp_path / "dense")
    for program in PROGRAMS:
        plan = make_plan(folder, len(ranks.pids), 20, program)
        logits, *_ = ranks.call(logits_in_chunks, plan, [IDS[:, :6], IDS[:, 6:]])[0]
        with torch.no_grad():
            expected = edit(dense, program)(input_ids=IDS, use_cache=False).logits
        assert (logits - expected).abs().max() < 1e-4 * expected.abs().max(), program


def test_it_is_said(tmp_path: Path) -> None:
    save_source(tmp_path / "quantised", num_layers=2)
    with pytest.warns(
        UserWarning, match="stored as GPTQ of 4 bits in groups of 16 are dequantised .* in float32"
    ):
        make_plan(quantise_folder(tmp_path / "quantised", "gptq"), 2, 20)
