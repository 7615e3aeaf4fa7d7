"""The edits that a search combines; they lie on the floor of results, where tables of trials are read, too."""

from surgeon.results.edit import (
    ADDITIVE,
    NEIGHBOUR,
    REGRESSION,
    SECOND_ORDER,
    SOURCES,
    WINDOW,
    Choice,
    Edit,
    as_choice,
)

__all__ = [
    "ADDITIVE",
    "NEIGHBOUR",
    "REGRESSION",
    "SECOND_ORDER",
    "SOURCES",
    "WINDOW",
    "Choice",
    "Edit",
    "as_choice",
]
