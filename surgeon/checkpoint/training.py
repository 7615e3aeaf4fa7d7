"""The record of a checkpoint's training, after surgery or from scratch, and the proof that its program was trained.

Training changes every weight, so that measurements of the original no longer hold; a model from scratch never had one.
The program can still be proven: the stored one is the recipe's, or the configuration's of a model from scratch, with
the layers under other numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from surgeon.errors import NotProven, show_value
from surgeon.language.program import Fork, Node, Program
from surgeon.language.sublayer import Sublayer
from surgeon.named import public
from surgeon.processes.files import finite
from surgeon.words import MOST_LAYERS

_ENTRIES: dict[str, type] = {"method": str, "data": str, "data_hash": str, "steps": int, "tokens": int}
_SOURCE: dict[str, type] = {"model": str, "num_layers": int, "parameters": int, "model_hash": str}
_NO_SOURCE: dict[str, type] = {"num_layers": int}
# Of which `training` may have the quality on held-out text; of a model from scratch the last two.
STAGES = ("original", "edited", "healed", "untrained", "trained")


@dataclass(frozen=True)
class Training:
    """A model's training after its edit or from scratch, for `surgeon.export`.

    Attributes:
        recipe: the recipe's text, to be kept; None where there was none.
        recipe_program: the program over the layers of the original; of a model from scratch, over those that it was
            begun with.
        source: of the original, as surgeon.json has it (`source_record` of surgeon.exports.export): its model,
            num_layers, parameters, model_hash and card. Where there was no original, `no_source`.
        training: JSON values. `method`, `data` and `data_hash` are texts, `steps` and `tokens` numbers; the STAGES
            that are there are qualities (`Quality.to_json`) on the text `held_out` (with `held_out_hash`);
            `earlier` is such a record of the training before this one. Anything else (settings, versions) is kept. Of
            files on this machine only the names are.

    Raises:
        ValueError: if an entry that cards show is missing, or is something else.
    """

    recipe: str | None
    recipe_program: Program
    source: dict[str, Any]
    training: dict[str, Any]

    def __post_init__(self) -> None:
        of_source = missing_entries(self.source, _NO_SOURCE if is_no_source(self.source) else _SOURCE)
        for what, reason in (("training", missing_entries(self.training)), ("source", of_source)):
            if reason is not None:
                raise ValueError(f"the record of the {what} needs {reason}")
        # Nothing that is published says where a file lay on this machine.
        texts = {
            name: public(self.training[name]) for name in ("data", "held_out") if name in self.training
        }
        object.__setattr__(self, "training", finite(self.training | texts))


def no_source(num_layers: int) -> dict[str, Any]:
    """Return surgeon.json's entry in place of the original of a model from scratch."""
    return {"model": None, "num_layers": num_layers}


def is_no_source(source: dict[str, Any]) -> bool:
    """Tell whether it says that the model was trained from scratch."""
    return source.get("model", "") is None


def missing_entries(entries: dict[str, Any], known: dict[str, type] = _ENTRIES) -> str | None:
    """Say what a record lacks that cards show, by default of a training; None if it is whole."""
    for name, kind in known.items():
        if type(entries.get(name)) is not kind:
            return f"{name}, {'a text' if kind is str else 'a whole number'}, and has {show_value(entries.get(name))}"
    if "earlier" in entries and (
        not isinstance(entries["earlier"], dict) or missing_entries(entries["earlier"]) is not None
    ):
        return "earlier to be the record of another training"
    stages = (name for name in STAGES if entries.get(name) is not None)
    return next(
        (f"{name} with its perplexity" for name in stages if not _is_quality(entries[name])), None
    )


def _is_quality(value: Any) -> bool:
    """Tell whether it is a result of `Quality.to_json`."""
    if not isinstance(value, dict) or type(value.get("tokens")) is not int:
        return False
    numbers = [value.get("perplexity"), value.get("divergence")]
    for name in ("perplexity_interval", "divergence_interval"):
        ends = value.get(name)
        numbers += ends if isinstance(ends, list | tuple) and len(ends) == 2 else [ends]
    return all(number is None or type(number) in (int, float) for number in numbers)


def fault_of_report(report: dict[str, Any]) -> str | None:
    """Say what is wrong with a surgeon.json, as far as it is used; None if nothing is."""
    source, proof, trained, stored = (
        report.get(name) for name in ("source", "proof", "trained", "stored_layers")
    )
    layers = source.get("num_layers") if isinstance(source, dict) else None
    if not (
        isinstance(report.get("program"), str)
        and isinstance(source, dict)
        and (isinstance(source.get("model"), str) or (is_no_source(source) and "trained" in report))
        and type(layers) is int
        and 1 <= layers <= MOST_LAYERS
        and isinstance(source.get("program"), str | None)
    ):
        return "it lacks the program or its source"
    if isinstance(proof, dict) and not (
        all(isinstance(proof.get(name), int | float) for name in ("exact", "written"))
        and type(proof.get("tokens")) is int
        and isinstance(proof.get("dtype"), str)
    ):
        return f"its proof is {show_value(proof, 200)}; export again"
    if trained is not None and (not isinstance(trained, dict) or missing_entries(trained) is not None):
        return f"it has trained: {show_value(trained, 200)}"
    if stored is not None and not (
        isinstance(stored, list)
        and all(isinstance(one, list) for one in stored)
        and all(type(layer) is int and 0 <= layer < layers for one in stored for layer in one)
    ):
        return f"it has stored_layers: {show_value(stored, 200)}"
    return None


# The original's layers, by kind and number of a stored layer.
Whose = dict[tuple[str, int], tuple[int, ...]]


def layers_by_recipe(recipe: Program, stored: Program) -> Whose:
    """Map each stored sublayer to the original's layers, if a stored program is the recipe's.

    One has to be the other with its layers under other numbers: the same steps and forks, of the same widths, slices
    and ranks, and no stored sublayer for two of the recipe's. A sublayer that the recipe has twice may be stored twice,
    as forms of whole layers do, and the order within a step does not count.

    Args:
        recipe: over the original's layers.
        stored: over the layers that are stored, one for each sublayer.

    Raises:
        NotProven: naming the first step that differs.
    """
    whose: Whose = {}
    places: dict[tuple[Any, ...], int] = {}
    for asked, found in _side_by_side(recipe.nodes, stored.nodes):
        (place,), pieces = found.layers, found.piece and found.piece[1]
        if pieces is None:
            known = place
        else:
            known = places.setdefault((replace(asked, piece=None), pieces), place)
        if known != place or whose.setdefault((found.kind, place), asked.layers) != asked.layers:
            raise NotProven(
                f"the model does not run the recipe's program: where that has {asked}, it has {found}, which stands "
                "for another sublayer elsewhere"
            )
    return whose


def _side_by_side(recipe: Sequence[Node], stored: Sequence[Node]) -> Iterator[tuple[Sublayer, Sublayer]]:
    """Yield the sublayers of two programs that stand in the same place."""
    if len(recipe) != len(stored):
        raise NotProven(
            f"the model does not run the recipe's program: it has {len(stored)} steps or forks where that has "
            f"{len(recipe)}"
        )
    for asked, found in zip(recipe, stored, strict=True):
        if isinstance(asked, Fork) or isinstance(found, Fork):
            if (
                not isinstance(asked, Fork)
                or not isinstance(found, Fork)
                or len(asked.branches) != len(found.branches)
            ):
                raise _differ(asked, found)
            for branches in zip(asked.branches, found.branches, strict=True):
                yield from _side_by_side(*branches)
            continue
        first, second = (sorted(step.sublayers, key=_shape) for step in (asked, found))
        if asked.late != found.late or list(map(_shape, first)) != list(map(_shape, second)):
            raise _differ(asked, found)
        yield from zip(first, second, strict=True)


def _shape(sublayer: Sublayer) -> tuple[Any, ...]:
    """Return a sublayer's kind and sizes, whatever its layer."""
    return sublayer.kind, sublayer.width or 0, sublayer.piece or (0, 1), sublayer.ranks


def _differ(asked: Node, found: Node) -> NotProven:
    return NotProven(
        f"the model does not run the recipe's program: where that has {asked}, it has {found}"
    )
