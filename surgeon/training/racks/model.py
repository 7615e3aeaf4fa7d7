"""What one rack computes: a stretch of a model's program, and a private coda that predicts from its end.

The loss is that of the coda's prediction; what the rack hands on has no gradient, so that nothing ever comes back to it
from the racks behind it (`papers/block-wise-local-training.txt`). The last rack's coda is the end of the model itself.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedModel

from surgeon.checkpoint.codas import Coda
from surgeon.checkpoint.tensor_file import read_header
from surgeon.errors import first_line
from surgeon.language.program import Program
from surgeon.models.families import family_of
from surgeon.processes.files import whole_file
from surgeon.training.racks.partition import Racks, layers_in
from surgeon.training.racks.stretch import StretchLayers, build_stretch, fed, stretch_layers
from surgeon.training.racks.tensors import ModelTensors, config_for, named_layers, renumbered, tensors_by

_KEY = "surgeon_rack"  # in the file's metadata


@dataclass
class RackModel:
    """One rack's model.

    Attributes:
        racks: that it is one of.
        index: which one.
        model: a stock model of the rack's own layers and its coda's, which runs their part of the program.
    """

    racks: Racks
    index: int
    model: PreTrainedModel

    @property
    def is_first(self) -> bool:
        """Whether its stream begins with the embedded tokens."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """Whether its prediction is the whole model's."""
        return self.index == self.racks.last

    @property
    def layers(self) -> StretchLayers:
        """What runs the program."""
        return stretch_layers(self.model)

    @property
    def own_nodes(self) -> int:
        """How many nodes of its program come before the private coda."""
        return len(self.racks.ranges[self.index].nodes)

    def forward(self, input_ids: Tensor, stream: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The stream that is handed on, (batch, tokens, hidden), without a gradient, and the coda's logits.

        Args:
            input_ids: (batch, tokens).
            stream: what the rack before handed on; None for the first rack.

        Raises:
            ValueError: if a rack that needs a stream has none, or one of another shape.
        """
        with fed(self.model, stream) as layers:
            logits: Tensor = self.model(input_ids=input_ids, use_cache=False).logits
            assert layers.outgoing is not None
            return layers.outgoing, logits

    def tensors(self) -> ModelTensors:
        """Its numbers, shared with it: its own layers, then its private coda's, under the numbers of its program."""
        return tensors_by(self.model, self.layers.program)

    def coda(self) -> Coda:
        """The private coda, its numbers shared with it.

        Raises:
            ValueError: if it is the last rack, which has none.
        """
        if self.is_last:
            raise ValueError("the last rack has no coda of its own: its prediction is the model's")
        found = self.tensors()
        nodes = self.layers.program.nodes[self.own_nodes :]
        first = 1 + max(layers_in(self.layers.program.nodes[: self.own_nodes]))
        family = found.family
        sources = layers_in(nodes)
        config = config_for(found.config, sources or [0], tied=False)
        output = found.outside(family.final_norm, family.head)
        return Coda(config, renumbered(nodes), output | named_layers(family, found.layers[first:]))

    def coda_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of its coda, by names that are the same in every rack; the last rack's are the model's own.

        The names are `layers.0...`, in the coda's own numbers (or with a slice in place of the number), `norm...` and
        `head...`.
        """
        layers = self.layers
        family = family_of(self.model.config)
        nodes = Program(layers.program.nodes[len(layers.program) - len(self.racks.coda) :])
        found: dict[str, nn.Parameter] = {}
        for own, shared in zip(nodes.sublayers(), renumbered(nodes.nodes).sublayers(), strict=True):
            derived = layers.is_derived(own)
            place = str(shared) if derived else str(shared.layers[0])
            for name, parameter in layers.owner(own).named_parameters():
                found[f"layers.{place}.{name}"] = parameter
        for path, called in ((family.final_norm, "norm"), (family.head, "head")):
            module = self.model.get_submodule(path)
            found |= {f"{called}.{name}": parameter for name, parameter in module.named_parameters()}
        return found


def save_rack(rack: RackModel, path: Path) -> None:
    """Write a rack: its tensors, and as metadata its place among the racks, its configuration and its program.

    The file is there whole or not at all.

    Raises:
        OSError: if the disk is full or cannot be written.
    """
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
    tensors = {name: one.cpu().contiguous() for name, one in found.named().items()}
    if found.config.tie_word_embeddings:
        tensors = {name: one for name, one in tensors.items() if not name.startswith(f"{found.family.head}.")}
    with whole_file(path, durable=True) as beside:
        save_file(tensors, beside, metadata={_KEY: json.dumps(said)})


def open_rack(path: Path) -> RackModel:
    """A rack that was written; only its own tensors come into memory.

    Raises:
        FileNotFoundError: if there is no such file.
        ValueError: if it is damaged, or no rack's.
    """
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
        raise ValueError(f"{path} is not the file of a rack ({first_line(error)}); begin the run again") from error
    return RackModel(racks, index, build_stretch(config, program, tensors, index == 0, nodes))
