"""Random weights for a configuration: they are a model's, the same for all who ask, and ranks have one copy of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from surgeon.checkpoint.random_weights import RandomCheckpoint, open_weights
from surgeon.language.sublayer import Sublayer
from surgeon.runtime.comm.collectives import Alone, Unconnected
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.model.layers import Attention
from surgeon.runtime.plan.checks import make_plan
from tests.checkpoint.helpers import open_random
from tests.tiny_models import tiny_model

IDS = [3, 1, 4, 1, 5, 9, 2, 6]
CPU = torch.device("cpu")


@pytest.fixture(params=["llama", "opt"])
def config(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "config.json"
    entries = tiny_model(request.param, dropout=0.0).config.to_dict() | {"dtype": "float32"}
    path.write_text(json.dumps(entries))
    return path


def test_they_are_those_of_a_model(config: Path) -> None:
    stored = open_random(config)
    model = AutoModelForCausalLM.from_config(stored.config).eval()
    found = {name: stored.checkpoint.tensor(name) for name in stored.checkpoint.names()}
    assert found.keys() == dict(model.named_parameters()).keys()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(found[name])
        expected = model(torch.tensor([IDS])).logits[0]
    engine = RankEngine(make_plan(stored, 1, 32), Alone(), CPU)
    assert torch.allclose(engine.text_logits(IDS), expected, atol=1e-5)
    assert expected.std() > 1e-3


def test_parts_are_those_of_the_whole(config: Path) -> None:
    weights = open_random(config).weights
    whole = weights.matrix(Sublayer("F", (1,)), "up").whole()
    part = weights.matrix(Sublayer("F", (1,), (1, 2)), "up").whole()
    assert torch.equal(part, whole[len(whole) // 2 :])
    assert not torch.equal(whole, weights.matrix(Sublayer("F", (2,)), "up").whole())
    assert torch.equal(
        whole, RandomCheckpoint(config).tensor(weights.matrix(Sublayer("F", (1,)), "up").name)
    )


def test_factors_need_no_matrix(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = open_random(config)
    weights = open_weights(config, stored.family, stored.weights.head_dim)
    whole = weights.matrix(Sublayer("F", (0,)), "up").whole()
    monkeypatch.setattr(RandomCheckpoint, "tensor", None)
    matrix = weights.matrix(Sublayer("F", (0,), ranks=(("up", 16),)), "up")
    assert (matrix.shape, matrix.dtype) == (tuple(whole.shape), whole.dtype)
    product = matrix.whole()
    assert torch.linalg.matrix_rank(product) == 16
    assert product.std() == pytest.approx(float(whole.std()), rel=0.3)
    other = weights.matrix(Sublayer("F", (1,), ranks=(("up", 16),)), "up")
    assert not torch.equal(other.whole(), product)


def test_programs_of_one_model_share_what_they_do_not_change(config: Path) -> None:
    stored = open_random(config)

    def engine(program: str, *beside: RankEngine) -> RankEngine:
        return RankEngine(make_plan(stored, 2, 32, program), Unconnected(1, (0, 1)), CPU, beside)

    dense = engine("A0 F0 A1 F1 A2 F2 A3 F3")
    ladder = engine("A0 F0 >A1 >F1 >A2 >F2 A3 F3", dense)
    assert ladder.model.program.sublayers == dense.model.program.sublayers
    assert ladder.model.vocabulary.head is dense.model.vocabulary.head
    pair = engine("A0 F0 [A1 A2] [F1 F2] A3 F3", dense, ladder)
    shared = dense.model.program.sublayers.keys() & pair.model.program.sublayers.keys()
    assert {str(sublayer) for sublayer, *_ in shared} == {"A0/2:1", "F0/2:1", "A3/2:1", "F3/2:1"}
    assert all(pair.model.program.sublayers[key] is dense.model.program.sublayers[key] for key in shared)
    assert {str(sublayer) for sublayer, *_ in pair.model.program.sublayers.keys() - shared} == {
        "A2",
        "F2",
    }
    attention = pair.model.program.sublayers[Sublayer("A", (2,)), (), None, False]
    assert isinstance(attention, Attention)
    alone = engine("A0 F0 [A1 A2] [F1 F2] A3 F3")
    assert torch.equal(alone.text_logits(IDS), pair.text_logits(IDS))


def test_other_weights_are_not_shared(config: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(config.read_text())
    engines: list[RankEngine] = []
    for path in (config, other):
        engines.append(RankEngine(make_plan(open_random(path), 1, 32), Alone(), CPU, engines))
    assert not set(map(id, engines[0].model.program.sublayers.values())) & set(
        map(id, engines[1].model.program.sublayers.values())
    )
