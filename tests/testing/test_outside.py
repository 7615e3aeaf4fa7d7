"""What somebody else adds, in a file of their own: an operation, a family, a form, a space, each under its contract."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from surgeon.checkpoint.forms import FORMS, Form
from surgeon.checkpoint.forms.plain import Plain
from surgeon.language.operations.applied import AppliedOperation, Edit
from surgeon.language.operations.base import (
    HEATMAPS,
    OPERATIONS,
    VARIANTS,
    Heatmap,
    Operation,
    Variant,
    find_stretch,
    operation,
)
from surgeon.language.program import Program
from surgeon.models.families import FAMILIES, Family
from surgeon.models.families.base import Dropouts
from surgeon.models.families.llama import LLAMA
from surgeon.models.families.specs import StreamNorm
from surgeon.opened import Model
from surgeon.searches.mixture import Mixture
from surgeon.searches.spaces import SPACES, Space, register
from surgeon.searches.spaces.base import Claim, claims_of_ranks, claims_of_shape
from surgeon.testing import FamilyContract, FormContract, OperationContract, SpaceContract, Sublayers
from surgeon.testing.spaces import small_model
from tests.tiny_models import disturb

# -- an operation --


@operation(heatmaps={"reverse": Heatmap("Reverse")}, variants={"reversed": Variant({"every": 2})})
def reverse(program: Program, layers: range, every: int = 1) -> Program:
    """Run every n-th of the layers, the last one first."""
    if every < 1:
        raise ValueError(f"every must be at least 1, not {every}")
    stretch = find_stretch(program, layers)
    return stretch.replaced_by(*(node for layer in stretch.layers[::-every] for node in layer))


REVERSE = OPERATIONS.pop("reverse")  # registered for these tests alone
DECLARED = {
    "heatmaps": {"reverse": HEATMAPS.pop("reverse")},
    "variants": {"reversed": VARIANTS.pop("reversed")},
}


@pytest.fixture
def registered() -> Iterator[None]:
    OPERATIONS["reverse"] = REVERSE
    HEATMAPS.update(DECLARED["heatmaps"])
    VARIANTS.update(DECLARED["variants"])
    yield
    del OPERATIONS["reverse"], HEATMAPS["reverse"], VARIANTS["reversed"]


@pytest.mark.usefixtures("registered")
class TestReverse(OperationContract):
    @pytest.fixture
    def operation(self) -> Operation:
        return OPERATIONS["reverse"]


# -- a family --


class OurConfig(LlamaConfig):
    model_type = "our_llama"


class OurForCausalLM(LlamaForCausalLM):
    config_class = OurConfig


AutoConfig.register("our_llama", OurConfig)
AutoModelForCausalLM.register(OurConfig, OurForCausalLM)
OURS = replace(LLAMA, name="Our Llama", model_type="our_llama")
SMALL: dict[str, Any] = {
    "num_hidden_layers": 4,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "attention_dropout": 0.4,
    "attention_bias": True,
    "mlp_bias": True,
}


class TestOurFamily(FamilyContract):
    @pytest.fixture(scope="class")
    def family_model(self) -> Iterator[PreTrainedModel]:
        FAMILIES["our_llama"] = OURS
        torch.manual_seed(0)
        model = OurForCausalLM(OurConfig(**SMALL))
        disturb(model)
        yield model
        del FAMILIES["our_llama"]


# -- a space --


@register
class Merges(Space):
    """Neighbouring layers as one; what has the average of two has no ranks of its own."""

    name, summary, place = "merge", "neighbouring layers as one", 28

    def edits(self, model: Model) -> Iterator[Edit]:
        return (Edit(first, first + 2, self.name) for first in range(model.num_layers - 1))

    def claims(self, edit: Edit) -> frozenset[Claim]:
        return claims_of_shape(edit).union(*(claims_of_ranks(edit, kind) for kind in "AF"))

    def operations(
        self,
        edits: Sequence[Edit],
        program: Program,  # noqa: ARG002
        model: Model,  # noqa: ARG002
    ) -> tuple[AppliedOperation, ...]:
        return tuple(AppliedOperation("merge", (edit.layers,)) for edit in edits)


del SPACES["merge"]  # registered for these tests alone


class TestMerges(SpaceContract):
    @pytest.fixture
    def space(self, monkeypatch: pytest.MonkeyPatch) -> Space:
        monkeypatch.setitem(SPACES, "merge", Merges)
        return Merges()


# -- contracts that are not kept --


def broken(function: Any) -> Operation:
    return Operation(function)


def untouched_outside(program: Program, layers: range) -> Program:
    """Drop the first layer whatever is asked for."""
    find_stretch(program, layers)
    return Program(program.nodes[2:])


def random_each_time(program: Program, layers: range, seen: list[int] = []) -> Program:  # noqa: B006
    """Give another program every time."""
    seen.append(0)
    stretch = find_stretch(program, layers)
    return stretch.replaced_by(
        *(node for layer in stretch.layers for node in layer * (len(seen) % 2 + 1))
    )


def unseeded(program: Program, layers: range, seed: int = 0) -> Program:  # noqa: ARG001
    """Take a seed and do nothing with it."""
    return program


def past_the_end(program: Program, layers: range) -> Program:
    """Take any layers."""
    nodes = program.nodes
    return Program(nodes[: 2 * layers.start] + nodes[2 * layers.stop :])


@pytest.mark.parametrize(
    ("function", "test", "arguments"),
    [
        (untouched_outside, "test_it_says_what_it_makes_of_a_program", {"steps_per_layer": 2}),
        (random_each_time, "test_it_says_what_it_makes_of_a_program", {"steps_per_layer": 2}),
        (unseeded, "test_its_seed_is_all_that_is_random", {}),
        (past_the_end, "test_layers_that_are_not_there_are_refused", {"steps_per_layer": 2}),
        (past_the_end, "test_layers_another_operation_changed_are_refused", {}),
    ],
)
def test_operations_that_break_the_contract_fail_it(
    function: Any, test: str, arguments: dict[str, Any]
) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        getattr(OperationContract(), test)(broken(function), {}, **arguments)


HALVED = (replace(LLAMA.attention.projections[0], unit="kv_heads"), *LLAMA.attention.projections[1:])


def described(**changes: Any) -> Family:
    return replace(OURS, **changes)


@pytest.mark.parametrize(
    ("family", "test", "with_ids"),
    [
        (
            described(
                attention=replace(
                    LLAMA.attention, stages=(StreamNorm("post_attention_layernorm"), "self_attn")
                )
            ),
            "test_the_unedited_program_is_the_stock_model_bit_for_bit",
            True,
        ),
        (
            described(dropout=Dropouts("attention_dropout")),
            "test_it_trains_and_drops_out_as_the_stock_model_does",
            True,
        ),
        (
            described(attention=replace(LLAMA.attention, projections=HALVED)),
            "test_described_modules_and_units",
            False,
        ),
    ],
)
def test_families_that_break_the_contract_fail_it(
    family: Family, test: str, with_ids: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FAMILIES, "our_llama", family)
    torch.manual_seed(0)
    model = OurForCausalLM(OurConfig(**SMALL)).eval()
    disturb(model)
    ids = torch.randint(3, 90, (2, 11))
    (name,) = (name for name in dir(FamilyContract) if name.startswith(test))
    with pytest.raises(AssertionError):
        getattr(FamilyContract(), name)(model, *([ids] if with_ids else []))


class Unmarked(Plain):
    """A form whose folders nobody recognises."""

    name = "unmarked"


class Miscounted(Unmarked):
    """A form that does not know where its layers come from."""

    def marks(self, config: dict[str, Any]) -> bool:
        return "rope_parameters" in config

    def sources(self, program: Program, family: Family, num_layers: int) -> list[tuple[int, ...]]:
        return super().sources(program, family, num_layers)[1:]


@pytest.mark.parametrize(
    ("form", "test"),
    [(Unmarked(), "test_a_folder_says_what_it_is"), (Miscounted(), "test_its_layers_are_the_originals")],
)
def test_forms_that_break_the_contract_fail_it(
    form: Form, test: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(FORMS, "unmarked", form)
    contract: Any = FormContract()
    model = LlamaForCausalLM(LlamaConfig(**SMALL))
    model.save_pretrained(tmp_path / "source")
    exported = FormContract.exported.__wrapped__(contract, form, ["A0 F0 A2 F2"], tmp_path / "source")
    more = [tmp_path / "source"] if test == "test_a_folder_says_what_it_is" else []
    with pytest.raises(AssertionError):
        getattr(contract, test)(form, exported, *more)


class Unclaimed(Merges):
    """Edits that claim nothing."""

    def claims(self, edit: Edit) -> frozenset[Claim]:  # noqa: ARG002
        return frozenset()


class WithRanks(Merges):
    """Edits that forget that others may lower the ranks of one of the layers."""

    def claims(self, edit: Edit) -> frozenset[Claim]:
        return claims_of_shape(edit)


class Wide(Merges):
    """Edits of one layer that change two."""

    def edits(self, model: Model) -> Iterator[Edit]:
        return (Edit(first, first + 1, self.name) for first in range(model.num_layers - 1))

    def operations(
        self,
        edits: Sequence[Edit],
        program: Program,  # noqa: ARG002
        model: Model,  # noqa: ARG002
    ) -> tuple[AppliedOperation, ...]:
        return tuple(AppliedOperation("merge", (range(edit.first, edit.stop + 1),)) for edit in edits)


class Unwritable(Merges):
    """Operations with a parameter that no recipe can have."""

    def operations(
        self,
        edits: Sequence[Edit],
        program: Program,  # noqa: ARG002
        model: Model,  # noqa: ARG002
    ) -> tuple[AppliedOperation, ...]:
        return tuple(
            AppliedOperation("pair", (edit.layers,), {"form": "side by side"}) for edit in edits
        )


class Overlapping(Merges):
    """Stretches of edits that exclude each other."""

    def stretches(self, model: Model) -> Iterator[list[Edit]]:
        yield [*self.edits(model)]


@pytest.mark.parametrize(
    ("space", "test"),
    [
        (Unclaimed, "test_its_edits_claim_something"),
        (WithRanks, "test_its_edits_go_together_with_those_of_others"),
        (Wide, "test_an_edit_changes_its_layers_alone"),
        (Unwritable, "test_what_an_edit_makes_is_written_as_a_recipe"),
        (Overlapping, "test_stretches_are_choices"),
    ],
)
def test_spaces_that_break_the_contract_fail_it(
    space: type[Space], test: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And `Merges`, which keeps it, passes."""
    monkeypatch.setitem(SPACES, "merge", space)
    (name,) = (name for name in dir(SpaceContract) if name.startswith(test))
    model = small_model()
    run_space_test(name, Merges(), model)
    with pytest.raises(AssertionError):
        run_space_test(name, space(), model)


def run_space_test(name: str, space: Space, model: Model) -> None:
    contract = SpaceContract()
    test = getattr(contract, name)
    alone = Mixture((space,), model)
    mixed = SpaceContract.mixed.__wrapped__(contract, space, model)  # type: ignore[attr-defined]
    fixtures = {"space": space, "model": model, "alone": alone, "mixed": mixed}
    test(**{name: fixtures[name] for name in inspect.signature(test).parameters})


def test_an_equation_needs_the_norm_that_the_attention_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = described(
        attention=replace(LLAMA.attention, stages=(StreamNorm("post_attention_layernorm"), "self_attn"))
    )
    monkeypatch.setitem(FAMILIES, "our_llama", wrong)
    with pytest.raises(
        AssertionError, match="self_attn of layer 0 does not read what post_attention_layernorm gives"
    ):
        Sublayers(OurForCausalLM(OurConfig(**SMALL)), torch.tensor([[4, 5, 6]]))


def test_contracts_without_a_fixture_say_what_is_missing() -> None:
    missing = (
        *((OperationContract, "operation"), (FamilyContract, "family_model"), (FormContract, "form")),
        (SpaceContract, "space"),
    )
    for contract, fixture in missing:
        with pytest.raises(NotImplementedError, match=f"give a fixture `{fixture}`"):
            getattr(contract, fixture).__wrapped__(contract())


def test_without_pytest_the_error_says_how_to_get_it() -> None:
    code = "import sys; sys.modules['pytest'] = None\nimport surgeon.testing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.endswith(
        "ImportError: surgeon.testing needs pytest, which is not installed: pip install pytest\n"
    )
