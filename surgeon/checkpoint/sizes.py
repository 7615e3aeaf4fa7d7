"""The sizes of a program's sublayers in words: which are narrow or of low rank."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from surgeon.language.program import Program
from surgeon.language.sublayer import EXPERTS, FEED_FORWARD, ROLES, UNITS

Layer = tuple[tuple[int, ...], int]  # the layers of the unedited model that one comes from, and which copy it is
WHOLE = "whole"
_COUNTED = (EXPERTS, *UNITS.values())
_OF_KIND = {kind: (*_COUNTED[: kind == FEED_FORWARD], UNITS[kind], *ROLES[kind]) for kind in ROLES}
_IN_ORDER = [name for names in _OF_KIND.values() for name in names]


def size_lines(program: Program) -> list[str]:
    """A line for every group of layers of the same sizes, "layers 2 to 5: KV groups 3; up 55"; whole ones have none."""
    groups: dict[str, list[Layer]] = {}
    for layers, text in sorted(_by_layers(program).items()):
        if text != WHOLE:
            groups.setdefault(text, []).append((layers, 0))
    return [f"{layers_text(layers)}: {text}" for text, layers in groups.items()]


def sizes_text(sizes: Mapping[str, str | int]) -> str:
    """Widths and ranks by name, in words, equal ranks together: "KV groups 3; q, o 38; k, v 25"."""
    groups: dict[tuple[str, str | bool], list[str]] = {}
    for name in sorted(sizes, key=_IN_ORDER.index):
        groups.setdefault((str(sizes[name]), name in _COUNTED and name), []).append(name)
    return "; ".join(f"{', '.join(names)} {size}" for (size, _), names in groups.items())


def layers_text(layers: Iterable[Layer]) -> str:
    """Layers by their numbers: "layers 2, 4 to 7", and "layers 2+3 to 8+9" where several are stored as one."""
    given = list(layers)
    runs: list[list[Layer]] = []
    for layer in given:
        last = runs[-1][-1] if runs else None
        if last and layer[1] == last[1] == 0 and len(layer[0]) == len(last[0]) and layer[0][0] == last[0][-1] + 1:
            runs[-1].append(layer)
        else:
            runs.append([layer])
    texts = [_one(run[0]) if len(run) == 1 else f"{_one(run[0])} to {_one(run[-1])}" for run in runs]
    return ("layer " if len(given) == 1 else "layers ") + ", ".join(texts)


def _one(layer: Layer) -> str:
    return "+".join(map(str, layer[0])) + " again" * layer[1]


def _by_layers(program: Program) -> dict[tuple[int, ...], str]:
    """The sizes in words, by the layers of the sublayers; of what occurs in several sizes, all of them."""
    found: dict[tuple[int, ...], dict[str, dict[str, None]]] = {}
    for sublayer in program.sublayers():
        by_name = found.setdefault(sublayer.layers, {})
        sizes = dict(sublayer.sizes)
        for name in _OF_KIND[sublayer.kind]:
            by_name.setdefault(name, {})[str(sizes.get(name) or WHOLE)] = None
    texts = {}
    for layers, by_name in found.items():
        less = {name: " or ".join(sizes) for name, sizes in by_name.items() if [*sizes] != [WHOLE]}
        texts[layers] = sizes_text(less) or WHOLE
    return texts
