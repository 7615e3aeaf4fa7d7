"""The ranks of a program in words: of which layers' matrices are two factors, and where two programs differ in that."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from surgeon.language.program import ROLES, Program

Layer = tuple[tuple[int, ...], int]  # the layers of the unedited model that one comes from, and which copy it is
WHOLE, ABSENT = "whole", "not there"
_IN_ORDER = [role for roles in ROLES.values() for role in roles]


@dataclass(frozen=True)
class RankDifference:
    """Layers whose ranks differ between two programs in the same way.

    Attributes:
        layers: of the sublayers; several in one where their weights are averaged.
        a, b: the ranks, in words.
    """

    layers: tuple[tuple[int, ...], ...]
    a: str
    b: str

    @property
    def where(self) -> str:
        """The layers in words."""
        return layers_text([(layer, 0) for layer in self.layers])


def rank_lines(program: Program) -> list[str]:
    """A line for every group of layers with the same ranks, "layers 2 to 5: q, o 38; up 55"; whole ones have none."""
    groups: dict[str, list[Layer]] = {}
    for layers, text in sorted(_by_layers(program).items()):
        if text != WHOLE:
            groups.setdefault(text, []).append((layers, 0))
    return [f"{layers_text(layers)}: {text}" for text, layers in groups.items()]


def rank_differences(a: Program, b: Program) -> list[RankDifference]:
    """Where the ranks of two programs differ; layers that only one of them has are told if they have ranks there."""
    first, second = _by_layers(a), _by_layers(b)
    groups: dict[tuple[str, str], list[tuple[int, ...]]] = {}
    for layers in sorted(first.keys() | second.keys()):
        pair = first.get(layers, ABSENT), second.get(layers, ABSENT)
        if len({*pair, WHOLE, ABSENT}) > 2 and pair[0] != pair[1]:
            groups.setdefault(pair, []).append(layers)
    return [RankDifference(tuple(layers), *pair) for pair, layers in groups.items()]


def ranks_text(ranks: Mapping[str, str | int]) -> str:
    """Ranks by role, in words, equal ones together: "q, o 38; k, v 25"."""
    groups: dict[str, list[str]] = {}
    for role in sorted(ranks, key=_IN_ORDER.index):
        groups.setdefault(str(ranks[role]), []).append(role)
    return "; ".join(f"{', '.join(roles)} {rank}" for rank, roles in groups.items())


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
    """The ranks in words, by the layers of the sublayers; of a matrix that occurs with several ranks, all of them."""
    found: dict[tuple[int, ...], dict[str, dict[str, None]]] = {}
    for sublayer in program.sublayers():
        by_role = found.setdefault(sublayer.layers, {})
        for role in ROLES[sublayer.kind]:
            by_role.setdefault(role, {})[str(sublayer.rank(role) or WHOLE)] = None
    texts = {}
    for layers, by_role in found.items():
        factored = {role: " or ".join(ranks) for role, ranks in by_role.items() if [*ranks] != [WHOLE]}
        texts[layers] = ranks_text(factored) or WHOLE
    return texts
