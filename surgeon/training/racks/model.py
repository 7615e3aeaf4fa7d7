"""Racks cut out of a whole model: a stretch of its program each, and a private coda that predicts from its end.

The loss is that of the coda's prediction; the stream that is handed on has no gradient, so that nothing comes back from
later racks (`papers/block-wise-local-training.txt`). The last rack's coda is the end of the model itself.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedModel

from surgeon.checkpoint.codas import Coda
from surgeon.checkpoint.describe import layers_by_recipe
from surgeon.checkpoint.tensor_file import read_header
from surgeon.exports.in_memory import stock_model
from surgeon.exports.prove import build_empty
from surgeon.language.program import Node, Program
from surgeon.language.sublayer import Sublayer
from surgeon.models.edit import EditedLayers, ModelMachine, edit, restore
from surgeon.models.families import Family, family_of
from surgeon.models.weights import ModelWeights, NamedTensors, make_room
from surgeon.processes.files import whole_file
from surgeon.training.racks.partition import Racks, layers_in
from surgeon.words import first_line


class StretchLayers(EditedLayers):
    """Edited layers whose stream may be replaced at the start, and is recorded on its way.

    Attributes:
        embeds: whether the stream begins with the embedded tokens.
        watched: number of nodes after which the stream is recorded; None for all.
        apart: whether nodes behind the watched ones have no gradient for those before.
        incoming: stream of the next pass, (batch, tokens, hidden); None where it begins here.
        outgoing: stream of the last pass after the watched nodes, without a gradient.
    """

    embeds = True
    watched: int | None = None
    apart = False
    incoming: Tensor | None = None
    outgoing: Tensor | None = None

    def run(self, stream: Tensor, arguments: list[dict[str, Any]]) -> Tensor:
        if self.incoming is not None:
            if self.incoming.shape != stream.shape:
                raise ValueError(
                    f"the stream that comes in is {tuple(self.incoming.shape)}, and the tokens make it "
                    f"{tuple(stream.shape)}: windows, tokens, width"
                )
            stream = self.incoming.to(stream.device)
        elif not self.embeds:
            raise ValueError("this stretch of a model needs the stream of the one before it")
        machine = ModelMachine(self, arguments)
        nodes = self.program.nodes
        middle = self.through(nodes[: self.watched], stream, machine)
        self.outgoing = middle.detach()
        behind = () if self.watched is None else nodes[self.watched :]
        stream = self.outgoing if self.apart else middle
        if behind:
            return self.through(behind, stream, machine)
        return stream


class SilentEmbedding(nn.Module):
    """Zeros in place of the embeddings, of tokens or positions, that later stretches do not have."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.zeros: Tensor
        self.register_buffer("zeros", torch.zeros(width, dtype=dtype), persistent=False)

    def forward(self, ids: Tensor, *_: Any, **__: Any) -> Tensor:
        return self.zeros.repeat(*ids.shape, 1)


def build_stretch(
    config: Any,
    program: Program,
    tensors: Mapping[str, Tensor],
    embeds: bool,
    watched: int | None = None,
) -> PreTrainedModel:
    """Build a model of these tensors, without a copy.

    Args:
        config: of the stock model with as many layers.
        program: over these layers.
        tensors: by the parameters' names; those of the embeddings only if the stream begins here.
        watched: as `StretchLayers` has it.

    Raises:
        ValueError: if a tensor is missing, or none of the model's.
    """
    family = family_of(config)
    weights = ModelWeights(NamedTensors(dict(tensors)), family, family.head_dim(config))
    model = build_empty(MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], config)
    if any(name.startswith(f"{family.layers}.") for name in tensors):
        make_room(model, weights, program)
    if not embeds:
        dtype = next(iter(tensors.values())).dtype
        for path in family.embeddings:
            parent, _, name = path.rpartition(".")
            setattr(
                model.get_submodule(parent), name, SilentEmbedding(int(model.config.hidden_size), dtype)
            )
    unknown = model.load_state_dict(dict(tensors), strict=False, assign=True).unexpected_keys
    if unknown:
        raise ValueError(f"there is no tensor {unknown[0]} in a model of its configuration")
    model.tie_weights()
    missing = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    if missing:
        raise ValueError(
            f"the tensor {missing[0]} is missing: a model is cut by depth into layers, embeddings, final norm and head"
        )
    edit(model, program, StretchLayers)
    layers = stretch_layers(model)
    layers.embeds = embeds
    layers.watched = watched
    return model


def stretch_layers(model: nn.Module) -> StretchLayers:
    """The layers of a stretch, inside any wrapper of its model."""
    found = next((module for module in model.modules() if isinstance(module, StretchLayers)), None)
    assert found is not None
    return found


@contextmanager
def feed_stream(model: nn.Module, stream: Tensor | None) -> Iterator[StretchLayers]:
    """Give a stretch's passes this stream, (batch, tokens, hidden); None for the embedded tokens."""
    layers = stretch_layers(model)
    layers.incoming = stream
    try:
        yield layers
    finally:
        layers.incoming = layers.outgoing = None


@dataclass(frozen=True)
class ModelTensors:
    """Tensors of a model, shared with it.

    Attributes:
        config: of a stock model with these layers.
        program: over them.
        layers: tensors of each, by their names in the layer.
        others: those outside the layers, by their names in the model; of tied ones both.
    """

    config: Any
    program: Program
    layers: list[dict[str, Tensor]]
    others: dict[str, Tensor]

    @property
    def family(self) -> Family:
        return family_of(self.config)

    def outside(self, *paths: str) -> dict[str, Tensor]:
        return {
            name: tensor
            for name, tensor in self.others.items()
            if any(name.startswith(f"{path}.") for path in paths)
        }

    def by_name(self) -> dict[str, Tensor]:
        return self.others | named_layers(self.family, self.layers)


def tensors_of(model: PreTrainedModel) -> ModelTensors:
    """Collect the tensors of a model; averages and slices of its program are layers behind its own."""
    prefix = f"{family_of(model.config).layers}."
    stock = stock_model(model)
    buffers = {name.removeprefix(prefix).partition(".")[2] for name, _ in model.named_buffers()}
    layers: list[dict[str, Tensor]] = [{} for _ in range(stock.config.num_hidden_layers)]
    others = {}
    for name, tensor in stock.tensors.items():
        layer, _, path = name.removeprefix(prefix).partition(".")
        if not name.startswith(prefix):
            others[name] = tensor
        elif path not in buffers:
            layers[int(layer)][path] = tensor
    return ModelTensors(stock.config, stock.program, layers, others)


def named_layers(
    family: Family, layers: Iterable[Mapping[str, Tensor]], first: int = 0
) -> dict[str, Tensor]:
    """Name tensors of layers as in the model, numbered from `first`."""
    return {
        f"{family.layers}.{first + index}.{name}": tensor
        for index, layer in enumerate(layers)
        for name, tensor in layer.items()
    }


def renumber_layers(nodes: Sequence[Node], first: int = 0) -> Program:
    """Renumber nodes over their own layers alone, from `first` on."""
    numbers = {layer: first + index for index, layer in enumerate(layers_in(nodes))}

    def rename(sublayer: Sublayer) -> Sublayer:
        return replace(sublayer, layers=tuple(numbers[layer] for layer in sublayer.layers))

    return Program(tuple(nodes)).map_sublayers(rename)


def config_for(config: Any, sources: Sequence[int], tied: bool) -> Any:
    """Make a stock configuration of some of a model's layers.

    Args:
        sources: numbers of the layers, in their order.
        tied: whether the head is the embedding.
    """
    made = copy.deepcopy(config)
    entries = family_of(config).per_layer_entries(config, sources)
    for name, value in {
        **entries,
        "num_hidden_layers": len(sources),
        "tie_word_embeddings": tied,
    }.items():
        setattr(made, name, value)
    return made


_KEY = "surgeon_rack"  # in the file's metadata


@dataclass
class RackModel:
    """One rack's model.

    Attributes:
        racks: that it is one of.
        index: its number.
        model: a stock model of the rack's own layers and its coda's, which runs their part of the program.
    """

    racks: Racks
    index: int
    model: PreTrainedModel

    @property
    def is_last(self) -> bool:
        return self.index == self.racks.last

    @property
    def layers(self) -> StretchLayers:
        return stretch_layers(self.model)

    def tensors(self) -> ModelTensors:
        """Tensors, shared with the rack, of its own layers and then its coda's, under the numbers of its program."""
        found = tensors_of(self.model)
        program = self.layers.program
        layers = found.layers[: 1 + max(layer for one in program.sublayers() for layer in one.layers)]
        for (kind, place), (layer,) in layers_by_recipe(program, found.program).items():
            if place != layer:
                paths = tuple(f"{path}." for path in found.family.spec(kind, layer).stages)
                moved = {
                    name: tensor
                    for name, tensor in found.layers[place].items()
                    if name.startswith(paths)
                }
                layers[layer] = layers[layer] | moved
        config = config_for(found.config, range(len(layers)), bool(found.config.tie_word_embeddings))
        return ModelTensors(config, program, layers, found.others)

    def coda(self) -> Coda:
        """The private coda, its tensors shared with the rack."""
        if self.is_last:
            raise ValueError("the last rack has no coda of its own: its prediction is the model's")
        found = self.tensors()
        nodes = self.layers.program.nodes[len(self.racks.ranges[self.index].nodes) :]
        sources = layers_in(nodes)
        config = config_for(found.config, sources or [0], tied=False)
        layers = named_layers(found.family, [found.layers[source] for source in sources])
        output = found.outside(found.family.final_norm, found.family.head)
        return Coda(config, renumber_layers(nodes), output | layers)

    def coda_parameters(self) -> list[nn.Parameter]:
        """List parameters of its coda, in an order that is the same in every rack; the last rack's are the model's."""
        layers = self.layers
        family = family_of(self.model.config)
        nodes = Program(layers.program.nodes[len(layers.program) - len(self.racks.coda) :])
        modules = [layers.owner(one) for one in nodes.sublayers()]
        modules += [self.model.get_submodule(path) for path in (family.final_norm, family.head)]
        return list({id(one): one for module in modules for one in module.parameters()}.values())


def save_rack(rack: RackModel, path: Path) -> None:
    """Write a rack's tensors, with its place, configuration and program as metadata, whole or not at all."""
    found = rack.tensors()
    racks = rack.racks
    said = {
        "index": rack.index,
        "racks": racks.texts,
        "depth": racks.depth,
        "whole": str(racks.program),
        "program": str(found.program),
        "config": found.config.to_dict(),
    }
    tensors = {name: one.cpu().contiguous() for name, one in found.by_name().items()}
    if found.config.tie_word_embeddings:
        tensors = {
            name: one for name, one in tensors.items() if not name.startswith(f"{found.family.head}.")
        }
    with whole_file(path, durable=True) as beside:
        save_file(tensors, beside, metadata={_KEY: json.dumps(said)})


def open_rack(path: Path) -> RackModel:
    """Read a rack; only its own tensors come into memory."""
    read_header(path)
    with safe_open(path, framework="pt") as file:
        said: Any = (file.metadata() or {}).get(_KEY)
        # In memory of their own: where numbers lie in a file, products of them may be rounded otherwise.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 - it is no mapping
    try:
        said = json.loads(said)
        config = CONFIG_MAPPING[said["config"]["model_type"]].from_dict(said["config"])
        racks = Racks.parse(said["racks"], Program.parse(said["whole"]), said["depth"])
        index = int(said["index"])
        program = Program.parse(said["program"])
        nodes = len(racks.ranges[index].nodes)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} is not the file of a rack ({first_line(error)}); begin the run again"
        ) from error
    return RackModel(racks, index, build_stretch(config, program, tensors, index == 0, nodes))


def rack_of(whole: PreTrainedModel, racks: Racks, index: int, seed: int | None = None) -> RackModel:
    """Copy one rack out of a model.

    A rack has its own layers, a coda's, a final norm and a head; the first one the embeddings, too. Where the model's
    head is its embedding, every rack's head begins as a copy of that.

    Args:
        whole: edited or not; it is left as it is.
        racks: of its program, in the numbers of the layers that it was edited from.
        seed: of the coda's first random numbers, as of a new model, but for a head that was the embedding; None copies
            the model's last layers, norm and head.

    Raises:
        ValueError: if the model runs another program, or has tensors that no rack is to have.
    """
    found = tensors_of(whole)
    layers_by_recipe(racks.program, found.program)
    require_known(whole)
    family = found.family
    nodes = found.program.nodes
    own = [nodes[place] for place in racks.ranges[index].nodes]
    private = list[Node]()  # which its own coda is made like; the last rack has none
    if index != racks.last:
        private = [nodes[place] for place in racks.coda]
    tied = bool(found.config.tie_word_embeddings)
    first = layers_in(own)
    behind = layers_in(private)
    coda = named_layers(family, [found.layers[source] for source in behind], len(first))
    tensors = named_layers(family, [found.layers[source] for source in first])
    tensors |= found.outside(family.final_norm, family.head)
    if seed is not None and index != racks.last:
        config_of_coda = config_for(found.config, behind or [0], tied=False)
        dtype = next(iter(found.others.values())).dtype
        with torch.random.fork_rng([]):
            torch.manual_seed((seed << 20) + index + 1)
            model_class: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config_of_coda)]
            model = model_class._from_config(config_of_coda, dtype=dtype)
        fresh = tensors_of(model)
        ends = [family.final_norm]
        if not tied:
            ends.append(family.head)
        coda = named_layers(family, fresh.layers if behind else [], len(first)) | fresh.outside(*ends)
    tensors |= coda
    if index == 0:
        tensors |= found.outside(*family.embeddings)
    config = config_for(found.config, [*first, *behind], tied and len(racks) == 1)
    numbers = {name: one.clone(memory_format=torch.contiguous_format) for name, one in tensors.items()}
    program = renumber_layers(own) + renumber_layers(private, len(first))
    return RackModel(racks, index, build_stretch(config, program, numbers, index == 0, len(own)))


def require_known(model: PreTrainedModel) -> None:
    """Refuse a model with tensors that no rack would have."""
    found = tensors_of(model)
    family = found.family
    names = found.outside(*family.embeddings, family.final_norm, family.head)
    if (name := next((one for one in found.others if one not in names), None)) is not None:
        raise ValueError(
            f"{name} lies outside the layers, the embeddings, the final norm and the head; a model with such a tensor "
            "is not cut into racks"
        )


def assemble(whole: PreTrainedModel, racks: Racks, trained: Sequence[RackModel]) -> PreTrainedModel:
    """Build the whole model of its racks' layers, the first one's embeddings, and the last one's norm and head.

    Of several racks, an embedding that was also the head is stored apart from it.

    Args:
        whole: that the racks were cut out of; it is left as it is.
        trained: all racks in order; their numbers are shared with the result.

    Returns:
        A model in evaluation mode that runs the whole program.
    """
    found = tensors_of(whole)
    family = found.family
    nodes = found.program.nodes
    tied = bool(found.config.tie_word_embeddings) and len(racks) == 1
    layers = list(found.layers)
    for rack in trained:
        own = layers_in(nodes[place] for place in racks.ranges[rack.index].nodes)
        # Behind them are the coda's.
        for source, tensors in zip(own, rack.tensors().layers, strict=False):
            layers[source] = tensors
    first = trained[0].tensors()
    last = trained[-1].tensors()
    others = first.outside(*family.embeddings)
    others |= last.outside(family.final_norm, family.head)
    config = config_for(found.config, range(len(layers)), tied)
    model = restore(
        build_stretch(config, found.program, others | named_layers(family, layers), embeds=True)
    )
    model.name_or_path = model.config._name_or_path = str(whole.name_or_path)
    model.generation_config = whole.generation_config
    dense = Program.dense(len(layers), family.steps_per_layer)
    if found.program == dense:
        return model
    return edit(model, found.program)
