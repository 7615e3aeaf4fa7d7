"""Programs on `transformers` models: load one, edit its program, put the original back.

Parameters keep their names, so that generation with caches, `peft`, `accelerate` (`device_map`, offloading) and
gradient checkpointing go on working. `EditedLayers` stands in for the decoder's list of layers, and
runs a program on the decoder's own modules: a step calls the attention, MLP and norm modules of `transformers`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from surgeon.language.execute import Branch, Machine, Partial, Pending, State, advance, land
from surgeon.language.operations.applied import require_whole_layers
from surgeon.language.program import Fork, Node, Program, Step, steps_of
from surgeon.language.recipe import Recipe
from surgeon.language.sublayer import ATTENTION, FEED_FORWARD, Sublayer
from surgeon.models.families import Family, family_of
from surgeon.models.replacements import FactoredLinear, LayerSlots, set_at, through_stages
from surgeon.models.routing import check_kept
from surgeon.models.shapes import check_layers
from surgeon.models.weights import (
    FactorSource,
    Groups,
    ModelWeights,
    ModuleStore,
    NamedTensors,
    derive_sublayer,
    share_undivided,
    stored_tensors,
    take_experts_apart,
)
from surgeon.words import show_value

if TYPE_CHECKING:  # takes seconds, and who has no model yet does without
    from transformers import PreTrainedModel

# The entry by which stock classes balance the experts of mixtures.
ASKS_FOR_ROUTERS = "output_router_logits"


class EditedLayers(LayerSlots):
    """Stands in a decoder for its list of layers, with derived sublayers beside them, under names of their own."""

    # The `VerifiedKeys` that attentions read of earlier tokens, where those are not their own.
    verified: Any = None
    # Behind which node a pass begins, with which stream; None at the start.
    begins: tuple[int, Tensor] | None = None

    def __init__(
        self,
        layers: nn.ModuleList,
        config: Any,
        family: Family,
        program: Program,
        factors: FactorSource | None = None,
        keeps_derived: bool = True,
    ) -> None:
        super().__init__(layers, family.arguments, family.returns_tuple)
        self.keeps_derived = keeps_derived  # or derives a sublayer anew whenever it runs
        self.original = [layers]  # in a list, so that it is not registered a second time
        self.config = config
        self.family = family
        self.output_scale = family.scales.output(config)
        self.program = program
        self.factors = factors
        self._weights: ModelWeights | None = None
        self._derived: dict[Sublayer, bool] = {}  # of sublayers of one layer
        self.holds_factors = any(isinstance(module, FactoredLinear) for module in layers.modules())
        self.stream_tap = StreamTap()
        if keeps_derived:
            derived = list(filter(self.is_derived, dict.fromkeys(program.sublayers())))
            # Slices that are stored as one sublayer share its norms, whatever trains them.
            slices: dict[Sublayer, list[nn.Module]] = {}
            for sublayer in derived:
                self.add_module(str(sublayer), self.derive(sublayer))
                if sublayer.piece is not None:
                    first = replace(sublayer, piece=(0, sublayer.piece[1]))
                    slices.setdefault(first, []).append(self.owner(sublayer))
            for first, modules in slices.items():
                share_undivided(modules, family.spec(first.kind, first.layers[0]))
            if family.shares_norm:
                # Derived sublayers of one layer that are stored as one have its norm between them.
                path = family.attention.stages[0]
                norms = dict[int, nn.Module]()
                groups = self.stored_groups
                for sublayer in derived:
                    owner = self.owner(sublayer)
                    setattr(
                        owner, path, norms.setdefault(groups.place(sublayer), owner.get_submodule(path))
                    )
        attended = [one.layers[0] for one in program.sublayers() if one.kind == ATTENTION]
        self.give_slots(attended, all(family.spec(ATTENTION, layer).counted_by for layer in attended))
        self.config_before: dict[str, Any] = {}
        # PyTorch makes every new module a training one.
        self.training = self.stream_tap.training = layers.training
        checkpointed = next(
            (layer for layer in layers if getattr(layer, "gradient_checkpointing", False)), None
        )
        if checkpointed is not None:
            self.gradient_checkpointing = True
            self._gradient_checkpointing_func = checkpointed._gradient_checkpointing_func

    @property
    def stored_groups(self) -> Groups:
        """The layers that derived sublayers are stored as, behind the original ones."""
        return Groups(filter(self.is_derived, self.program.sublayers()), by_count=True)

    def stored_place(self, sublayer: Sublayer, groups: Groups) -> int:
        if self.is_derived(sublayer):
            return len(self.original[0]) + groups.place(sublayer)
        return sublayer.layers[0]

    def _load_from_state_dict(self, state_dict: dict[str, Tensor], prefix: str, *arguments: Any) -> None:
        """Take derived sublayers from the layers that they are stored as (`stored_groups`)."""
        groups = self.stored_groups
        for sublayer in filter(self.is_derived, dict.fromkeys(self.program.sublayers())):
            stored = f"{prefix}{self.stored_place(sublayer, groups)}."
            own = {name: tensor for name, tensor in state_dict.items() if name.startswith(stored)}
            if own:
                layer = sublayer.layers[0]
                inside = f"{self.family.layers}.{layer}."
                store = NamedTensors({f"{inside}{name.removeprefix(stored)}": own[name] for name in own})
                weights = ModelWeights(store, self.family, self.family.head_dim(self.config))
                values = stored_tensors(sublayer.stored_in(layer), weights)
                held = {path for path, _ in self.owner(sublayer).named_parameters()}
                state_dict |= {
                    f"{prefix}{sublayer}.{path}": values[path] for path in values if path in held
                }
        for index in range(len(groups.groups)):
            for name in [
                name
                for name in state_dict
                if name.startswith(f"{prefix}{len(self.original[0]) + index}.")
            ]:
                del state_dict[name]
        super()._load_from_state_dict(state_dict, prefix, *arguments)

    def layer(self, index: int) -> nn.Module:
        module = self._modules[str(index)]
        assert module is not None
        return module

    def is_derived(self, sublayer: Sublayer) -> bool:
        """Tell whether a sublayer has weights that no layer has, as an average, some units, a slice and factors."""
        if len(sublayer.layers) > 1 or sublayer.piece is not None:
            return True
        if sublayer.width is None and sublayer.experts is None and not self.holds_factors:
            return bool(sublayer.ranks)
        if sublayer not in self._derived:
            (layer,) = sublayer.layers
            weights = EditedLayers.view_weights(self)
            differs = sublayer.width is not None and sublayer.width != weights.stored_width(
                sublayer.kind, layer
            )
            if sublayer.experts is not None:
                differs |= sublayer.experts != tuple(range(weights.stored_experts(layer) or 0))
            if self.holds_factors:
                held = weights.stored_ranks(Sublayer(sublayer.kind, (layer,)))
            else:
                held = ()
            self._derived[sublayer] = differs or held != sublayer.ranks
        return self._derived[sublayer]

    def derive(self, sublayer: Sublayer) -> nn.Module:
        """Make a module with the averaged, narrowed, sliced or factorised weights of a sublayer.

        Raises:
            ValueError: as `derive_sublayer` and `check_kept`; if weights of its layers are divided among processes.
        """
        if any(
            hasattr(one, "placements")
            for layer in sublayer.layers
            for one in self.layer(layer).parameters()
        ):
            raise ValueError(
                f"{sublayer} has weights that are made of whole matrices, and this model's are divided among "
                "processes; export the program, and load what is written"
            )
        weights = self.weights()
        mixture = weights.spec(sublayer).mixture
        experts = weights.stored_experts(sublayer.layers[0])
        if mixture is not None and experts is not None and sublayer.experts:
            check_kept(sublayer.experts, experts, mixture.routing(self.config))
        return derive_sublayer(sublayer, self.layer(sublayer.layers[0]), weights)

    def weights(self) -> ModelWeights:
        """Return one view of the layers' weights that is kept, with the names and shapes that it has found."""
        if self._weights is None:
            self._weights = self.view_weights()
        return self._weights

    def view_weights(self) -> ModelWeights:
        store = ModuleStore(self, f"{self.family.layers}.")
        return ModelWeights(store, self.family, self.family.head_dim(self.config), self.factors)

    def owner(self, sublayer: Sublayer) -> nn.Module:
        """Return the module below which a sublayer's modules lie: its layer, or what was derived for it."""
        if self.is_derived(sublayer):
            return self.get_submodule(str(sublayer)) if self.keeps_derived else self.derive(sublayer)
        return self.layer(sublayer.layers[0])

    def describe_in(self, config: Any) -> None:
        """Make the configuration's per-layer entries describe the program's attentions."""
        entries = self.family.attention_entries(config, self.slot_layers)
        entries["num_hidden_layers"] = len(self.slot_layers)
        for key, kind in (
            self.family.spec(ATTENTION, self.slot_layers[-1]).counted_by if self.counts_apart else ()
        ):
            entries[key] = [*entries[key][:-1], kind]
        if getattr(config, ASKS_FOR_ROUTERS, False):
            # Stock classes balance mixtures of as many experts as the configuration says.
            own = [one for one in self.program.sublayers() if one.kind == FEED_FORWARD]
            mixtures = [
                one for one in own if self.family.spec(FEED_FORWARD, one.layers[0]).mixture is not None
            ]
            entries[ASKS_FOR_ROUTERS] = bool(mixtures) and all(one.experts is None for one in mixtures)
        self.config_before = {key: getattr(config, key) for key in entries}
        for key, value in entries.items():
            setattr(config, key, value)

    def undo(self, config: Any) -> nn.ModuleList:
        """Restore the configuration and every attention's cache slot; return the original list."""
        for key, value in self.config_before.items():
            setattr(config, key, value)
        (layers,) = self.original
        layers.training = self.training  # it was no part of the model while its mode may have changed
        for index, layer in enumerate(layers):
            spec = self.family.spec(ATTENTION, index)
            if hasattr(layer, spec.cache_slot.partition(".")[0]):  # or it has no attention
                set_at(layer, spec.cache_slot, index)
        return layers

    def run(self, stream: Tensor, arguments: list[dict[str, Any]]) -> Tensor:
        machine = ModelMachine(self, arguments)
        first = 0
        if self.begins is not None:
            first, given = self.begins
            stream = given.to(stream)
            skipped = (one for step in steps_of(self.program.nodes[:first]) for one in step.sublayers)
            machine.next_slot = sum(one.kind == ATTENTION for one in skipped)
        return self.through(self.program.nodes[first:], stream, machine)

    def through(self, nodes: Iterable[Node], stream: Tensor, machine: Machine) -> Tensor:
        """Run nodes, all of them landed; the stream after each goes through `stream_tap`."""
        state = State(stream)
        for node in nodes:
            before = state
            state = advance(state, node, machine)
            if before.pending is not None:
                self.stream_tap(before.stream, state.stream)
        end: Tensor = self.stream_tap(state.stream, land(state, machine.add).stream)
        return end


class StreamTap(nn.Module):
    """Passes on the stream after a node: here `output_hidden_states` is collected, once per node."""

    def __init__(self) -> None:
        super().__init__()
        from transformers.utils.output_capturing import install_output_capuring_hook

        install_output_capuring_hook(self, "hidden_states", 0)

    def forward(self, before: Tensor, after: Tensor) -> Tensor:  # noqa: ARG002 - the collector takes the first `before`
        return after


class ModelMachine(Machine):
    """One forward pass of a `transformers` model on one device, or on what `accelerate` made of it."""

    def __init__(self, layers: EditedLayers, arguments: list[dict[str, Any]]) -> None:
        self.layers = layers
        self.arguments = arguments
        self.next_slot = 0  # each attention that runs takes the next cache slot
        self._in_turn: tuple[Tensor, list[Tensor]] | None = None  # a sum, and what it is of

    def compute(self, step: Step, stream: Tensor) -> Partial:
        outputs = [self.sublayer(sublayer, stream) for sublayer in step.sublayers]
        total = outputs[0]
        for output in outputs[1:]:
            total = total + output.to(total.device)
        total = total.to(stream.device)
        if self.layers.family.adds_in_turn:
            self._in_turn = total, outputs
        return Partial(total)

    def add(self, stream: Tensor, output: Tensor) -> Tensor:
        """Add an output, rounded as the decoder does it."""
        total, outputs = self._in_turn or (None, [])
        for one in outputs if output is total else [output]:
            stream = stream + one.to(stream.device)
        return stream

    def reduce(self, partial: Partial) -> Pending:
        return lambda: partial.part

    def assign(self, fork: Fork) -> Iterable[tuple[Branch, Machine]]:
        return [(branch, self) for branch in fork.branches]

    def slot_of(self, attention: Sublayer) -> int:  # noqa: ARG002 - a plan machine needs it
        """Return the cache slot, and the place among the arguments, of the attention that runs now."""
        self.next_slot += 1
        return self.next_slot - 1

    def owner(self, sublayer: Sublayer) -> nn.Module:
        return self.layers.owner(sublayer)

    def sublayer(self, sublayer: Sublayer, stream: Tensor) -> Tensor:
        owner = self.owner(sublayer)
        spec = self.layers.family.spec(sublayer.kind, sublayer.layers[0])
        slot: tuple[str, int] | None = None
        arguments: dict[str, Any] = {}
        if sublayer.kind == ATTENTION:
            slot = spec.cache_slot, self.slot_of(sublayer)
            arguments = self.arguments[slot[1]]
            if self.layers.verified is not None:
                arguments = self.layers.verified.replace_arguments(sublayer, arguments)
            arguments = spec.rename_arguments(arguments)
        call = partial(through_stages, owner, spec.stages, spec.module, slot, arguments)
        if self.layers.gradient_checkpointing and self.layers.training:
            checkpointed: Any = self.layers._gradient_checkpointing_func
            output: Tensor = checkpointed(call, stream)
        else:
            output = call(stream)
        if self.layers.output_scale is not None:
            output = output * self.layers.output_scale
        dropout = self.layers.family.dropout.output
        if dropout is not None and self.layers.training:
            output = nn.functional.dropout(output, getattr(self.layers.config, dropout))
        return output


PROGRAM_KEY = "surgeon_program"  # in config.json of a checkpoint that runs an edited program
# Before its model type, so that no stock class takes it and ignores the program.
PROGRAM_PREFIX = "surgeon_"


def edit(
    model: PreTrainedModel,
    program: Program | str,
    layers_class: Callable[..., EditedLayers] | None = None,
    factors: FactorSource | None = None,
) -> PreTrainedModel:
    """Make the model run this program, in place; editing an edited model starts from the original again.

    The configuration's `num_hidden_layers` and per-layer attention types then describe the program's attentions, so
    that caches and masks fit.

    Args:
        layers_class: of what stands in for the list of layers.
        factors: of matrices that the program has a rank for; by default truncated singular values.

    Returns:
        The same model.

    Raises:
        ValueError: if the architecture is not supported, or the program names a layer or a slice that it cannot have.
    """
    if isinstance(program, str):
        program = Program.parse(program)
    original = restore(model)
    family = family_of(original.config)
    parent, name = decoder_parent(original)
    layers = getattr(parent, name)
    check_layers(program, len(layers))
    if family.mixture is not None:
        take_experts_apart(layers)
    edited = (layers_class or EditedLayers)(layers, original.config, family, program, factors)
    setattr(parent, name, edited)
    edited.describe_in(original.config)
    vars(original)["save_pretrained"] = MethodType(_saver, original)
    return original


def restore(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `edit`, and return the model."""
    if not isinstance(model, nn.Module):
        raise ValueError(
            f"{show_value(model)} is no model that is loaded; give what surgeon.load returns"
        )
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, EditedLayers):
                setattr(module, name, child.undo(model.config))
                del vars(model)["save_pretrained"]
                return model
    return model


def program_of(model: PreTrainedModel) -> Program:
    """Return the program of the model's last `edit`, or the dense one."""
    layers = decoder_layers(model)
    if isinstance(layers, EditedLayers):
        return layers.program
    return Program.dense(len(layers), family_of(model.config).steps_per_layer)


@contextmanager
def as_stored(model: PreTrainedModel) -> Iterator[Program]:
    """Restore the model inside, and give the program that it runs outside.

    Raises:
        ValueError: if the program has weights that no layer has, which only live while the model runs it.
    """
    layers = decoder_layers(model)
    program = program_of(model)
    if not isinstance(layers, EditedLayers):
        yield program
        return
    derived = next(filter(layers.is_derived, program.sublayers()), None)
    if derived is not None:
        raise ValueError(
            f"the model runs {derived}, whose weights are those of no layer; export the model, and use the checkpoint"
        )
    restore(model)
    try:
        yield program
    finally:
        edit(model, program)


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList | EditedLayers:
    """Return the decoder's list of layers, or what stands in for it."""
    parent, name = decoder_parent(model)
    layers: nn.ModuleList | EditedLayers = getattr(parent, name)
    return layers


def edited_layers(model: PreTrainedModel) -> EditedLayers:
    """Return what stands in for the layers of an edited model."""
    layers = decoder_layers(model)
    assert isinstance(layers, EditedLayers), "the model runs no program"
    return layers


def input_device(model: PreTrainedModel) -> torch.device:
    """Return the device of token ids; `accelerate` brings them to an embedding that is somewhere else meanwhile."""
    if model.device.type == "meta":
        return torch.device("cpu")
    return model.device


def decoder_inputs(model: PreTrainedModel, input_ids: Tensor) -> tuple[Tensor, list[dict[str, Any]]]:
    """Return what an unedited model's decoder hands its layers, without padding and without a cache.

    Args:
        input_ids: (batch, tokens).

    Returns:
        The embedded stream, (batch, tokens, hidden), and each layer's keyword arguments (mask, positions).

    Raises:
        ValueError: if the model runs an edited program.
    """
    require_unedited(model)
    family = family_of(model.config)
    parent, name = decoder_parent(model)
    layers = getattr(parent, name)
    tap = _InputTap(layers, model.config, family, Program.dense(len(layers), family.steps_per_layer))
    setattr(parent, name, tap)
    try:
        parent(input_ids=input_ids, use_cache=False)
    finally:
        setattr(parent, name, layers)
    return tap.taken


def require_unedited(model: PreTrainedModel) -> None:
    """Refuse an edited model where the original is meant."""
    if isinstance(decoder_layers(model), EditedLayers):
        raise ValueError(
            "the model runs an edited program, or one of its own (native tracks), and this is of layers that run one "
            "after the other; use the original (surgeon.restore brings it back)"
        )


def require_pairs(model: PreTrainedModel) -> None:
    """Refuse an edited model, and one without two layers that run one after the other."""
    require_unedited(model)
    if (num_layers := model.config.num_hidden_layers) < 2:
        raise ValueError(f"the model has {num_layers} layer; a pair in parallel needs at least 2")


def save_edited_with(saver: Callable[..., None]) -> None:
    """Set the function that saves edited models, called as `save_pretrained` is, with the model first.

    A room above this one (surgeon.exports) has it, and sets it when it is imported.
    """
    global _saver  # noqa: PLW0603 - one for the process, as there is one format
    _saver = saver


def _no_saver(*_: Any, **__: Any) -> None:
    raise RuntimeError(
        "how edited models are saved is not known yet; import surgeon.exports.in_memory first"
    )


_saver: Callable[..., None] = _no_saver


def decoder_parent(model: PreTrainedModel) -> tuple[nn.Module, str]:
    """Return the module that has the decoder's list of layers, and its name there."""
    path, _, name = family_of(model.config).layers.rpartition(".")
    return model.get_submodule(path), name


class _InputTap(EditedLayers):
    taken: tuple[Tensor, list[dict[str, Any]]]

    def run(self, stream: Tensor, arguments: list[dict[str, Any]]) -> Tensor:
        self.taken = stream, arguments
        return stream


def recipe_program(recipe: Recipe, config: Any, own: Program | None = None) -> Program:
    """Return the program that a recipe's operations make of a model with this `transformers` configuration.

    Args:
        own: the program of the model, if it is another than its layers one after the other.

    Raises:
        ValueError: as `Recipe.program`; if the architecture is not supported, or `own` is not the model's layers, each
            whole and once.
    """
    family = family_of(config)
    layers = int(config.num_hidden_layers)
    if own is not None:
        try:
            require_whole_layers(own, layers)
        except ValueError as error:
            raise ValueError(
                f"{recipe.source}: {recipe.model or 'the model'} is an edited model, and operations change whole "
                f"layers; name the model it was made of, or give the whole program ({error})"
            ) from error
    return recipe.program(layers, family.steps_per_layer, family.layer_shapes(config), own)
