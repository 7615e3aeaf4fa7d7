"""Two factors in place of a matrix: made once, kept, written and loaded again; and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file

import surgeon
from surgeon.checkpoint.factor_cache import FactorCache, file_name
from surgeon.exports.export import plan_export, write_export
from surgeon.language.program import Program
from surgeon.language.sublayer import Sublayer
from surgeon.models.weights import Factors, Groups, ModelWeights, TruncatedSVD, WeightMatrix
from surgeon.opened import open_model
from tests.checkpoint.helpers import (
    IDS,
    load_shipped,
    logits_of,
    plain_logits,
    relative_error,
    run_export,
    save_source,
)
from tests.tiny_models import save_checkpoint

PROGRAM = "A0@q5,o6 F0@gate9 A1 F1 >A2~A3@k3 F2/2:1@down4"


class Counting(TruncatedSVD):
    """Plain factors, and how often which were made."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[str] = []

    def factors(self, sublayer: Sublayer, role: str, matrix: WeightMatrix) -> Factors:
        self.made.append(file_name(sublayer, role))
        return super().factors(sublayer, role, matrix)


def test_factors_are_made_once_for_the_whole_export(tmp_path: Path) -> None:
    model, source = save_source(tmp_path / "source", dtype=torch.bfloat16), Counting()
    plan = plan_export(open_model(tmp_path / "source"), Program.parse(PROGRAM), factors=source)
    assert source.made == []  # a plan knows shapes only
    proof = write_export(plan, tmp_path / "target")
    assert sorted(source.made) == [
        "A0.o6.safetensors",
        "A0.q5.safetensors",
        "A2~A3.k3.safetensors",
        "F0.gate9.safetensors",
        "F2.down4.safetensors",
    ]
    assert proof.exact < 1e-5 < proof.written < proof.tolerance  # factors are rounded to 16 bits
    assert (
        relative_error(logits_of(load_shipped(tmp_path / "target")), plain_logits(model, PROGRAM)) < 2e-2
    )
    assert {path.name for path in tmp_path.iterdir()} == {"source", "target"}  # no kept factors are left


def test_a_factor_of_another_method_is_what_is_written(tmp_path: Path) -> None:
    """Whatever the source gives, not what the model would give by itself."""

    class Halved(TruncatedSVD):
        def factors(self, sublayer: Sublayer, role: str, matrix: WeightMatrix) -> Factors:
            first, second = super().factors(sublayer, role, matrix)
            return Factors(first / 2, second)

    save_source(tmp_path / "source")
    run_export(tmp_path / "source", tmp_path / "plain", PROGRAM)
    run_export(tmp_path / "source", tmp_path / "halved", PROGRAM, factors=Halved())
    expected = logits_of(surgeon.edit(surgeon.load(tmp_path / "source"), PROGRAM, factors=Halved()))
    assert relative_error(logits_of(load_shipped(tmp_path / "halved")), expected) < 1e-5
    assert relative_error(logits_of(load_shipped(tmp_path / "plain")), expected) > 1e-3


def test_kept_factors_are_read_again(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "source")
    model, source = surgeon.load(folder), Counting()
    first = logits_of(surgeon.edit(model, PROGRAM, factors=FactorCache(source, tmp_path)))
    made = list(source.made)
    assert torch.equal(
        logits_of(surgeon.edit(model, PROGRAM, factors=FactorCache(source, tmp_path))), first
    )
    assert source.made == made
    (tmp_path / "A0.q5.safetensors").write_bytes(b"torn")
    with pytest.raises(ValueError, match=r"A0\.q5\.safetensors"):
        surgeon.edit(model, PROGRAM, factors=FactorCache(source, tmp_path))
    save_file({"first": torch.zeros(5, 32), "last": torch.zeros(32, 5)}, tmp_path / "A0.q5.safetensors")
    with pytest.raises(
        ValueError, match=r"A0\.q5\.safetensors does not hold the two factors of a matrix"
    ):
        surgeon.edit(model, PROGRAM, factors=FactorCache(source, tmp_path))
    save_file(
        {"first": torch.zeros(5, 31), "second": torch.zeros(32, 5)}, tmp_path / "A0.q5.safetensors"
    )
    with pytest.raises(
        ValueError, match=r"factors of q of A0@q5,o6 have the shapes \(5, 31\) and \(32, 5\)"
    ):
        surgeon.edit(model, PROGRAM, factors=FactorCache(source, tmp_path))


def test_a_layer_that_holds_factors_can_be_whole_again(tmp_path: Path) -> None:
    """A program names what is run: a role without a rank is the product of the factors that are stored."""
    for family in ("llama", "gpt2", "phi3", "gpt_neox"):
        save_source(tmp_path / family, family)
        run_export(tmp_path / family, tmp_path / f"{family}-low", "A0@q5,k4 F0@up9 A1 F1")
        model = surgeon.load(tmp_path / f"{family}-low")
        expected = logits_of(model)
        assert "A0@q5,k4" not in dict(model.named_modules())  # its layer holds them itself
        again = surgeon.edit(model, "A0 F0 A1 F1")
        assert relative_error(logits_of(again), expected) < 1e-5
        again.save_pretrained(tmp_path / f"{family}-whole")
        assert torch.equal(logits_of(surgeon.load(tmp_path / f"{family}-whole")), logits_of(again))
        lower = logits_of(surgeon.edit(again, "A0@q5,k4 F0@up3 A1 F1"))
        assert relative_error(lower, expected) > 1e-3


@pytest.mark.parametrize("family", ["gpt2", "phi3", "gpt_neox"])
def test_packed_projections_are_saved_again(family: str, tmp_path: Path) -> None:
    """By the modeling file inside, in the order in which they are packed: writing config.json sorts its entries."""
    save_source(tmp_path / "source", family)
    run_export(tmp_path / "source", tmp_path / "low", "A0@q5,v4 F0@up9 A1 F1")
    model = load_shipped(tmp_path / "low")
    model.save_pretrained(tmp_path / "again")
    shutil.copy(tmp_path / "low" / "modeling_surgeon_program.py", tmp_path / "again")
    assert torch.equal(logits_of(load_shipped(tmp_path / "again")), logits_of(model))


def test_ranks_that_no_matrix_has(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "source")
    for ranked in ("A1@k17", "A0~A1@k17", "A1/2:0@k17"):
        with pytest.raises(ValueError, match=r"rank 17 of k is above that of a matrix of 16 x 32"):
            surgeon.edit(surgeon.load(folder), f"{ranked} F1")
    with pytest.raises(
        ValueError, match=r"A1@q5 has factors in place of matrices, which no stock layer has"
    ):
        plan_export(open_model(folder), Program.parse("A1@q5 F1"), "fused")


def test_numbers_that_are_none_have_no_factors(tmp_path: Path) -> None:
    model = surgeon.load(save_checkpoint(tmp_path / "source"))
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 4] = float("inf")
    with pytest.raises(ValueError, match="up of F1@up5 holds numbers that are not finite"):
        surgeon.edit(model, "A0 F0 F1@up5")


def test_variants_of_a_layer_share_what_they_can() -> None:
    program = Program.parse("A0@q4 F0 A0 F0@up3 A1/2:0@q4 A1/2:1@q4 A1/4:0@q4")
    groups = Groups(program.sublayers(), by_count=False)
    found = [
        (group.layers, str(group.sublayer("A")), str(group.sublayer("F"))) for group in groups.groups
    ]
    assert found == [((0,), "A0@q4", "F0"), ((0,), "A0", "F0@up3"), ((1,), "A1@q4", "F1")]
    assert [groups.place(one) for one in program.sublayers()] == [0, 0, 1, 1, 2, 2, 2]
    apart = Groups(program.sublayers(), by_count=True)
    assert [apart.place(one) for one in program.sublayers()] == [0, 0, 1, 1, 2, 2, 3]


def test_slices_of_stored_factors_are_read_alone(tmp_path: Path) -> None:
    save_source(tmp_path / "source")
    run_export(tmp_path / "source", tmp_path / "low", "A0@q5,o6 F0@up9,down7")
    weights = surgeon.load(tmp_path / "low").model.layers.weights()
    assert isinstance(weights, ModelWeights)
    q, o = (weights.matrix(Sublayer("A", (0,), (1, 2), (("q", 5), ("o", 6))), role) for role in "qo")
    assert (q.shape, o.shape) == ((16, 32), (32, 16))
    layer = surgeon.load(tmp_path / "low").model.layers.layer(0)
    assert torch.equal(q.factors().second, layer.self_attn.q_proj.second.weight[16:])
    assert torch.equal(o.factors().first, layer.self_attn.o_proj.first.weight[:, 16:])
    assert torch.allclose(q.rows(2, 5), q.whole()[2:5])


def test_factors_are_trained_and_come_back(tmp_path: Path) -> None:
    """By adapters on both factors, merged and exported, and in full, through the modeling file inside."""
    save_source(tmp_path / "source")
    run_export(tmp_path / "source", tmp_path / "low", "A0@q5,o6 F0@gate9 >A1 >F1")
    options = LoraConfig(target_modules=["first", "second"], r=2, init_lora_weights=False)
    lora = get_peft_model(surgeon.load(tmp_path / "low"), options).eval()
    expected = logits_of(lora)
    surgeon.export(lora.merge_and_unload(), tmp_path / "merged")
    assert relative_error(logits_of(load_shipped(tmp_path / "merged")), expected) < 1e-5
    trained = load_shipped(tmp_path / "low").train()
    optimizer = torch.optim.SGD(trained.parameters(), lr=1.0)
    trained(input_ids=IDS, labels=IDS).loss.backward()
    layer = trained.model.layers.get_submodule("0")
    assert all(
        layer.self_attn.q_proj.get_submodule(one).weight.grad.abs().sum() > 0
        for one in ("first", "second")
    )
    optimizer.step()
    trained.eval().save_pretrained(tmp_path / "trained")
    after = logits_of(trained)
    assert relative_error(after, logits_of(load_shipped(tmp_path / "low"))) > 1e-3
    shutil.copy(tmp_path / "low" / "modeling_surgeon_program.py", tmp_path / "trained")
    assert torch.equal(logits_of(surgeon.load(tmp_path / "trained")), after)
