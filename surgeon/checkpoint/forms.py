"""Which form a program's checkpoint can have, and which stored layers it then consists of.

    plain    every layer of the program is one whole attention and one whole feed-forward: an ordinary checkpoint
    fused    steps pair up as [A_i A_j ...] [F_i F_j ...]: k layers are stored as one layer that is k times as wide
    program  everything else: the layers as they are, with the program's text in config.json

The first of them that is exact is the most portable one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from surgeon.checkpoint.fused_config import attention_types, obstacle
from surgeon.checkpoint.remote_code import PROGRAM
from surgeon.errors import did_you_mean
from surgeon.families import Family
from surgeon.families.base import PER_LAYER_LISTS
from surgeon.program import ATTENTION, FEED_FORWARD, Fork, Node, Program, Step, Sublayer
from surgeon.weights import slice_bounds

Form = Literal["plain", "fused", "program"]
FORMS: tuple[Form, ...] = get_args(Form)


@dataclass(frozen=True)
class StoredLayer:
    """One layer of the written checkpoint: the sublayers that lie side by side in it."""

    attention: tuple[Sublayer, ...]
    feed_forward: tuple[Sublayer, ...]

    @property
    def sublayers(self) -> tuple[Sublayer, ...]:
        return self.attention + self.feed_forward

    @property
    def has_stock_width(self) -> bool:
        """Whether it is as wide as the layers of the original."""
        return all(len(side) == 1 and side[0].piece is None for side in (self.attention, self.feed_forward))

    @property
    def sources(self) -> list[int]:
        """The original's layers that it is made of, the attention's first one first."""
        return list(dict.fromkeys(layer for sublayer in self.sublayers for layer in sublayer.layers))

    @property
    def attention_sources(self) -> list[int]:
        """The original's layers that its attention is made of: what says how far it looks must be the same in them."""
        return list(dict.fromkeys(layer for sublayer in self.attention for layer in sublayer.layers))


@dataclass(frozen=True)
class Layout:
    """What is to be written.

    Attributes:
        reason: why this form, in a sentence for the user.
        layers: the layers of the checkpoint, in order.
        program: the program over those layers, for the program form only.
    """

    form: Form
    reason: str
    layers: tuple[StoredLayer, ...]
    program: Program | None = None


class Inexpressible(ValueError):
    """A form cannot hold this program exactly; the message says why."""


def lay_out(program: Program, family: Family, config: Any, form: str = "auto") -> Layout:
    """The most portable form that holds the program exactly, or the form asked for.

    Args:
        config: the original's `transformers` configuration, for its widths and per-layer lists.
        form: "auto", or one of FORMS.

    Raises:
        ValueError: if there is no such form, or the program does not fit it, with the reason.
    """
    if form not in ("auto", *FORMS):
        raise ValueError(f"unknown form {form!r}; {did_you_mean(form, ('auto', *FORMS))}")
    refusals: dict[str, list[str]] = {}  # the forms that cannot hold it, by the reason
    for name in FORMS if form == "auto" else (form,):
        try:
            layout = _LAYOUTS[name](program, family, config)
        except Inexpressible as refusal:
            refusals.setdefault(str(refusal), []).append(name)
        else:
            return replace(layout, reason="; ".join([layout.reason, *_explained(refusals)]))
    what = (
        "any form" if form == "auto" else f"the {form} form; leave out --form for the most portable form that is exact"
    )
    raise ValueError(f"this program cannot be written in {what} ({'; '.join(_explained(refusals))})")


def per_layer_lists(config: Any, stored: dict[str, Any]) -> dict[str, list[Any]]:
    """The configuration's lists with one entry per layer, by key.

    Args:
        config: as `transformers` reads it, which fills in some of them for some architectures.
        stored: config.json as it stands, with keys that `transformers` does not know too.
    """
    candidates = {key: getattr(config, key, None) for key in PER_LAYER_LISTS} | stored
    return {
        key: value
        for key, value in candidates.items()
        if isinstance(value, list)
        and len(value) == config.num_hidden_layers
        and key != "architectures"
        and not key.endswith(("_token_id", "_token_ids"))
    }


def stored_sources(program: Program, form: str, steps_per_layer: int) -> list[tuple[int, ...]]:
    """For each layer of a checkpoint in this form, the original's layers that it is made of.

    Raises:
        ValueError: if the form cannot hold the program.
    """
    if form == "program":
        return sorted({sublayer.layers for sublayer in program.sublayers()})
    return [tuple(layer.sources) for layer in _stored_layers(program, steps_per_layer)]


def _explained(refusals: dict[str, list[str]]) -> list[str]:
    return [f"not {' or '.join(forms)}, because {reason}" for reason, forms in refusals.items()]


def _plain(program: Program, family: Family, config: Any) -> Layout:
    layers = _stored_layers(program, family.steps_per_layer)
    for layer in layers:
        if not layer.has_stock_width:
            wide = " ".join(map(str, layer.sublayers))
            raise Inexpressible(f"{wide} would be a layer of another width than the others")
    _require_uniform(layers, per_layer_lists(config, config.to_dict()))
    return Layout("plain", f"the program is a sequence of {len(layers)} whole layers, which any software loads", layers)


def _fused(program: Program, family: Family, config: Any) -> Layout:
    layers = _stored_layers(program, family.steps_per_layer)
    why_not = obstacle(family, config)
    if why_not is not None:
        raise Inexpressible(why_not)
    if family.window_layers is not None:  # the only list that the modeling file goes by
        _require_uniform(layers, {family.window_layers: attention_types(family, config)})
    _require_divisible(program.sublayers(), family, config)
    wide = sum(not layer.has_stock_width for layer in layers)
    reason = (
        f"{wide} of {len(layers)} layers hold several layers side by side; transformers and vLLM load it with the "
        "modeling file inside (trust_remote_code=True)"
    )
    return Layout("fused", reason, layers)


def _program(program: Program, family: Family, config: Any) -> Layout:
    if family.model_type not in PROGRAM.names:
        raise Inexpressible(
            f"the modeling file that travels inside has no classes for {family.name} "
            '(CONTRIBUTING.md, "Adding a family", says how it gets them)'
        )
    keys = sorted({sublayer.layers for sublayer in program.sublayers()})
    layers = tuple(StoredLayer((Sublayer(ATTENTION, key),), (Sublayer(FEED_FORWARD, key),)) for key in keys)
    _require_divisible(program.sublayers(), family, config)
    place = {key: index for index, key in enumerate(keys)}
    renumbered = _renumber(program.nodes, lambda s: replace(s, layers=(place[s.layers],)))
    reason = "transformers loads it with the modeling file inside (trust_remote_code=True), which runs the program"
    return Layout("program", reason, layers, Program(renumbered))


_LAYOUTS: dict[str, Callable[[Program, Family, Any], Layout]] = {"plain": _plain, "fused": _fused, "program": _program}


def _stored_layers(program: Program, steps_per_layer: int) -> tuple[StoredLayer, ...]:
    """The program as layers of one attention step and one feed-forward step each, or of one step that holds both."""
    steps = list(map(_plain_step, program.nodes))
    if steps_per_layer == 1:
        return tuple(StoredLayer(_of_kind(step, ATTENTION), _of_kind(step, FEED_FORWARD)) for step in steps)
    for index, step in enumerate(steps):
        kind, what = ((ATTENTION, "an attention"), (FEED_FORWARD, "a feed-forward"))[index % 2]
        if {sublayer.kind for sublayer in step.sublayers} != {kind}:
            raise Inexpressible(f"{step} stands where a layer has {what} step")
    if len(steps) % 2:
        raise Inexpressible("the last attention step has no feed-forward step after it")
    return tuple(StoredLayer(a.sublayers, f.sublayers) for a, f in zip(steps[::2], steps[1::2], strict=True))


def _plain_step(node: Node) -> Step:
    if isinstance(node, Fork):
        raise Inexpressible(f"the fork {node} runs whole streams side by side")
    if node.late:
        raise Inexpressible(f"the step {node} is late")
    return node


def _of_kind(step: Step, kind: str) -> tuple[Sublayer, ...]:
    found = tuple(sublayer for sublayer in step.sublayers if sublayer.kind == kind)
    if not found:
        raise Inexpressible(f"{step} has no {'attention' if kind == ATTENTION else 'feed-forward'} beside the rest")
    return found


def _require_uniform(layers: tuple[StoredLayer, ...], lists: dict[str, list[Any]]) -> None:
    """What is stored as one layer must come from layers whose entries in per-layer lists agree."""
    for key, values in lists.items():
        for layer in layers:
            first, *others = layer.attention_sources if key in PER_LAYER_LISTS else layer.sources
            for other in others:
                if values[other] != values[first]:
                    raise Inexpressible(f"layers {first} and {other} differ in the config's {key}")


def _require_divisible(sublayers: Iterable[Sublayer], family: Family, config: Any) -> None:
    """Every slice must get a whole number of heads and neurons."""
    units = family.units(config)
    for sublayer in sublayers:
        if sublayer.piece is not None:
            for unit in dict.fromkeys(projection.unit for projection in family.spec(sublayer.kind).projections):
                slice_bounds(units[unit], sublayer.piece, f"{unit} of {sublayer}")


def _renumber(nodes: tuple[Node, ...], rename: Callable[[Sublayer], Sublayer]) -> tuple[Node, ...]:
    renamed: list[Node] = []
    for node in nodes:
        if isinstance(node, Step):
            renamed.append(replace(node, sublayers=tuple(map(rename, node.sublayers))))
        else:
            renamed.append(Fork(tuple(_renumber(branch, rename) for branch in node.branches)))
    return tuple(renamed)
