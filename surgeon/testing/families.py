"""The contract of families."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES  # type: ignore[attr-defined]

from surgeon.checkpoint.forms import PROGRAM
from surgeon.exports.export import plan_export, write_export
from surgeon.exports.in_memory import edit
from surgeon.language.program import Program
from surgeon.language.sublayer import KINDS, Sublayer
from surgeon.models.edit import decoder_layers, program_of, restore
from surgeon.models.families import family_of
from surgeon.models.families.specs import Growth
from surgeon.models.routing import route
from surgeon.models.weights import Dense, ModelWeights, ModuleStore, NamedTensors, Tensors, pack_tensors
from surgeon.opened import load, open_model
from surgeon.testing.sublayers import EDITS, LAYERS, Sublayers, logits_of, two_slices


class FamilyContract:
    """Tests of one family, on a small random model of it.

        class TestLlama(FamilyContract):
            @pytest.fixture(scope="class")
            def family_model(self):
                return LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, hidden_size=32, attention_dropout=0.4, ...))

    The model has four layers, more than 5 neurons, and at least 90 tokens in its vocabulary and 32 positions. Give it
    all that the architecture can have: fewer KV heads than heads (both even), windows shorter than 11 tokens, biases;
    dropout in any case; and gains and biases far from 1 and 0, so that those of another layer give other numbers. A
    mixture of experts has four, of which a token goes to two, in layers 1 and 3 at least.

    Attributes:
        drops_out: whether the model drops anything while it trains.
    """

    drops_out: ClassVar[bool] = True

    @pytest.fixture(scope="class")
    def family_model(self) -> PreTrainedModel:
        """The model; the tests edit and restore it."""
        raise NotImplementedError(
            "give a fixture `family_model` that returns a small random model of four layers"
        )

    def plain(self, model: PreTrainedModel) -> Sublayers | None:  # noqa: ARG002 - for those that override it
        """A computation of the model's sublayers from its weights, independent of its modules, if there is one."""
        return None

    @pytest.fixture
    def model(self, family_model: PreTrainedModel) -> PreTrainedModel:
        """The model, unedited and in evaluation mode."""
        model: PreTrainedModel = restore(family_model).eval()
        assert len(decoder_layers(model)) == LAYERS, f"family_model needs {LAYERS} layers"
        return model

    @pytest.fixture
    def ids(self) -> Tensor:
        """Two texts, (2, 11)."""
        return torch.randint(3, 90, (2, 11), generator=torch.Generator().manual_seed(0))

    def test_described_modules_and_units_are_there(self, model: PreTrainedModel) -> None:
        family = family_of(model.config)
        layer = model.get_submodule(family.layers).get_submodule("1")
        shapes = family.layer_shapes(model.config).layer_of(Sublayer("F", (1,)))
        weights = ModelWeights(ModuleStore(model), family, family.head_dim(model.config))
        for kind in KINDS:
            spec = family.spec(kind, 1)
            sublayer = Sublayer(kind, (1,))
            for path in (*spec.stages, *spec.norms.values()):
                layer.get_submodule(path)
            units = family.units(model.config, 1)
            counted = {
                unit: count * family.unit_width(model.config, unit) for unit, count in units.items()
            }
            for projection in spec.projections:
                weight = layer.get_parameter(projection.weight)
                packed = [other for other in spec.projections if other.path == projection.path]
                assert weight.shape[projection.divided_dim - 2] == sum(
                    counted[one.unit] for one in packed
                )
                own = weights.each_expert(sublayer)[0] if projection.stacked else sublayer
                assert shapes.matrices[projection.role] == weights.matrix(own, projection.role).shape
        roles = {projection.role for kind in KINDS for projection in family.spec(kind, 1).projections}
        assert set(shapes.matrices) == roles
        for described in (*family.embeddings, family.final_norm, family.head):
            model.get_submodule(described)

    def test_the_unedited_program_is_the_stock_model_bit_for_bit(
        self, model: PreTrainedModel, ids: Tensor
    ) -> None:
        stock = logits_of(model, ids)
        program = program_of(model)
        assert program == _dense(model)
        assert torch.equal(stock, logits_of(edit(model, program), ids))
        assert program_of(model) == program

    def test_it_trains_and_drops_out_as_the_stock_model_does(
        self, model: PreTrainedModel, ids: Tensor
    ) -> None:
        """Dropout is as in the architecture, draws the same numbers, and is on only while the model trains."""
        stock = _in_training(model, ids)
        assert torch.equal(stock, logits_of(model, ids)) != self.drops_out
        edit(model, _dense(model))
        assert torch.equal(_in_training(model, ids), stock)
        assert torch.equal(logits_of(model, ids), logits_of(restore(model), ids))

    def test_edited_in_training_it_goes_on_training(self, model: PreTrainedModel, ids: Tensor) -> None:
        stock = _in_training(model, ids)
        for mode in (True, False):
            edit(restore(model).train(mode), _dense(model))
            assert {module.training for module in model.modules()} == {mode}
        restore(edit(model, _dense(model)).train())  # and what it was told while edited is not forgotten
        assert {module.training for module in edit(model, _dense(model)).modules()} == {True}
        torch.manual_seed(5)
        assert torch.equal(logits_of(model, ids), stock)

    @pytest.mark.parametrize("name", EDITS)
    def test_edits_equal_their_equations(self, model: PreTrainedModel, ids: Tensor, name: str) -> None:
        edited = _edit(restore(model), name)
        found = logits_of(edited, ids)
        own = Sublayers(restore(edited), ids)
        plain = self.plain(model)
        expected = [
            sublayers.logits(EDITS[name][1](sublayers, sublayers.embed(ids)))
            for sublayers in (own, plain)
            if sublayers is not None
        ]
        for logits in expected:
            _assert_same(found, logits)

    def test_what_cannot_be_sliced_says_so(self, model: PreTrainedModel) -> None:
        if _can_be_sliced(model):
            assert edit(model, two_slices(_dense(model)))
            return
        with pytest.raises(ValueError, match="cannot be sliced: "):
            edit(model, two_slices(_dense(model)))

    @pytest.mark.parametrize(
        ("program", "reason"),
        [
            ("A0 F0~F1", "experts of different layers are not averaged"),
            ("A0 F1#5", "the neurons of a mixture's experts stay"),
            ("A0 F1!e0,e4", "the experts of layer 1 are 0 to 3"),
        ],
    )
    def test_what_mixtures_cannot_have_says_so(
        self, model: PreTrainedModel, program: str, reason: str
    ) -> None:
        if family_of(model.config).mixture is None:
            with pytest.raises(ValueError, match="layer 1 is no mixture"):
                edit(model, "A0 F1!e0,e4")
            return
        with pytest.raises(ValueError, match=reason):
            edit(model, program)

    def test_a_mixture_is_what_its_roles_and_its_routing_say(self, model: PreTrainedModel) -> None:
        family = family_of(model.config)
        spec = family.spec("F", 1)
        whole = Sublayer("F", (1,))
        if spec.mixture is None:
            return
        weights = ModelWeights(ModuleStore(model), family, family.head_dim(model.config))
        tensors = weights.by_role(whole)
        x = torch.randn(1, 9, model.config.hidden_size)
        with torch.no_grad():
            output = model.get_submodule(f"{family.layers}.1.{spec.module}")(x)
        expected = (output[0] if isinstance(output, tuple) else output).flatten(0, -2)
        logits = functional.linear(x[0], tensors["router.weight"], tensors.get("router.bias"))
        chosen, shares = route(
            logits, spec.mixture.routing(model.config), tensors.get("router.correction")
        )
        assert chosen.shape == shares.shape == (9, model.config.num_experts_per_tok)
        found = torch.zeros_like(x[0])
        for token, expert, share in zip(range(9), chosen, shares, strict=True):
            for e, part in zip(expert.tolist(), share, strict=True):
                own = {role: one[e] for role, one in tensors.items() if len(one) == 4}
                read = x[0, token]
                weighs = spec.mixture.weighs_inputs
                found[token] += (
                    _expert(model, own, part * read) if weighs else part * _expert(model, own, read)
                )
        shared = {
            role.removeprefix("shared_"): one
            for role, one in tensors.items()
            if role.startswith("shared_")
        }
        if shared:
            weight = tensors.get("shared_router.weight")
            found += _expert(model, shared, x[0]) * (
                1 if weight is None else torch.sigmoid(x[0] @ weight.T)
            )
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
        again = pack_tensors(tensors, spec, 1)
        stored = model.get_submodule(f"{family.layers}.1").state_dict()
        assert all(torch.equal(tensor, stored[path]) for path, tensor in again.items())

    @pytest.mark.parametrize("name", EDITS)
    def test_cached_generation_equals_uncached(
        self, model: PreTrainedModel, ids: Tensor, name: str
    ) -> None:
        running: Any = _edit(model, name)
        arguments = {
            "attention_mask": torch.ones_like(ids),
            "max_new_tokens": 8,
            "do_sample": False,
            "eos_token_id": None,
        }
        with torch.no_grad():
            cached = running.generate(ids, use_cache=True, **arguments)
            uncached = running.generate(ids, use_cache=False, **arguments)
        assert cached.shape[1] == ids.shape[1] + 8
        assert torch.equal(cached, uncached)

    @pytest.mark.parametrize("program", ["F0 F1", "[F2 F3] >F0"])
    def test_without_attention_positions_go_on_with_the_cache(
        self, model: PreTrainedModel, ids: Tensor, program: str
    ) -> None:
        edit(model, program)
        cache: Any = None
        steps: list[Tensor] = []
        with torch.no_grad():
            whole = logits_of(model, ids)
            for some in ids.split([4, 1, 6], 1):
                out = model(input_ids=some, past_key_values=cache, use_cache=True)
                cache = out.past_key_values
                steps.append(out.logits)
        assert cache.get_seq_length() == ids.shape[1]
        torch.testing.assert_close(torch.cat(steps, 1), whole)

    @pytest.mark.parametrize("name", ["dense", "lp", "par", "ladder", "merge"])
    def test_left_padding_changes_nothing(self, model: PreTrainedModel, ids: Tensor, name: str) -> None:
        growth = family_of(model.config).attention.head_stage(Growth)
        if growth is not None and growth.unturned:
            pytest.skip("queries of stock classes grow by places in the text, padding counted")
        _edit(model, name)
        pad = torch.zeros(2, 3, dtype=torch.long)
        mask = torch.cat([pad, torch.ones_like(ids)], 1)
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        got = logits_of(model, torch.cat([pad, ids], 1), attention_mask=mask, position_ids=positions)
        _assert_same(got[:, pad.shape[1] :], logits_of(model, ids))

    @pytest.mark.parametrize("name", ["shuffle", "prune", "repeat", "lp"])
    def test_per_layer_entries_of_the_config_follow_their_layers(
        self, model: PreTrainedModel, name: str
    ) -> None:
        before = model.config.to_dict()
        order = order_of_attentions(model, name)
        _edit(model, name)
        for key in family_of(model.config).entries.lists:
            if before.get(key) is not None:
                assert getattr(model.config, key) == [before[key][k] for k in order]
        assert model.config.num_hidden_layers == len(order)
        assert restore(model).config.to_dict() == before

    @pytest.mark.parametrize("name", EDITS)
    def test_restoring_gives_everything_back(
        self, model: PreTrainedModel, ids: Tensor, name: str
    ) -> None:
        stock = logits_of(model, ids)
        config = model.config.to_dict()
        weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        restore(_edit(model, name))
        assert model.config.to_dict() == config
        assert program_of(model) == _dense(model)
        after = model.state_dict()
        assert list(after) == list(weights)
        assert all(torch.equal(after[name], tensor) for name, tensor in weights.items())
        assert torch.equal(logits_of(model, ids), stock)

    @pytest.mark.parametrize("kind", KINDS)
    def test_projections_are_found_where_they_are_packed(
        self, model: PreTrainedModel, kind: str
    ) -> None:
        family = family_of(model.config)
        whole = Sublayer(kind, (1,))
        spec = family.spec(kind, 1)
        head_dim = family.head_dim(model.config)
        if spec.mixture is not None:
            return  # whose roles are tested by themselves
        weights = ModelWeights(ModuleStore(model), family, head_dim)
        tensors = weights.by_role(whole)
        for projection in spec.projections:
            module: Any = model.get_submodule(f"{family.layers}.1.{projection.path}")
            matrix = weights.matrix(whole, projection.role)
            name = f"{projection.role}.weight"
            assert isinstance(matrix, Dense)
            x = torch.randn(3, matrix.shape[1])
            with torch.no_grad():
                got = module(x) - (0 if module.bias is None else module.bias)
            own = matrix.features if projection.reads_stream else None
            torch.testing.assert_close(
                x @ tensors[name].T, got if own is None else got[:, own], rtol=1e-4, atol=1e-5
            )
            doubled = tensors | {name: tensors[name] * 2}
            stored = pack_tensors(doubled, spec, weights.unit_width(kind))
            there = NamedTensors(
                {f"{family.layers}.1.{path}": tensor for path, tensor in stored.items()}
            )
            for again, tensor in ModelWeights(there, family, head_dim).by_role(whole).items():
                assert torch.equal(tensor, doubled[again]), again

    @pytest.mark.parametrize("name", ["prune", "merge"])
    def test_a_plain_export_loads_again(
        self, model: PreTrainedModel, ids: Tensor, name: str, tmp_path: Path
    ) -> None:
        """In surgeon, and in `transformers` without it; layers that differ in the config are not merged."""
        model.save_pretrained(tmp_path / "source")
        lists = [getattr(model.config, key, None) for key in family_of(model.config).entries.lists]
        expected = logits_of(_edit(model, name), ids)
        if name == "merge" and any(
            entries is not None and entries[1] != entries[2] for entries in lists
        ):
            with pytest.raises(ValueError, match="layers 1 and 2 differ in the config's"):
                _export(tmp_path, program_of(model), "plain")
            return
        _export(tmp_path, program_of(model), "plain")
        stock = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
        for written in (load(tmp_path / "plain"), stock.eval()):
            _assert_same(logits_of(written, ids), expected)

    def test_layers_that_are_all_as_narrow_are_a_plain_export(
        self, model: PreTrainedModel, ids: Tensor, tmp_path: Path
    ) -> None:
        """Includes fewer heads, where their width is an entry of its own."""
        model.save_pretrained(tmp_path / "source")
        family = family_of(model.config)
        whole = family.heads_fill_stream or any(spec.kept for spec in family.attentions)
        if family.mixture and whole:
            pytest.skip("nothing is narrowed")
        widths = {"F": 5, "A": 1}
        if whole:
            del widths["A"]
        if family.mixture:
            del widths["F"]
        narrow = _dense(model).map_sublayers(lambda one: replace(one, width=widths.get(one.kind)))
        expected = logits_of(edit(model, narrow), ids)
        _export(tmp_path, narrow, "plain")
        stock = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32)
        assert stock.num_parameters() < model.num_parameters()
        for written in (load(tmp_path / "plain"), stock.eval()):
            _assert_same(logits_of(written, ids), expected)

    @pytest.mark.parametrize("name", ["ladder", "narrow"])
    def test_an_export_with_the_program_loads_again(
        self, model: PreTrainedModel, ids: Tensor, name: str, tmp_path: Path
    ) -> None:
        model.save_pretrained(tmp_path / "source")
        expected = logits_of(_edit(model, name), ids)
        model_type = model.config.model_type
        if model_type not in CONFIG_MAPPING_NAMES:
            with pytest.raises(
                ValueError,
                match="the modeling file that travels inside builds on transformers' own classes",
            ):
                _export(tmp_path, program_of(model), "program")
            return
        _export(tmp_path, program_of(model), "program")
        shipped: Any = PROGRAM.shipped.model_class(model_type, tmp_path / "program")
        for written in (
            load(tmp_path / "program"),
            shipped.from_pretrained(tmp_path / "program").eval(),
        ):
            _assert_same(logits_of(written, ids), expected)


def order_of_attentions(model: PreTrainedModel, name: str) -> list[int]:
    """Layers of the attentions after one of EDITS, in order."""
    program = EDITS[name][0](_dense(model))
    return [sublayer.layers[0] for sublayer in program.sublayers() if sublayer.kind == "A"]


def _dense(model: PreTrainedModel) -> Program:
    return Program.dense(LAYERS, family_of(model.config).steps_per_layer)


def _can_be_sliced(model: PreTrainedModel) -> bool:
    family = family_of(model.config)
    return not any(
        spec.norms_output or spec.joins_heads or spec.kept is not None
        for spec in (family.attention, family.mlp)
    )


def _edit(model: PreTrainedModel, name: str) -> PreTrainedModel:
    program = EDITS[name][0](_dense(model))
    family = family_of(model.config)
    for sublayer in program.sublayers():
        spec = family.spec(sublayer.kind, sublayer.layers[0])
        mixture = spec.mixture
        if spec.kept is not None and sublayer.width is not None:
            pytest.skip("the attentions are kept as they are")
        if sublayer.piece and not _can_be_sliced(model):
            pytest.skip("the family cannot be sliced; that it says so is tested by itself")
        if mixture is not None and (len(sublayer.layers) > 1 or sublayer.width is not None):
            pytest.skip(
                "mixtures are neither averaged nor narrowed; that they say so is tested by itself"
            )
        if mixture is None and sublayer.experts is not None:
            pytest.skip("the family has no mixtures")
    return edit(model, program)


def _expert(model: PreTrainedModel, tensors: Tensors, x: Tensor) -> Tensor:
    config = model.config
    family = family_of(model.config)
    gate, up = (
        functional.linear(x, tensors[f"{role}.weight"], tensors.get(f"{role}.bias"))
        for role in ("gate", "up")
    )
    assert family.mixture is not None
    if family.mixture.clamped_gate is not None:
        alpha, limit = family.mixture.clamped_gate(config)
        gate = gate.clamp(max=limit)
        up = up.clamp(-limit, limit) + 1
        activated = gate * torch.sigmoid(alpha * gate)
    else:
        activated = ACT2FN[getattr(config, family.activation)](gate)
    return functional.linear(activated * up, tensors["down.weight"], tensors.get("down.bias"))


def _in_training(model: PreTrainedModel, ids: Tensor) -> Tensor:
    """Logits with dropout, the same numbers each time."""
    torch.manual_seed(5)
    logits = logits_of(model.train(), ids)
    model.eval()
    return logits


def _export(folder: Path, program: Program, form: str) -> None:
    write_export(plan_export(open_model(folder / "source"), program, form), folder / form)


def _assert_same(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
