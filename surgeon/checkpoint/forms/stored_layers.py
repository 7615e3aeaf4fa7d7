"""Programs as layers to be stored, or the reason why a program has no such layers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from surgeon.language.program import Fork, Node, Program, Step
from surgeon.language.sublayer import ATTENTION, FEED_FORWARD, KINDS, Sublayer
from surgeon.models.families import Family
from surgeon.models.weights import indivisible
from surgeon.models.weights.layers import narrow_units, require_parts


@dataclass(frozen=True)
class StoredLayer:
    """A layer of the written checkpoint: the sublayers side by side in it; of one kind there may be none."""

    attention: tuple[Sublayer, ...]
    feed_forward: tuple[Sublayer, ...]

    @property
    def sublayers(self) -> tuple[Sublayer, ...]:
        return self.attention + self.feed_forward

    @property
    def has_stock_width(self) -> bool:
        """True if it is as wide as the layers of the original."""
        return self.is_single and all(
            one.width is None and one.experts is None for one in self.sublayers
        )

    @property
    def is_single(self) -> bool:
        """True if it is one attention and one feed-forward, each unsliced."""
        return all(
            len(side) == 1 and side[0].piece is None for side in (self.attention, self.feed_forward)
        )

    @property
    def lacks(self) -> list[str]:
        """The kinds that it has none of, in the words of `transformers`."""
        sides = {"attention": self.attention, "mlp": self.feed_forward}
        return [name for name, side in sides.items() if not side]

    @property
    def sources(self) -> list[int]:
        """The original's layers that it is made of, the attention's first one first."""
        return list(dict.fromkeys(layer for sublayer in self.sublayers for layer in sublayer.layers))


class Inexpressible(ValueError):
    """A form cannot hold this program exactly; the message says why."""


def stored_layers(
    program: Program, steps_per_layer: int, partly: bool = False
) -> tuple[StoredLayer, ...]:
    """Divide the program into layers of an attention and a feed-forward step, or of one step with both.

    Args:
        partly: whether layers may lack one of the two.
    """
    for sublayer in program.sublayers():
        if sublayer.ranks:
            raise Inexpressible(f"{sublayer} has factors in place of matrices, which no stock layer has")
    steps = list(map(_step_of_a_layer, program.nodes))
    if steps_per_layer == 1:
        return tuple(StoredLayer(*(_of_kind(step, kind, partly) for kind in KINDS)) for step in steps)
    if partly:
        return tuple(_partly_there(steps))
    for index, step in enumerate(steps):
        kind, what = ((ATTENTION, "an attention"), (FEED_FORWARD, "a feed-forward"))[index % 2]
        if {sublayer.kind for sublayer in step.sublayers} != {kind}:
            raise Inexpressible(f"{step} stands where a layer has {what} step")
    if len(steps) % 2:
        raise Inexpressible("the last attention step has no feed-forward step after it")
    return tuple(
        StoredLayer(a.sublayers, f.sublayers) for a, f in zip(steps[::2], steps[1::2], strict=True)
    )


def per_layer_lists(family: Family, config: Any, stored: dict[str, Any]) -> dict[str, list[Any]]:
    """Return the configuration's lists with one entry per layer, by key.

    Args:
        config: as `transformers` reads it, which fills in some of them for some architectures.
        stored: config.json as it stands, with keys that `transformers` does not know too.
    """
    candidates = {key: getattr(config, key, None) for key in family.entries.lists} | stored
    return {
        key: value
        for key, value in candidates.items()
        if isinstance(value, list)
        and len(value) == config.num_hidden_layers
        and key != "architectures"
        and not key.endswith(("_token_id", "_token_ids"))
    }


def require_uniform(
    layers: tuple[StoredLayer, ...], family: Family, lists: dict[str, list[Any]]
) -> None:
    """Refuse layers stored as one whose entries in per-layer lists differ."""
    for key, values in lists.items():
        for layer in layers:
            # What says how far attention looks must be the same in the layers that an attention is made of.
            alike = layer.attention if key in family.entries.lists else layer.sublayers
            sources = [source for sublayer in alike for source in sublayer.layers]
            for other in sources[1:]:
                if values[other] != values[sources[0]]:
                    raise Inexpressible(f"layers {sources[0]} and {other} differ in the config's {key}")


def require_divisible(sublayers: Iterable[Sublayer], family: Family, config: Any) -> None:
    """Refuse slices without a whole number of heads and neurons."""
    for sublayer in sublayers:
        units = family.units(config, sublayer.layers[0])
        spec = family.spec(sublayer.kind, sublayer.layers[0])
        require_parts(sublayer, spec, family)
        own = {projection.unit: units[projection.unit] for projection in spec.projections}
        reason = indivisible(sublayer, narrow_units(sublayer, own))
        if reason is not None:
            raise ValueError(reason)


def _step_of_a_layer(node: Node) -> Step:
    if isinstance(node, Fork):
        raise Inexpressible(f"the fork {node} runs whole streams side by side")
    if node.late:
        raise Inexpressible(f"the step {node} is late")
    return node


def _partly_there(steps: list[Step]) -> Iterator[StoredLayer]:
    """Yield layers of an attention step and the feed-forward step behind it, or of one of them alone."""
    attention: tuple[Sublayer, ...] = ()
    for step in steps:
        kinds = {sublayer.kind for sublayer in step.sublayers}
        if len(kinds) > 1:
            raise Inexpressible(f"{step} has attention and feed-forward in one step")
        if kinds == {FEED_FORWARD}:
            yield StoredLayer(attention, step.sublayers)
            attention = ()
            continue
        if attention:
            yield StoredLayer(attention, ())
        attention = step.sublayers
    if attention:
        yield StoredLayer(attention, ())


def _of_kind(step: Step, kind: str, partly: bool) -> tuple[Sublayer, ...]:
    found = tuple(sublayer for sublayer in step.sublayers if sublayer.kind == kind)
    if not found and not partly:
        raise Inexpressible(
            f"{step} has no {'attention' if kind == ATTENTION else 'feed-forward'} beside the rest"
        )
    return found
