"""Which form a program's checkpoint can have, and which one a checkpoint has.

    plain    every layer of the program is one whole attention and one whole feed-forward: an ordinary checkpoint
    fused    steps pair up as [A_i A_j ...] [F_i F_j ...]: k layers are stored as one layer that is k times as wide
    program  everything else: the layers as they are, with the program's text in config.json

The first of them that is exact is the most portable one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from surgeon.checkpoint.forms.base import Form, Layout
from surgeon.checkpoint.forms.fused import FUSED
from surgeon.checkpoint.forms.plain import PLAIN
from surgeon.checkpoint.forms.planning import PlannedTensor
from surgeon.checkpoint.forms.program import PROGRAM
from surgeon.checkpoint.forms.stored_layers import Inexpressible, StoredLayer, per_layer_lists
from surgeon.checkpoint.read import Checkpoint
from surgeon.errors import did_you_mean
from surgeon.language.program import Program
from surgeon.models.families import Family

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

FORMS: dict[str, Form] = {form.name: form for form in (PLAIN, FUSED, PROGRAM)}  # the most portable one first


def form_of(checkpoint: Checkpoint) -> Form:
    """The form that a checkpoint is in, by the mark that its config.json has; without any it is a plain one."""
    return next((form for form in FORMS.values() if form.marks(checkpoint.config)), PLAIN)


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
    for one in FORMS.values() if form == "auto" else (FORMS[form],):
        try:
            layout = one.lay_out(program, family, config)
        except Inexpressible as refusal:
            refusals.setdefault(str(refusal), []).append(one.name)
        else:
            return replace(layout, reason="; ".join([layout.reason, *_explained(refusals)]))
    what = "any form" if form == "auto" else f"the {form} form; leave form out for the most portable form that is exact"
    raise ValueError(f"this program cannot be written in {what} ({'; '.join(_explained(refusals))})")


def _explained(refusals: dict[str, list[str]]) -> list[str]:
    return [f"not {' or '.join(forms)}, because {reason}" for reason, forms in refusals.items()]
