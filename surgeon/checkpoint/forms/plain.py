"""The plain form: every layer of the program is one attention and one feed-forward, and all are alike."""

from __future__ import annotations

from typing import Any

from surgeon.checkpoint.forms.base import (
    Form,
    Inexpressible,
    Layout,
    StoredLayer,
    per_layer_lists,
    require_uniform,
    stored_layers,
)
from surgeon.checkpoint.stored import StoredModel
from surgeon.checkpoint.tensor_file import PlannedTensor
from surgeon.language.program import Program
from surgeon.models.families import Family
from surgeon.models.routing import check_groups
from surgeon.models.weights.layers import narrow_units


class Plain(Form):
    """An ordinary checkpoint."""

    name = "plain"
    on_vllm = "Unmodified vLLM, without surgeon:"

    def lay_out(self, program: Program, family: Family, config: Any) -> Layout:
        layers = stored_layers(program, family.steps_per_layer)
        first = [(sublayer.kind, sublayer.width) for sublayer in layers[0].sublayers]
        for layer in layers:
            if (
                not layer.is_single
                or [(sublayer.kind, sublayer.width) for sublayer in layer.sublayers] != first
            ):
                wide = " ".join(map(str, layer.sublayers))
                raise Inexpressible(f"{wide} would be a layer of another width than the others")
        for layer in layers:
            if family.shares_norm and len({one.layers for one in layer.sublayers}) > 1:
                wide = " ".join(map(str, layer.sublayers))
                raise Inexpressible(
                    f"{wide} would be one layer, whose sublayers have one norm in {family.name}"
                )
        require_uniform(layers, family, per_layer_lists(family, config, config.to_dict()))
        reason = f"the program is a sequence of {len(layers)} whole layers, which any software loads"
        try:
            family.entries.follow_mlp(
                config, [one.layers[0] for layer in layers for one in layer.feed_forward[:1]]
            )
        except ValueError as error:  # of configurations that cannot say which layers are dense
            raise Inexpressible(str(error)) from error
        if widths := _widths(layers[0], family, config) | _experts(layers, family, config):
            reason = f"its {len(layers)} layers are all of one width, which any software loads"
            try:
                type(config).from_dict(config.to_dict() | widths)
            except Exception as error:  # what it checks of its entries
                reason = str(error).strip().splitlines()[-1].strip()
                raise Inexpressible(
                    f"{family.name} has no configuration of such layers ({reason})"
                ) from error
        return Layout(self, reason, layers)

    def config(
        self, original: StoredModel, layout: Layout, tensors: list[PlannedTensor]
    ) -> dict[str, Any]:
        widths = _widths(layout.layers[0], original.family, original.config)
        entries = super().config(original, layout, tensors) | widths
        for key, value in _experts(layout.layers, original.family, original.config).items():
            names = {key, original.config.attribute_map.get(key, key)}
            # Software knows the entry under any of these names.
            entries |= dict.fromkeys(names & entries.keys() or names, value)
        return entries


def _widths(layer: StoredLayer, family: Family, config: Any) -> dict[str, int]:
    """Return config.json's entries for layers that are narrower than the original's."""
    (attention,), (feed_forward,) = layer.attention, layer.feed_forward
    whole = family.units(config)
    entries = {}
    if feed_forward.width is not None:
        entries[family.intermediate] = feed_forward.width
    if attention.width is not None:
        if family.heads_fill_stream:
            raise Inexpressible(
                f"all heads of {family.name} together are as wide as the stream, however many there are"
            )
        units = narrow_units(attention, {"heads": whole["heads"], "kv_heads": whole["kv_heads"]})
        entries |= {"num_attention_heads": units["heads"], "num_key_value_heads": units["kv_heads"]}
        entries["head_dim"] = family.head_dim(config)
    aliases = config.attribute_map
    return {aliases.get(key, key): value for key, value in entries.items()}


def _experts(layers: tuple[StoredLayer, ...], family: Family, config: Any) -> dict[str, int]:
    """Return the configuration's entries for mixtures with fewer experts than the original's."""
    mixture = family.mixture
    shapes = family.layer_shapes(config)
    if mixture is None:
        return {}
    mixtures = (
        one for layer in layers for one in layer.feed_forward if shapes.layer_of(one).mixture is not None
    )
    counts = sorted({shapes.experts(one) for one in mixtures})
    if counts in ([], [getattr(config, mixture.count)]):
        return {}
    if len(counts) > 1:
        raise Inexpressible(
            f"its mixtures have from {counts[0]} to {counts[-1]} experts, and those of stock layers are alike"
        )
    routing = mixture.routing(config)
    try:
        check_groups(counts[0], routing)
    except ValueError as error:
        raise Inexpressible(str(error)) from error
    return {mixture.count: counts[0], "num_experts_per_tok": routing.count_chosen(counts[0])}


PLAIN = Plain()
