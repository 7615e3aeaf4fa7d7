"""What one rack computes: a stretch of a model's program, and a private coda that predicts from its end.

The loss is that of the coda's prediction; what the rack hands on has no gradient, so that nothing ever comes back to it
from the racks behind it (`papers/block-wise-local-training.txt`). The last rack's coda is the end of the model itself.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from transformers import PreTrainedModel

from surgeon.checkpoint.codas import Coda
from surgeon.language.program import Program
from surgeon.models.families import family_of
from surgeon.training.racks.partition import Racks
from surgeon.training.racks.stretch import StretchLayers, fed, stretch_layers
from surgeon.training.racks.tensors import ModelTensors, config_for, layers_in, named_layers, renumbered, tensors_by


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
        found, nodes = self.tensors(), self.layers.program.nodes[self.own_nodes :]
        first = 1 + max(layers_in(self.layers.program.nodes[: self.own_nodes]))
        family, sources = found.family, layers_in(nodes)
        config = config_for(found.config, sources or [0], tied=False)
        output = found.outside(family.final_norm, family.head)
        return Coda(config, renumbered(nodes), output | named_layers(family, found.layers[first:]))

    def coda_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters of its coda, by names that are the same in every rack; the last rack's are the model's own.

        The names are `layers.0...`, in the coda's own numbers (or with a slice in place of the number), `norm...` and
        `head...`.
        """
        layers, family = self.layers, family_of(self.model.config)
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
