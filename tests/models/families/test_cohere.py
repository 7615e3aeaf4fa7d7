"""Command R+, which norms every head of queries and keys with gains of its own, where others of its family do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import surgeon
from surgeon.checkpoint.forms import lay_out
from surgeon.language.program import Program
from surgeon.models.edit import edit, restore
from surgeon.models.families import family_of
from surgeon.runtime.model.attending import centre_heads
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.worker.rank import RankOptions
from surgeon.runtime.worker.ranks import Ranks
from surgeon.testing import FamilyContract
from surgeon.testing.sublayers import LAYERS
from tests.checkpoint.helpers import IDS, load_shipped, logits_of, plain_logits, relative_error
from tests.reference import Reference
from tests.runtime.on_ranks import logits_in_chunks
from tests.selection import case
from tests.tiny_models import tiny_model

CHUNKS = list(IDS.split([5, 1, IDS.shape[1] - 6], 1))
PROGRAMS = (
    "[A0 F0] [A1 A2 F1 F2] >[A3 F3]",
    "{A0/2:0 F0/2:0 | A0/2:1 F0/2:1} A1~A2 F2 A3#1 F3",
    "A0@q5,k3,v4 F0 >A1@k7 [F1 A2/2:0 A2/2:1]",
)


def command_r_plus(ranks: int = 1) -> PreTrainedModel:
    heads = {"num_key_value_heads": max(2, ranks)}
    model: PreTrainedModel = tiny_model("cohere", LAYERS, use_qk_norm=True, attention_bias=True, **heads)
    return model


@pytest.mark.thorough
class TestCommandRPlus(FamilyContract):
    @pytest.fixture(scope="class")
    def family_model(self) -> PreTrainedModel:
        return command_r_plus()

    def plain(self, model: PreTrainedModel) -> Reference:
        return Reference(model)


@pytest.mark.parametrize("number", [case(1, default=False), 2, case(4, default=False)])
def test_ranks(number: int, tmp_path: Path) -> None:
    model = command_r_plus(number)
    model.save_pretrained(tmp_path)
    programs = PROGRAMS if number < 4 else PROGRAMS[:1]  # the others have slices of fewer KV heads
    ways = [
        (program, kv) for program in programs for kv in ("full", "lowrank")[: 1 + ("k3,v4" in program)]
    ]
    with Ranks(RankOptions(number)) as ranks:
        for program, kv in ways:
            expected = plain_logits(model, program)
            plan = make_plan(tmp_path, number, IDS.shape[1], program, kv=kv, sliced=number > 1)
            for logits, _, _ in ranks.call(logits_in_chunks, plan, CHUNKS):
                assert relative_error(logits, expected) < 1e-4


@pytest.mark.parametrize("program", [case(one, default=at == 1) for at, one in enumerate(PROGRAMS)])
def test_exports(program: str, tmp_path: Path) -> None:
    """In the program form only: ranks of other software would have gains of others' heads."""
    model = command_r_plus()
    expected = plain_logits(model, program)
    assert relative_error(logits_of(edit(model, program)), expected) < 1e-5
    restore(model).save_pretrained(tmp_path / "source")
    assert surgeon.export(tmp_path / "source", tmp_path / "out", program=program).form == "program"
    assert relative_error(logits_of(load_shipped(tmp_path / "out")), expected) < 1e-5
    assert relative_error(logits_of(surgeon.load(tmp_path / "out")), expected) < 1e-5
    with pytest.raises(ValueError, match="a gain for each head"):
        lay_out(
            Program.parse("[A0 F0] [A1 A2 F1 F2] [A3 F3]"),
            family_of(model.config),
            model.config,
            "fused",
        )


def test_centred_matrices_norm_as_layer_norms_do() -> None:
    """Ranks take the mean out of matrices, once, where the class takes it out of every head."""
    model = command_r_plus()
    attention, x = model.model.layers[0].self_attn, torch.randn(3, 32)
    heads = attention.q_proj(x).unflatten(-1, (-1, 8))
    made = centre_heads({"q.weight": attention.q_proj.weight, "q.bias": attention.q_proj.bias}, 8)
    own = (x @ made["q.weight"].T + made["q.bias"]).unflatten(-1, (-1, 8))
    normed = (
        own
        * torch.rsqrt(own.square().mean(-1, True) + model.config.layer_norm_eps)
        * attention.q_norm.weight
    )
    torch.testing.assert_close(normed, attention.q_norm(heads))
