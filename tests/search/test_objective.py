"""What a search minimises, against full logits of the edited model; and that the original is run once only."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn import functional

from surgeon.model import edit, restore
from surgeon.program import Program
from surgeon.quality.data import Windows
from surgeon.search import objective
from surgeon.search.objective import divergence_on
from surgeon.search.space import pairs_program
from tests.models import tiny_model

IDS = torch.randint(3, 90, (3, 16), generator=torch.Generator().manual_seed(5))


def logits_of(model: torch.nn.Module, program: Program) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = edit(model, program)(input_ids=IDS).logits[:, :-1]  # type: ignore[arg-type]
    restore(model)  # type: ignore[arg-type]
    return logits.double()


def test_divergence_and_perplexity_equal_those_of_full_logits() -> None:
    model = tiny_model("llama", num_layers=4)
    ran: list[float] = []
    measure = divergence_on(model, Windows(IDS, "ids", "digest"), ran=ran.append)
    dense, paired = Program.dense(4), pairs_program((1,), 4)
    original, changed = (logits_of(model, program).log_softmax(-1) for program in (dense, paired))
    per_window = functional.kl_div(changed, original, reduction="none", log_target=True).sum(-1).mean(-1)
    nll = functional.nll_loss(changed.flatten(0, 1), IDS[:, 1:].flatten())
    found = measure([paired])[paired]
    torch.testing.assert_close(found.divergence, per_window.mean().item(), rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(found.perplexity, nll.exp().item(), rtol=1e-5, atol=0)
    spread = per_window.std() / 3**0.5 * 4.302653  # Student's t for 95% and 2 degrees of freedom
    torch.testing.assert_close(found.divergence_high - found.divergence, spread.item(), rtol=1e-3, atol=0)
    assert found.tokens == 3 * 15
    assert sum(ran) == 8 + 6  # the original, and the pair on top of the first layer that both share
    other = pairs_program((2,), 4)
    assert measure([other])[other].divergence > 0
    assert sum(ran) == 14 + 8  # not the original again


def test_one_window_has_no_interval() -> None:
    paired = pairs_program((1,), 4)
    found = divergence_on(tiny_model("llama"), Windows(IDS[:1], "ids", "digest"))([paired])[paired]
    assert found.divergence > 0
    assert math.isnan(found.divergence_low)
    assert math.isnan(found.divergence_high)


def test_an_edited_model_is_refused() -> None:
    model: Any = edit(tiny_model("llama"), "A0 F0 A2 F2")
    with pytest.raises(ValueError, match="edited program"):
        divergence_on(model, Windows(IDS, "ids", "digest"))


def test_windows_are_run_together_as_the_first_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the original would be run again, and kept twice, whenever memory leaves room for more."""
    room = iter([2, 3, 1])
    monkeypatch.setattr(objective, "windows_at_once", lambda *_: next(room))
    ran: list[float] = []
    measure = divergence_on(tiny_model("llama"), Windows(IDS, "ids", "digest"), ran=ran.append)
    costs = []
    for first in (1, 2, 0):
        ran.clear()
        measure([pairs_program((first,), 4)])
        costs.append(sum(ran))
    assert costs == pytest.approx([14, 8, 8 + 8 * 2 / 3])  # the third time, two of the windows had been together


def test_the_original_is_at_no_distance_from_itself() -> None:
    model = tiny_model("llama", num_layers=2)
    dense = Program.dense(2)
    assert divergence_on(model, Windows(IDS, "ids", "digest"))([dense])[dense].divergence == 0
