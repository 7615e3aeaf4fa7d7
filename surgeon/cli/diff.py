"""`surgeon diff`: in what two checkpoints or recipes differ."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surgeon.cli.show import LABEL, what_it_is
from surgeon.words import WIDTH, first_few

if TYPE_CHECKING:
    from surgeon.checkpoint.compare import Comparison, Difference, Key, TensorComparison
    from surgeon.checkpoint.sizes import Layer

DIFFERENT = 1  # the exit code
_LONGEST_VALUE = 40  # characters of a value of config.json
_NO_BREAK = "\N{NO-BREAK SPACE}"
_NAMED = 12  # tensors that a line names

_WHAT = "A checkpoint folder, a hub name, demo, or a recipe (YAML)."


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help=_WHAT)],
    b: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Say in what two checkpoints or recipes differ: "A | B", line by line.

    Programs are over the layers of the unedited model, and what differs in their ranks stands beside them. Tensors are
    told apart by the layer that they come from. Checkpoints are compared in config.json, tokenizer, chat templates,
    processors, generation settings, licence and code, too, and tensors bit for bit; where values differ, it says by how
    much at most, also as a share of the largest value in A.
    A recipe is compared by its program alone.

    The exit code is 0 if nothing differs, 1 if something does, and 2 if there is trouble.
    """
    from surgeon.checkpoint.compare import compare
    from surgeon.checkpoint.describe import describe
    from surgeon.progress import progress

    ours, theirs = describe(a), describe(b)
    if ours.recipe is not None or theirs.recipe is not None:
        found = compare(ours, theirs)
    else:
        with progress("comparing", ours.stored.size, "bytes") as advance:
            found = compare(ours, theirs, advance)
    if as_json:
        print(json.dumps(as_record(found), indent=2, ensure_ascii=False))
    else:
        filler = textwrap.TextWrapper(WIDTH, subsequent_indent=" " * LABEL, break_on_hyphens=False)
        for label, text in lines(found):
            filler.initial_indent = f"{label:<{LABEL}}"
            # Steps of a program are not broken up.
            whole = re.sub(r"\[[AF]\d[^]]*\]", lambda step: step[0].replace(" ", _NO_BREAK), text)
            print(filler.fill(whole).replace(_NO_BREAK, " "))
    if not found.equal:
        raise typer.Exit(DIFFERENT)


def lines(found: Comparison) -> Iterator[tuple[str, str]]:
    """What there is to say, each with its label, which is empty where it is that of the line before."""
    for label, texts in _labelled(found):
        for at, text in enumerate(texts):
            yield label if at == 0 else "", text


def _labelled(found: Comparison) -> Iterator[tuple[str, Iterable[str]]]:
    yield "A", [f"{found.a.name}, {what_it_is(found.a)}"]
    yield "B", [f"{found.b.name}, {what_it_is(found.b)}"]
    for name, (a, b) in found.facts.items():
        yield name, [f"{_fact(a)} | {_fact(b)}"]
    hunks = []
    for hunk in found.hunks:
        where = f"layer {hunk.first}" if hunk.first == hunk.last else f"layers {hunk.first} to {hunk.last}"
        hunks.append(f"{where}: {hunk.a} | {hunk.b}")
    yield "program", hunks or ["the same"]
    yield "sizes", [f"{one.where}: {one.a} | {one.b}" for one in found.sizes]
    if found.tensors is not None:
        yield "config", list(_config(found.config)) or ["the same"]
        yield "files", [f"{name}: {what}" for name, what in found.files.items()] or ["the same"]
        yield "tensors", [f"{found.tensors.equal} equal, bit for bit"]
        yield "only in A", _groups(found.tensors.only_a, found.tensors.counts)
        yield "only in B", _groups(found.tensors.only_b, found.tensors.counts)
        yield from _differences(found.tensors)


def _config(config: Mapping[str, tuple[Any, Any]]) -> Iterator[str]:
    """Keys that both have with their values, then the names of those that only one has."""
    for key, (a, b) in config.items():
        if a is not None and b is not None:
            yield f"{key}: {_value(a)} | {_value(b)}"
    for what, here in (("only in A", 0), ("only in B", 1)):
        names = [key for key, pair in config.items() if pair[1 - here] is None]
        if names:
            yield f"{what}: {', '.join(names)}"


def _differences(found: TensorComparison) -> Iterator[tuple[str, list[str]]]:
    """Tensors of other shapes, other dtypes, and other values; those with the same thing to say are named together."""
    kinds: dict[str, dict[str, list[Difference]]] = {"shape": {}, "dtype": {}, "values": {}}
    for one in found.different:
        if one.shape is not None:
            kinds["shape"].setdefault(f"{one.shape[0]} | {one.shape[1]}", []).append(one)
        elif one.dtype is not None:
            kinds["dtype"].setdefault(f"{one.dtype[0]} | {one.dtype[1]}", []).append(one)
        else:
            kinds["values"].setdefault("", []).append(one)
    for label, by_text in kinds.items():
        texts = []
        for text, group in by_text.items():
            parts = [text, _by_how_much(group)] if label != "shape" else [text]
            named = "; ".join(_groups([one.key for one in group], found.counts))
            texts.append(f"{named}: {'; '.join(filter(None, parts))}")
        yield label, texts


def _by_how_much(group: list[Difference]) -> str:
    """Of several tensors: how many elements differ, and the largest difference, with the tensor that has it."""
    count, total = sum(one.count or 0 for one in group), sum(one.total for one in group)
    if not count:
        return "no value changed"
    text = f"{count:,} of {total:,} elements differ"
    if any(one.largest is None for one in group):
        return f"{text}, some from or to nan or infinity"
    most = max(group, key=lambda one: one.largest or 0.0)
    share = "" if most.relative is None else f", {most.relative:.2g} of the largest value"
    where = f" ({most.key})" if len(group) > 1 else ""
    return f"{text}, by {most.largest:.3g} at most{share}{where}"


def _groups(keys: Iterable[Key], counts: Mapping[Layer, int]) -> list[str]:
    """Tensors by layers: layers with the same ones together, those that follow one another as a range."""
    from surgeon.checkpoint.sizes import layers_text

    names: dict[Layer, list[str]] = {}
    for key in keys:
        names.setdefault(key.layer, []).append(key.name)
    by_names: dict[tuple[str, ...], list[Layer]] = {}
    for layer, inside in names.items():
        by_names.setdefault(tuple(inside), []).append(layer)
    texts = []
    for together, layers in by_names.items():
        inside = list(together)
        of_no_layer = layers == [((), 0)]
        shown = first_few(inside, _NAMED)
        if len(inside) > 1 and not of_no_layer and all(counts[layer] == len(inside) for layer in layers):
            shown = f"all {len(inside)}" + (" of each" if len(layers) > 1 else "")
        texts.append(shown if of_no_layer else f"{layers_text(layers)}: {shown}")
    return texts


def _fact(value: Any) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _value(value: Any) -> str:
    """A value of config.json, without its end if it is long."""
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 3] + "..."


def as_record(found: Comparison) -> dict[str, Any]:
    """Everything that differs, as JSON values; nan and infinity are null."""
    record: dict[str, Any] = {
        "equal": found.equal,
        "a": found.a.name,
        "b": found.b.name,
        "facts": found.facts,
        "program": [asdict(hunk) for hunk in found.hunks],
        "sizes": [asdict(one) for one in found.sizes],
    }
    if found.tensors is not None:
        different = [asdict(one) for one in found.tensors.different]
        tensors = {
            "equal": found.tensors.equal,
            "only_in_a": [asdict(key) for key in found.tensors.only_a],
            "only_in_b": [asdict(key) for key in found.tensors.only_b],
            "different": [one.pop("key") | one for one in different],
        }
        record |= {"config": found.config, "files": found.files, "tensors": tensors}
    return record
