"""The fused form: layers of different widths; k of them that run side by side are one that is k times as wide.

Its configuration says what the architecture has, in the words of the modeling file inside.
"""

from __future__ import annotations

import math
from typing import Any

from surgeon.checkpoint import remote_code
from surgeon.checkpoint.forms.base import BY_THE_FILE, Form, Layout, by_transformers, config_beside
from surgeon.checkpoint.forms.fused_tensors import FusedPlanner, groups_of
from surgeon.checkpoint.forms.planning import PlannedTensor
from surgeon.checkpoint.forms.stored_layers import (
    Inexpressible,
    StoredLayer,
    require_divisible,
    require_uniform,
    stored_layers,
)
from surgeon.checkpoint.read import Checkpoint
from surgeon.checkpoint.stored import StoredModel
from surgeon.language.program import Program, Step, steps_of
from surgeon.language.sublayer import ATTENTION, FEED_FORWARD
from surgeon.models.edit import PROGRAM_PREFIX
from surgeon.models.families import Family
from surgeon.models.families.fused import FUSED as FUSED_FAMILY
from surgeon.models.families.fused import OFFSET, POSITIONS, PROJECTIONS
from surgeon.models.families.positions import long_rotary_angles, rotated_layers, windowed_layers
from surgeon.models.families.specs import Unit

WIDTHS_KEY = "per_layer_config"
GLOBAL_WIDTHS_KEY = "allow_global_per_layer_attribute_access"  # lets transformers read the other layers' widths

KIND_NAMES = {ATTENTION: "attention", FEED_FORWARD: "mlp"}  # as layers say that they skip it
PATHS = {role: projection.path for role, projection in PROJECTIONS.items()}
# What means the same in every architecture.
CARRIED = (
    *("vocab_size", "hidden_size", "max_position_embeddings", "initializer_range", "use_cache", "tie_word_embeddings"),
    *("bos_token_id", "eos_token_id", "pad_token_id", "original_max_position_embeddings"),
)


class Fused(Form):
    """Layers side by side in one, with the modeling file that builds layers of different widths."""

    name = "fused"
    shipped = remote_code.FUSED
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
        if family.attention.post_norm is not None:
            raise Inexpressible(
                f"{family.name} norms what a sublayer adds to the stream, and the norm of a sum is not the sum of norms"
            )
        if family.attention.norms_all_heads:
            raise Inexpressible(f"{family.name} norms queries and keys of all heads together")
        if family.attention.gains_each_head:
            raise Inexpressible(f"{family.name} has a gain for each head of queries and keys, of which ranks have some")
        if why_not := family.unfusable(config):
            raise Inexpressible(why_not)
        lists = {
            family.window_layers: windowed_layers(family, config),
            family.rotary_layers: rotated_layers(family, config),
        }
        require_uniform(layers, family, {name: values for name, values in lists.items() if name is not None})
        require_divisible(program.sublayers(), family, config)
        wide = sum(not layer.is_single and not layer.lacks for layer in layers)
        narrow = sum(layer.is_single and not layer.has_stock_width for layer in layers)
        partial = sum(bool(layer.lacks) for layer in layers)
        others = narrow or partial
        what = [f"{wide} of {len(layers)} stored layers hold several side by side"] if wide or not others else []
        what += [f"{partial} of {len(layers)} layers have no attention or no MLP"] if partial else []
        what += [f"{narrow} of {len(layers)} layers are narrower than the model's"] if narrow else []
        who = "transformers loads" if family.head_bias else "transformers and vLLM load"
        reason = f"{' and '.join(what)}; {who} it with the modeling file inside (trust_remote_code=True)"
        return Layout(self, reason, layers)

    def sources(self, program: Program, family: Family, num_layers: int) -> list[tuple[int, ...]]:  # noqa: ARG002
        return [tuple(layer.sources) for layer in stored_layers(program, family.steps_per_layer, partly=True)]

    def config(self, original: StoredModel, layout: Layout, tensors: list[PlannedTensor]) -> dict[str, Any]:
        """A configuration of the form's own, whatever the original's."""
        shapes = {tensor.name: tensor.shape for tensor in tensors}
        kept = {key: value for key, value in original.checkpoint.config.items() if key in ("dtype", "torch_dtype")}
        return kept | fused_config(original.family, original.config, layout, shapes)

    def class_entries(self, original: StoredModel, layout: Layout) -> dict[str, Any]:  # noqa: ARG002
        return self.shipped.entries(FUSED_FAMILY.model_type)

    def marks(self, config: dict[str, Any]) -> bool:
        own = FUSED_FAMILY.model_type
        return config.get("model_type") in (own, PROGRAM_PREFIX + own)  # the latter was edited again and saved

    def stock_config(self, checkpoint: Checkpoint, family: Family) -> Any:
        config = config_beside(checkpoint.config, self.shipped.model_class(family.model_type).config_class)
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
            there = tuple(one for one in step.sublayers if KIND_NAMES[one.kind] not in skipped[one.layers[0]])
            found += [Step(there)] if there else []
        return Program(tuple(found))

    def serving(self, stored: StoredModel, serve: str) -> tuple[str, str]:
        if not stored.family.head_bias:
            return super().serving(stored, serve)
        why_not = "its backend's head has no bias (surgeon's plugin has, for what surgeon export --form program writes)"
        return by_transformers(f"in this form: {why_not}", serve)

    def model_class(self, stored: StoredModel) -> Any:
        found = self.shipped.model_class(stored.config.model_type)
        found.register_for_auto_class("AutoModelForCausalLM")  # so that save_pretrained writes the modeling file, too
        return found


FUSED = Fused()


def fused_config(family: Family, config: Any, layout: Layout, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
    """The configuration's entries, apart from those that name classes.

    Args:
        config: the original's, as `transformers` reads it.
        shapes: of the tensors to be written, by name.
    """
    biases = {role: any(name.endswith(f"{path}.bias") for name in shapes) for role, path in PATHS.items()}
    units = family.units(config)
    scale = family.attention_scale(config)
    growth = family.query_growth(config)

    def dropped(attribute: str | None) -> Any:
        if attribute is None:
            return 0.0
        return getattr(config, attribute)

    windowed = windowed_layers(family, config)
    rotates = rotated_layers(family, config)
    rope = None
    some_rotate = family.rotary_layers is not None or family.rotary_in_windows
    if family.rotary:
        rope = dict(family.rope(config))
        if not family.partly_rotary:
            rope.pop("partial_rotary_factor", None)
    longer = long_rotary_angles(family, config) if family.computes_anew else None
    entries = {key: getattr(config, key) for key in CARRIED if hasattr(config, key)} | {
        "model_type": FUSED_FAMILY.model_type,
        "base_model_type": family.model_type,
        "num_hidden_layers": len(layout.layers),
        "num_attention_heads": units["heads"],
        "num_key_value_heads": units["kv_heads"],
        "intermediate_size": units["neurons"],
        "head_dim": family.head_dim(config),
        "norm": OFFSET if family.unit_offset else family.norm_kind,
        "norm_eps": family.epsilon(config),
        "parallel_residual": family.steps_per_layer == 1,
        "head_bias": family.head_bias,
        "qkv_bias": biases["q"],
        "o_bias": biases["o"],
        "attention_scaling": family.head_dim(config) ** -0.5 if scale is None else scale,
        "clip_qkv": family.bound(config),
        "query_growth": None if growth is None else [growth.rate, growth.length],
        "embedding_scale": family.embedding_scale(config) or 1.0,
        "output_scale": family.output_scale(config) or 1.0,
        "logit_scale": family.logit_scale(config) or 1.0,
        "head_norm": bool(family.attention.head_norms),
        # How far each layer's attention looks, in the words that `transformers` has for masks.
        "layer_types": [
            "sliding_attention" if windowed[layer.sources[0]] else "full_attention" for layer in layout.layers
        ],
        "sliding_window": getattr(config, family.window) if family.window else None,
        "rotary_layers": [rotates[layer.sources[0]] for layer in layout.layers] if some_rotate else None,
        "hidden_act": getattr(config, family.activation),
        "gated": family.gated,
        "up_bias": biases["up"],
        "down_bias": biases["down"],
        "rope_parameters": rope,
        "anew_beyond": None if longer is None else longer[0],  # computed again beyond so many tokens
        "rotary_neighbours": family.rotary_neighbours,
        "learned_positions": shapes.get(f"{POSITIONS}.weight", (0,))[0],
        "position_offset": family.position_offset,
        "positions_from_mask": family.positions_from_mask,
        "attention_dropout": dropped(family.attention_dropout),
        "residual_dropout": dropped(family.dropout or family.module_dropout),
        "mlp_dropout": dropped(family.mlp_dropout),
        "embedding_dropout": dropped(family.embedding_dropout),
    }
    widths = {
        str(k): _widths(layer, family, units) for k, layer in enumerate(layout.layers) if not layer.has_stock_width
    }
    return entries | ({WIDTHS_KEY: widths, GLOBAL_WIDTHS_KEY: True} if widths else {})


def _widths(layer: StoredLayer, family: Family, units: dict[Unit, int]) -> dict[str, Any]:
    groups = groups_of(layer.attention, units["kv_heads"])
    per_group = units["heads"] // units["kv_heads"]
    found: dict[str, Any] = {"skip": layer.lacks} if layer.lacks else {}
    if groups and family.attention.head_norms:
        found["head_norm_turns"] = sum(groups) // math.gcd(*groups)
    if groups:
        found |= {"num_attention_heads": sum(groups) * per_group, "num_key_value_heads": sum(groups)}
    if layer.feed_forward:
        found["intermediate_size"] = sum(groups_of(layer.feed_forward, units["neurons"]))
    return found
