"""The form that a program's checkpoint can have, and the one that a checkpoint has.

    plain    every layer of the program is one whole attention and one whole feed-forward: an ordinary checkpoint
    fused    steps pair up as [A_i A_j ...] [F_i F_j ...]: k layers are stored as one layer that is k times as wide
    program  everything else: the layers as they are, with the program's text in config.json

The first of them that is exact is the most portable one. But layers that run several times have one set of weights,
which only the program form stores once, so that training goes on with shared weights. The others store them as often as
they run, if that is asked for: for software that knows no programs.
"""

from __future__ import annotations

from surgeon.checkpoint.forms.base import (
    FORMS,
    Form,
    Inexpressible,
    Layout,
    StoredLayer,
    form_of,
    lay_out,
    per_layer_lists,
)
from surgeon.checkpoint.forms.fused import FUSED
from surgeon.checkpoint.forms.plain import PLAIN
from surgeon.checkpoint.forms.program import PROGRAM

__all__ = [
    "FORMS",
    "PROGRAM",
    "Form",
    "Inexpressible",
    "Layout",
    "StoredLayer",
    "form_of",
    "lay_out",
    "per_layer_lists",
]

FORMS |= {form.name: form for form in (PLAIN, FUSED, PROGRAM)}
