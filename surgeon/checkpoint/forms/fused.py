"""The fused form: layers of different widths; k layers side by side are one that is k times as wide.

Its configuration describes the architecture in the words of the modeling file inside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from surgeon.checkpoint.forms.base import (
    BY_THE_FILE,
    Form,
    Inexpressible,
    Layout,
    RemoteCode,
    StoredLayer,
    by_transformers,
    config_beside,
    require_divisible,
    require_uniform,
    stored_layers,
)
from surgeon.checkpoint.forms.planning import (
    Compute,
    Computed,
    TensorPlanner,
    averaging_dtype,
    known_modules,
    whole_matrix,
)
from surgeon.checkpoint.stored import StoredModel
from surgeon.checkpoint.tensor_file import PlannedTensor
from surgeon.language.program import Program, Step, steps_of
from surgeon.language.sublayer import ATTENTION, FEED_FORWARD, KINDS, Sublayer
from surgeon.models.edit import PROGRAM_PREFIX
from surgeon.models.families import Family, Projection
from surgeon.models.families.base import long_rotary_angles, rotated_layers, windowed_layers
from surgeon.models.families.fused import FUSED as FUSED_FAMILY
from surgeon.models.families.fused import OFFSET, POSITIONS, PROJECTIONS
from surgeon.models.families.specs import Clamp, Growth, Unit
from surgeon.models.weights import FactorSource, ModelWeights

# Rows computed at a time: they stay in the second cache, and the heap reuses their memory.
ROWS = 64


class FusedPlanner(TensorPlanner):
    """Plans the tensors of the fused form: every family's under the same names, each projection on its own.

    Attributes:
        biases: whether the written projections have a bias, by role: where any layer's has, or a norm's shift goes
            there; layers without one get zeros.
    """

    def __init__(
        self, original: StoredModel, dtype: torch.dtype | None, factors: FactorSource | None = None
    ) -> None:
        super().__init__(original, dtype, factors)
        stored = [name for name in self.source.names() if name.startswith(self.prefix)]
        self.biases = {
            projection.role: (projection.reads_stream and self.family.norms.kind == "layer")
            or any(name.endswith(f".{projection.path}.bias") for name in stored)
            for spec in (self.family.attention, self.family.mlp)
            for projection in spec.projections
        }

    def plan(self, layers: Sequence[tuple[Sublayer, ...]]) -> list[PlannedTensor]:
        planned = self._move(f"{FUSED_FAMILY.embedding}.weight", self.family.embedding)
        if self.family.positions.embedding is not None:
            planned += self._move(f"{POSITIONS}.weight", self.family.positions.embedding)
        for index, layer in enumerate(layers):
            for kind in KINDS:
                sublayers = tuple(sublayer for sublayer in layer if sublayer.kind == kind)
                for sublayer in sublayers:  # whose tensors none may be left behind
                    modules = known_modules(self.family.spec(kind))
                    for path in self.paths(sublayer):
                        if path.rpartition(".")[0] not in modules:
                            raise ValueError(
                                f"{path} of {self.family.name} cannot be stored in the fused form"
                            )
                tensors = self._tensors(kind, sublayers) if sublayers else {}
                for path, compute in tensors.items():
                    name = f"{FUSED_FAMILY.layers}.{index}.{path}"
                    planned += self.plan_tensors(name, compute)
        for part in self.family.norms.parts:
            planned += self._move(f"{FUSED_FAMILY.final_norm}.{part}", self.family.final_norm, part)
        return planned + self._head()

    def _head(self) -> list[PlannedTensor]:
        planned = []
        if not self.config.tie_word_embeddings:
            planned += self._move(f"{FUSED_FAMILY.head}.weight", self.family.head)
        if self.family.head_bias:
            planned += self._move(f"{FUSED_FAMILY.head}.bias", self.family.head, "bias")
        return planned

    def _move(self, name: str, path: str, part: str = "weight") -> list[PlannedTensor]:
        return self.plan_tensors(name, lambda weights: weights.tensor(f"{path}.{part}"))

    def _tensors(self, kind: str, sublayers: tuple[Sublayer, ...]) -> dict[str, Compute]:
        """Compute the projections, the norms of heads, and the norm before, which only norms in front of several."""
        spec = self.family.spec(kind)
        own = spec.stream_norms["norm"]
        written = FUSED_FAMILY.spec(kind).stream_norms["norm"]
        gain = torch.zeros_like if self.family.norms.unit_offset else torch.ones_like
        tensors: dict[str, Compute] = {}
        for part in self.family.norms.parts:
            compute = partial(self.part, sublayers[0], f"{own}.{part}")
            if len(sublayers) > 1:  # the gains and shifts of all of them are folded into what follows
                compute = partial(_as, gain if part == "weight" else torch.zeros_like, compute)
            tensors[f"{written}.{part}"] = compute
        for path in spec.head_norm.paths.values():
            tensors[f"{path}.weight"] = partial(self._head_gains, sublayers, f"{path}.weight")
        for projection in spec.projections:
            path = PROJECTIONS[projection.role].path
            tensors[f"{path}.weight"] = partial(self._weight, sublayers, projection)
            if self.biases[projection.role]:
                tensors[f"{path}.bias"] = partial(self._bias, sublayers, projection)
        return tensors

    def _weight(
        self, sublayers: tuple[Sublayer, ...], projection: Projection, weights: ModelWeights
    ) -> Computed:
        """Return (out_features, in_features) of all sublayers; float32 where norms' gains are folded in."""
        matrices = [whole_matrix(projection.role, sublayer, weights) for sublayer in sublayers]
        if len(matrices) == 1:
            return matrices[0]
        if not projection.reads_stream:
            # Rows that have the columns of all matrices.
            parts = zip(*(matrix.split(ROWS) for matrix in matrices), strict=True)
            return (self._in_turn(list(rows), sublayers, dim=1) for rows in parts)
        if not self.family.norms.parts:
            return self._in_turn(matrices, sublayers, dim=0)
        offset = int(self.family.norms.unit_offset)
        gains = [offset + self._norm_part(sublayer, "weight", weights).float() for sublayer in sublayers]
        # Blocks of the matrices take turns, and gains are multiplied in: that makes one new tensor, not two.
        blocks = self._blocks(sublayers)
        return (
            rows.to(torch.float32, copy=True).mul_(gain)
            for turn in range(blocks)
            for matrix, gain in zip(matrices, gains, strict=True)
            for rows in matrix.unflatten(0, (blocks, -1))[turn].split(ROWS)
        )

    def _bias(
        self, sublayers: tuple[Sublayer, ...], projection: Projection, weights: ModelWeights
    ) -> Tensor:
        """Return (out_features,) of all sublayers; float32 if there are several."""
        biases = []
        for sublayer in sublayers:
            bias = weights.bias(sublayer, projection.role, averaging_dtype(sublayer))
            if bias is None:
                matrix = whole_matrix(projection.role, sublayer, weights)
                bias = matrix.new_zeros(matrix.shape[0])
            biases.append(bias)
        if len(biases) == 1:
            return biases[0]
        biases = [bias.float() for bias in biases]
        if not projection.reads_stream:
            return torch.stack(biases).sum(dim=0)
        if self.family.norms.kind == "layer":
            for index, sublayer in enumerate(sublayers):
                shift = self._norm_part(sublayer, "bias", weights).float()
                matrix = whole_matrix(projection.role, sublayer, weights)
                biases[index] = biases[index] + matrix.float() @ shift
        return self._in_turn(biases, sublayers, dim=0)

    def _head_gains(self, sublayers: tuple[Sublayer, ...], path: str, weights: ModelWeights) -> Tensor:
        """Return gains of head norms, (turns, head_dim), in the order of the sublayers' turns."""
        blocks = self._blocks(sublayers)
        groups = groups_of(sublayers, self.family.units(self.config)["kv_heads"])
        turns = [count // blocks for count in groups]
        gains = [self.part(sublayer, path, weights) for sublayer in sublayers]
        return torch.cat([gain.expand(times, -1) for gain, times in zip(gains, turns, strict=True)])

    def _norm_part(self, sublayer: Sublayer, part: str, weights: ModelWeights) -> Tensor:
        spec = self.family.spec(sublayer.kind, sublayer.layers[0])
        return self.part(sublayer, f"{spec.stream_norms['norm']}.{part}", weights)

    def _in_turn(self, parts: list[Tensor], sublayers: tuple[Sublayer, ...], dim: int) -> Tensor:
        """Interleave heads (or neurons) of several sublayers along one dimension, in blocks."""
        blocks = self._blocks(sublayers)
        return torch.cat([part.unflatten(dim, (blocks, -1)) for part in parts], dim + 1).flatten(
            dim, dim + 1
        )

    def _blocks(self, sublayers: tuple[Sublayer, ...]) -> int:
        """Count the turns of all sublayers' heads, in whole KV groups.

        A tensor-parallel rank with whole turns has heads of all layers in one order, and norms one gain a turn.
        """
        if sublayers[0].kind == FEED_FORWARD:
            return 1
        return math.gcd(*groups_of(sublayers, self.family.units(self.config)["kv_heads"]))


def groups_of(sublayers: tuple[Sublayer, ...], units: int) -> list[int]:
    """Return the KV heads, or neurons, of several sublayers; `units` are a whole one's."""
    widths = [units if sublayer.width is None else sublayer.width for sublayer in sublayers]
    return [
        width // (one.piece[1] if one.piece else 1) for width, one in zip(widths, sublayers, strict=True)
    ]


def _as(
    like: Callable[[Tensor], Tensor], compute: Callable[[ModelWeights], Tensor], weights: ModelWeights
) -> Tensor:
    return like(compute(weights))


# The config.json of the layers one beside the other, as their architecture has it.
ORIGINAL_KEY = "surgeon_original"
WIDTHS_KEY = "per_layer_config"
# An entry that lets transformers read the other layers' widths.
GLOBAL_WIDTHS_KEY = "allow_global_per_layer_attribute_access"

KIND_NAMES = {ATTENTION: "attention", FEED_FORWARD: "mlp"}  # as layers say that they skip it
PATHS = {role: projection.path for role, projection in PROJECTIONS.items()}
# What means the same in every architecture.
CARRIED = (
    "vocab_size",
    "hidden_size",
    "max_position_embeddings",
    "initializer_range",
    "use_cache",
    "tie_word_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
    "original_max_position_embeddings",
)


class Fused(Form):
    """Layers side by side in one, with the modeling file that builds layers of different widths."""

    name = "fused"
    # The latter was edited again.
    model_types = (FUSED_FAMILY.model_type, PROGRAM_PREFIX + FUSED_FAMILY.model_type)
    shipped = RemoteCode("modeling_surgeon_fused", lambda _: "SurgeonFused")  # one for all architectures
    widths_differ = True
    why_code = "its layers differ in width, which no class of transformers allows"
    on_vllm = BY_THE_FILE
    planner = FusedPlanner

    def lay_out(self, program: Program, family: Family, config: Any) -> Layout:
        layers = stored_layers(program, family.steps_per_layer, partly=True)
        if family.mixture is not None:
            raise Inexpressible(
                f"layers of {family.name} are mixtures of experts, and two mixtures are not one: each router weighs "
                "its own experts, which one softmax over those of both would weigh otherwise"
            )
        if any(spec.norms_output for spec in family.specs()):
            raise Inexpressible(
                f"{family.name} norms what a sublayer adds to the stream, and the norm of a sum is not the sum of norms"
            )
        if (why_whole := family.attention.why_whole) is not None:
            raise Inexpressible(f"in {family.name} {why_whole}, of which ranks have some")
        if why_not := family.unfusable(config):
            raise Inexpressible(why_not)
        lists = {
            family.window.layers: windowed_layers(family, config),
            family.positions.layers: rotated_layers(family, config),
        }
        require_uniform(
            layers, family, {name: values for name, values in lists.items() if name is not None}
        )
        require_divisible(program.sublayers(), family, config)
        wide = sum(not layer.is_single and not layer.lacks for layer in layers)
        narrow = sum(layer.is_single and not layer.has_stock_width for layer in layers)
        partial = sum(bool(layer.lacks) for layer in layers)
        what = []
        if wide or not (narrow or partial):
            what.append(f"{wide} of {len(layers)} stored layers hold several side by side")
        if partial:
            what.append(f"{partial} of {len(layers)} layers have no attention or no MLP")
        if narrow:
            what.append(f"{narrow} of {len(layers)} layers are narrower than the model's")
        who = "transformers loads" if family.head_bias else "transformers and vLLM load"
        reason = f"{' and '.join(what)}; {who} it with the modeling file inside (trust_remote_code=True)"
        return Layout(self, reason, layers)

    def config(
        self, original: StoredModel, layout: Layout, tensors: list[PlannedTensor]
    ) -> dict[str, Any]:
        """A configuration of the form's own, whatever the original's."""
        shapes = {tensor.name: tensor.shape for tensor in tensors}
        kept = {
            key: value
            for key, value in original.checkpoint.config.items()
            if key in ("dtype", "torch_dtype")
        }
        apart = tuple(
            StoredLayer(layer.attention[at : at + 1], layer.feed_forward[at : at + 1])
            for layer in layout.layers
            for at in range(max(len(layer.attention), len(layer.feed_forward)))
        )
        kept[ORIGINAL_KEY] = super().config(original, replace(layout, layers=apart), tensors)
        return kept | fused_config(original.family, original.config, layout, shapes)

    def class_entries(self, original: StoredModel, layout: Layout) -> dict[str, Any]:  # noqa: ARG002
        return self.shipped.entries(FUSED_FAMILY.model_type)

    def stock_config(self, entries: dict[str, Any], family: Family) -> Any:
        config = config_beside(entries, self.shipped.model_class(family.model_type).config_class)
        config.auto_map = self.shipped.auto_map(family.model_type)
        return config

    def own_program(self, config: Any) -> Program | None:
        skipped = [getattr(layer, "skip", []) for layer in config.per_layer_config]
        if not any(skipped):
            return None
        family = FUSED_FAMILY.variant(FUSED_FAMILY, config)
        dense = Program.dense(len(skipped), family.steps_per_layer)
        found = []
        for step in steps_of(dense.nodes):
            there = tuple(
                one for one in step.sublayers if KIND_NAMES[one.kind] not in skipped[one.layers[0]]
            )
            if there:
                found.append(Step(there))
        return Program(tuple(found))

    def serving(self, stored: StoredModel, serve: str) -> tuple[str, str]:
        if not stored.family.head_bias:
            return super().serving(stored, serve)
        why_not = "its backend's head has no bias (surgeon's plugin has, for what surgeon export --form program writes)"
        return by_transformers(f"in this form: {why_not}", serve)

    def model_class(self, stored: StoredModel) -> Any:
        found = self.shipped.model_class(stored.config.model_type)
        # With it save_pretrained writes the modeling file, too.
        found.register_for_auto_class("AutoModelForCausalLM")
        return found


FUSED = Fused()


def fused_config(
    family: Family, config: Any, layout: Layout, shapes: dict[str, tuple[int, ...]]
) -> dict[str, Any]:
    """Return the configuration's entries, apart from those that name classes.

    Args:
        config: the original's, as `transformers` reads it.
        shapes: of the tensors to be written, by name.
    """
    biases = {
        role: any(name.endswith(f"{path}.bias") for name in shapes) for role, path in PATHS.items()
    }
    units = family.units(config)
    scale = family.scales.attention(config)
    growth = family.attention.head_stage(Growth)
    clamp = family.attention.head_stage(Clamp)

    def read_dropout(attribute: str | None) -> Any:
        if attribute is None:
            return 0.0
        return getattr(config, attribute)

    windowed = windowed_layers(family, config)
    rotates = rotated_layers(family, config)
    rope = None
    positions = family.positions
    some_rotate = positions.layers is not None or positions.in_windows
    if positions.rotary:
        rope = dict(positions.rope(config))
        if not positions.partial:
            rope.pop("partial_rotary_factor", None)
    longer = long_rotary_angles(family, config) if positions.computes_anew else None
    entries = {key: getattr(config, key) for key in CARRIED if hasattr(config, key)} | {
        "model_type": FUSED_FAMILY.model_type,
        "base_model_type": family.model_type,
        "num_hidden_layers": len(layout.layers),
        "num_attention_heads": units["heads"],
        "num_key_value_heads": units["kv_heads"],
        "intermediate_size": units["neurons"],
        "head_dim": family.head_dim(config),
        "norm": OFFSET if family.norms.unit_offset else family.norms.kind,
        "norm_eps": family.norms.epsilon(config),
        "parallel_residual": family.steps_per_layer == 1,
        "head_bias": family.head_bias,
        "qkv_bias": biases["q"],
        "o_bias": biases["o"],
        "attention_scaling": family.head_dim(config) ** -0.5 if scale is None else scale,
        "clip_qkv": None if clamp is None else clamp.bound,
        "query_growth": None if growth is None else [growth.rate, growth.length],
        "embedding_scale": family.scales.embedding(config) or 1.0,
        "output_scale": family.scales.output(config) or 1.0,
        "logit_scale": family.scales.logits(config) or 1.0,
        "head_norm": family.attention.head_norm.gains is not None,
        # How far each layer's attention looks, in the words that `transformers` has for masks.
        "layer_types": [
            "sliding_attention" if windowed[layer.sources[0]] else "full_attention"
            for layer in layout.layers
        ],
        "sliding_window": getattr(config, family.window.tokens) if family.window.tokens else None,
        "rotary_layers": [rotates[layer.sources[0]] for layer in layout.layers] if some_rotate else None,
        "hidden_act": getattr(config, family.activation),
        "gated": family.mlp.projections[0].role == "gate",
        "up_bias": biases["up"],
        "down_bias": biases["down"],
        "rope_parameters": rope,
        "anew_beyond": None if longer is None else longer[0],  # computed again beyond so many tokens
        "rotary_neighbours": positions.neighbours,
        "learned_positions": shapes.get(f"{POSITIONS}.weight", (0,))[0],
        "position_offset": positions.offset,
        "positions_from_mask": positions.from_mask,
        "attention_dropout": read_dropout(family.dropout.attention),
        "residual_dropout": read_dropout(family.dropout.output or family.dropout.module),
        "mlp_dropout": read_dropout(family.dropout.mlp),
        "embedding_dropout": read_dropout(family.dropout.embedding),
    }
    widths = {
        str(k): _widths(layer, family, units)
        for k, layer in enumerate(layout.layers)
        if not layer.has_stock_width
    }
    if widths:
        entries |= {WIDTHS_KEY: widths, GLOBAL_WIDTHS_KEY: True}
    return entries


def _widths(layer: StoredLayer, family: Family, units: dict[Unit, int]) -> dict[str, Any]:
    groups = groups_of(layer.attention, units["kv_heads"])
    per_group = units["heads"] // units["kv_heads"]
    found: dict[str, Any] = {"skip": layer.lacks} if layer.lacks else {}
    if groups and family.attention.head_norm.gains is not None:
        found["head_norm_turns"] = sum(groups) // math.gcd(*groups)
    if groups:
        found |= {"num_attention_heads": sum(groups) * per_group, "num_key_value_heads": sum(groups)}
    if layer.feed_forward:
        found["intermediate_size"] = sum(groups_of(layer.feed_forward, units["neurons"]))
    return found
