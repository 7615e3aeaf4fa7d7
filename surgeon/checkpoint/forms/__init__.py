"""The form that a program's checkpoint can have, and the one that a checkpoint has.

    plain    every layer of the program is one whole attention and one whole feed-forward: an ordinary checkpoint
    fused    steps pair up as [A_i A_j ...] [F_i F_j ...]: k layers are stored as one layer that is k times as wide
    program  everything else: the layers as they are, with the program's text in config.json

The first of them that is exact is the most portable one. But layers that run several times have one set of weights,
which only the program form stores once, so that training goes on with shared weights. The others store them as often as
they run, if that is asked for: for software that knows no programs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from typing import Any

from surgeon.checkpoint.forms.base import Form, Layout
from surgeon.checkpoint.forms.fused import FUSED
from surgeon.checkpoint.forms.plain import PLAIN
from surgeon.checkpoint.forms.planning import PlannedTensor
from surgeon.checkpoint.forms.program import PROGRAM
from surgeon.checkpoint.forms.stored_layers import Inexpressible, StoredLayer, per_layer_lists
from surgeon.checkpoint.stored import Checkpoint, Wrapped
from surgeon.errors import did_you_mean
from surgeon.language.program import Program
from surgeon.models.families import Family
from surgeon.words import layer_list

__all__ = [
    "FORMS",
    "PROGRAM",
    "Form",
    "Inexpressible",
    "Layout",
    "PlannedTensor",
    "StoredLayer",
    "form_of",
    "lay_out",
    "per_layer_lists",
]

# The most portable one first.
FORMS: dict[str, Form] = {form.name: form for form in (PLAIN, FUSED, PROGRAM)}


def form_of(checkpoint: Checkpoint) -> Form:
    """Return the form that a checkpoint is in, by the mark in its config.json; without one it is plain."""
    return next((form for form in FORMS.values() if form.is_marked(checkpoint.config)), PLAIN)


def lay_out(
    program: Program,
    family: Family,
    config: Any,
    form: str = "auto",
    among: Collection[str] = (),
    wrapped: Wrapped | None = None,
) -> Layout:
    """Choose the most portable form that holds the program exactly, or the form asked for.

    Args:
        config: the original's `transformers` configuration, for its widths and per-layer lists.
        form: "auto", or one of FORMS.
        among: the forms that "auto" looks at, all by default.
        wrapped: the wrapper that the layers are to stand in, if they are a text decoder's.
    """
    if form not in ("auto", *FORMS):
        raise ValueError(f"unknown form {form!r}; {did_you_mean(form, ('auto', *FORMS))}")
    refusals: dict[str, list[str]] = {}  # the forms that cannot hold it, by the reason
    copying: Layout | None = None
    for one in map(FORMS.__getitem__, among or FORMS if form == "auto" else (form,)):
        try:
            layout = one.lay_out(program, family, config)
            if wrapped is not None:
                layout = one.inside(wrapped, layout, family)
        except Inexpressible as refusal:
            refusals.setdefault(str(refusal), []).append(one.name)
            continue
        copies = "" if one.stored_once else _copies(layout)
        if copies and form == "auto":
            copying = copying or replace(layout, reason=f"{layout.reason}; {copies}")
            refusals.setdefault(
                f"{copies} there; ask for it if other software is to load it", []
            ).append(one.name)
        else:
            return replace(
                layout, reason="; ".join(filter(None, [layout.reason, copies, *_explain(refusals)]))
            )
    if copying is not None:
        return copying
    if form == "auto":
        what = "any form"
    else:
        what = f"the {form} form; leave form out for the most portable form that is exact"
    raise ValueError(f"this program cannot be written in {what} ({'; '.join(_explain(refusals))})")


def _copies(layout: Layout) -> str:
    """Say which sublayers a layout has several times; empty if none."""
    stored = Counter(sublayer for layer in layout.layers for sublayer in layer.sublayers)
    layers = [layer for sublayer, times in stored.items() if times > 1 for layer in sublayer.layers]
    which = f"layer{'s' * (len(set(layers)) > 1)} {layer_list(layers)}"
    if layers:
        return f"what runs several times, of {which}, is stored as often as it runs"
    return ""


def _explain(refusals: dict[str, list[str]]) -> list[str]:
    return [f"not {' or '.join(forms)}, because {reason}" for reason, forms in refusals.items()]
