"""The shapes of a model, from its configuration alone: what `ModelWeights` reads of stored tensors, without any."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from surgeon.language.program import KINDS, LayerShapes, Program, Sublayer
from surgeon.models.edit import check_layers
from surgeon.models.families import Family, Projection, family_of
from surgeon.models.weights import require_sliceable, unit_bounds
from surgeon.models.weights.layout import Units
from surgeon.runtime.plan.division import check_division, why_not
from surgeon.runtime.plan.specification import Plan

_NOWHERE = Path()  # no checkpoint


class MatrixShape(NamedTuple):
    """A matrix that is not there.

    Attributes:
        shape: (out_features, in_features).
    """

    shape: tuple[int, int]


@dataclass(frozen=True)
class ModelShapes:
    """What a model's costs depend on.

    Attributes:
        name: as the user knows it.
        hidden: the width of the stream.
        heads, kv_heads, neurons: of every layer.
        head_dim: the width of one head.
        vocabulary: rows of the embedding.
        tied: whether the head's weight is the embedding.
        layers: how many there are.
        positions: the longest text the model takes.
        windows: how many tokens each layer's attention looks at, None for all; nothing if all look at all.
        dtype: that its weights are stored in, as far as the configuration says.
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
    windows: tuple[int | None, ...] = ()
    dtype: str = "bfloat16"

    @classmethod
    def of(cls, name: str, config: Any) -> ModelShapes:
        """Those of a `transformers` configuration.

        Raises:
            ValueError: if its architecture is not supported, or its sizes fit no model.
        """
        family = family_of(config)
        units = family.units(config)
        shapes = cls(
            name=name,
            family=family,
            hidden=int(config.hidden_size),
            heads=units["heads"],
            kv_heads=units["kv_heads"],
            neurons=units["neurons"],
            head_dim=family.head_dim(config),
            vocabulary=int(config.vocab_size),
            tied=bool(config.tie_word_embeddings),
            layers=int(config.num_hidden_layers),
            positions=int(config.max_position_embeddings),
            windows=_windows(config, family),
            dtype=str(getattr(config, "dtype", None) or "bfloat16").removeprefix("torch."),
        )
        shapes._check()
        return shapes

    def _check(self) -> None:
        sizes = ("hidden", "heads", "kv_heads", "neurons", "head_dim", "vocabulary", "layers", "positions")
        for size in sizes:
            if getattr(self, size) < 1:
                raise ValueError(
                    f"the configuration of {self.name}: {size} must be at least 1, not {getattr(self, size)}"
                )
        if self.heads % self.kv_heads:
            raise ValueError(
                f"the configuration of {self.name}: {self.heads} heads do not divide among {self.kv_heads} KV heads"
            )

    def units(self, sublayer: Sublayer) -> Units:
        """How many heads and KV heads, or neurons, the whole sublayer has."""
        counts: Units = {"heads": self.heads, "kv_heads": self.kv_heads, "neurons": self.neurons}
        named = {projection.unit for projection in self.family.spec(sublayer.kind).projections}
        return {unit: count for unit, count in counts.items() if unit in named}

    def matrix(self, sublayer: Sublayer, role: str) -> MatrixShape:
        """A matrix of a sublayer, or of a slice of one, whether it is one matrix or the product of two factors."""
        projection: Projection = self.family.spec(sublayer.kind).projection(role)
        first, end = unit_bounds(self.units(sublayer)[projection.unit], sublayer.piece)
        divided = (end - first) * (1 if projection.unit == "neurons" else self.head_dim)
        return MatrixShape((divided, self.hidden) if projection.reads_stream else (self.hidden, divided))

    @property
    def layer_shapes(self) -> LayerShapes:
        """The matrices of a layer, without biases and norms."""
        found = {}
        for kind in KINDS:
            for projection in self.family.spec(kind).projections:
                found[projection.role] = self.matrix(Sublayer(kind, (0,)), projection.role).shape
        return LayerShapes(found)

    @property
    def position_rows(self) -> int:
        """Rows of a learned position embedding, 0 without one."""
        return self.positions + self.family.position_offset if self.family.position_embedding else 0

    def divides(self, program: Program, ranks: int) -> bool:
        """Whether heads and neurons divide among so many ranks."""
        return why_not(_different(program), self.units, ranks) is None

    def plan(self, program: Program, ranks: int, max_tokens: int, dtype: str, low_rank: Any, kv: Any) -> Plan:
        """What ranks would be told of this model: as `make_plan` has it, of a checkpoint that is there.

        What decides about numbers and not about costs (epsilon, activation, angles) is left out.

        Raises:
            ValueError: if the program names what the model does not have, heads or neurons do not divide among the
                ranks, or texts are longer than the model's positions.
        """
        self._check_program(program)
        check_division(_different(program), self.units, ranks)
        if max_tokens > self.positions:
            raise ValueError(
                f"prompt and output together are {max_tokens} tokens, and {self.name} has {self.positions} positions; "
                "shorten the prompt or ask for fewer tokens"
            )
        return Plan(
            folder=_NOWHERE,
            model_type=self.family.model_type,
            program=str(program),
            ranks=ranks,
            head_dim=self.head_dim,
            epsilon=0.0,
            activation="",
            rotary=None,
            hidden=self.hidden,
            vocabulary=self.vocabulary,
            layers=self.layers,
            max_tokens=max_tokens,
            tied=self.tied,
            ends=(),
            dtype=dtype,
            windows=self.windows,
            low_rank=low_rank,
            kv=kv,
            described=self.family,
        )

    def _check_program(self, program: Program) -> None:
        check_layers(program, self.layers)
        for sublayer in set(program.sublayers()):
            spec = self.family.spec(sublayer.kind)
            if sublayer.piece is not None:
                require_sliceable(spec, self.family)
            for role, _ in sublayer.ranks:
                spec.projection(role)  # a gate that the model lacks, say
            replace(sublayer, piece=None).parameters(self.layer_shapes)  # refuses ranks above those of the matrices


def _different(program: Program) -> Program:
    """The nodes that differ in more than their layers: all layers are alike, and each node is shared by itself."""
    alike = program.renamed(lambda sublayer: replace(sublayer, layers=(0,)))
    return Program(tuple(dict.fromkeys(alike.nodes)))


def _windows(config: Any, family: Family) -> tuple[int | None, ...]:
    windowed = family.windowed(config)
    if not any(windowed) or family.window is None:
        return ()
    window = int(getattr(config, family.window))
    return tuple(window if here else None for here in windowed)
