"""What choices come to computes what their equations say, measured together as searches do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from surgeon.analysis.engine.measure import MeasureOptions, measure
from surgeon.analysis.engine.sharing import share
from surgeon.language.program import Program
from surgeon.models.edit import program_of
from surgeon.opened import Model
from surgeon.searches.mixture import Mixture
from surgeon.searches.spaces import SPACES, parse_spaces
from surgeon.testing.spaces import drawn_choices
from tests.checkpoint.helpers import plain_logits
from tests.tiny_models import VOCABULARY, tiny_model

IDS = torch.randint(3, VOCABULARY, (3, 12), generator=torch.Generator().manual_seed(0))
OVERRIDES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "gpt_neox": {},
}


def plain_divergence(model: Any, program: Program) -> torch.Tensor:
    """KL(original || changed) of every predicted token, in nats."""
    original, changed = (
        torch.log_softmax(plain_logits(model, str(each), IDS).double()[:, :-1], dim=-1)
        for each in (program_of(model), program)
    )
    return (original.exp() * (original - changed)).sum(-1)


@pytest.mark.parametrize("family", OVERRIDES)
def test_mixtures_are_measured_as_their_equations_say(family: str) -> None:
    model = tiny_model(family, 4, **OVERRIDES[family])
    mixture = Mixture(parse_spaces(",".join(SPACES)), Model.of_config(model.config, "tiny"))
    programs = list(dict.fromkeys(mixture.program(choice) for choice in drawn_choices(mixture, 10)))
    found = measure(model, IDS, share([program_of(model), *programs]), MeasureOptions(at_once=3))
    measured = {each.program: each.quality["divergence"] for each in found}
    assert len(programs) > 5
    for program in programs:
        expected = plain_divergence(model, program).mean(-1)
        assert expected.max() > 1e-4
        torch.testing.assert_close(
            measured[program].double(), expected, rtol=1e-3, atol=1e-6, msg=str(program)
        )
