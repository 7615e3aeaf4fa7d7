"""A model's shapes from its configuration alone, as `ModelWeights` reads them of stored tensors.

A program is held against them, too (`check_layers`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from surgeon.language.program import Program
from surgeon.language.sublayer import LayerShapes, Sublayer
from surgeon.models.families import Family, Projection, family_of
from surgeon.models.families.base import attention_windows, longest_text
from surgeon.models.families.specs import NEURONS, Latent, Units, unit_bounds
from surgeon.models.weights.layers import narrow_units


class MatrixShape(NamedTuple):
    """A matrix that is not there.

    Attributes:
        shape: (out_features, in_features).
    """

    shape: tuple[int, int]


@dataclass(frozen=True)
class ModelShapes:
    """The sizes of a model that its costs depend on.

    Attributes:
        name: as the user knows it.
        hidden: width of the stream.
        heads, kv_heads, neurons: of every layer.
        head_dim: width of one head.
        vocabulary: rows of the embedding.
        tied: whether the head's weight is the embedding.
        positions: the longest text the model takes.
        windows: tokens that each layer's attention looks at, None for all; nothing if all look at all.
        dtype: of stored weights, as far as the configuration says.
        layer_shapes: the matrices of the layers, without biases and norms.
        latent: the sizes of latent attentions.
    """

    name: str
    family: Family
    hidden: int
    heads: int
    kv_heads: int
    neurons: int
    head_dim: int
    vocabulary: int
    tied: bool
    layers: int
    positions: int
    layer_shapes: LayerShapes = field(hash=False)  # they have mappings
    windows: tuple[int | None, ...] = ()
    dtype: str = "bfloat16"
    latent: Latent | None = None

    @classmethod
    def of(cls, name: str, config: Any) -> ModelShapes:
        """Read a `transformers` configuration.

        Raises:
            ValueError: if its architecture is not supported, or its sizes fit no model.
        """
        family = family_of(config)
        units = family.units(config)
        latent = family.latent(config)
        shapes = cls(
            name=name,
            family=family,
            hidden=int(config.hidden_size),
            heads=units["heads"],
            kv_heads=units["kv_heads"] if latent is None else latent.heads,
            neurons=units["neurons"],
            head_dim=family.head_dim(config) if latent is None else latent.width,
            vocabulary=int(config.vocab_size),
            tied=bool(config.tie_word_embeddings),
            layers=int(config.num_hidden_layers),
            positions=longest_text(family, config),
            layer_shapes=family.layer_shapes(config),
            windows=attention_windows(family, config, int(config.num_hidden_layers)),
            dtype=str(getattr(config, "dtype", None) or "bfloat16").removeprefix("torch."),
            latent=latent,
        )
        sizes = (
            "hidden",
            "heads",
            "kv_heads",
            "neurons",
            "head_dim",
            "vocabulary",
            "layers",
            "positions",
        )
        for size in sizes:
            if getattr(shapes, size) < 1:
                raise ValueError(
                    f"the configuration of {name}: {size} must be at least 1, not {getattr(shapes, size)}"
                )
        if shapes.heads % shapes.kv_heads:
            raise ValueError(
                f"the configuration of {name}: {shapes.heads} heads do not divide among {shapes.kv_heads} KV heads"
            )
        return shapes

    def units(self, sublayer: Sublayer) -> Units:
        """Count heads and KV heads, or neurons, of a sublayer before it is sliced; refuse more than its layer has."""
        counts: Units = {}
        for projection in self.family.spec(sublayer.kind, sublayer.layers[0]).projections:
            features = self.layer_shapes.layer_of(sublayer).matrices[projection.role][
                1 - int(projection.reads_stream)
            ]
            counts[projection.unit] = features // (1 if projection.unit in NEURONS else self.head_dim)
        return narrow_units(sublayer, counts)

    def matrix(self, sublayer: Sublayer, role: str) -> MatrixShape:
        """Return the shape of a matrix of a sublayer, of an expert or of a slice, be it whole or two factors."""
        projection: Projection = self.family.spec(sublayer.kind, sublayer.layers[0]).projection(role)
        first, end = unit_bounds(self.units(sublayer), projection.unit, sublayer.piece, sublayer.span)
        divided = (end - first) * (1 if projection.unit in NEURONS else self.head_dim)
        return MatrixShape((divided, self.hidden) if projection.reads_stream else (self.hidden, divided))

    @property
    def position_rows(self) -> int:
        """Rows of a learned position embedding."""
        if self.family.positions.rotary:
            return 0
        return self.positions + self.family.positions.offset

    @property
    def outside_layers(self) -> int:
        """Numbers in the embeddings and the head, a shared matrix counted once."""
        return (self.vocabulary * (1 if self.tied else 2) + self.position_rows) * self.hidden


def check_layers(program: Program, num_layers: int) -> None:
    """Refuse a program that names a layer the model does not have, or as `Program.require_steps`."""
    program.require_steps()
    for sublayer in program.sublayers():
        if max(sublayer.layers) >= num_layers:
            raise ValueError(f"{sublayer} is out of range: the model's layers are 0 to {num_layers - 1}")
