"""What the commands that train have in common: they say how what they wrote was proven."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from surgeon.exports.prove import Proof


def proof_line(proof: Proof, whose: str) -> str:
    """What was proven, in a sentence; `whose` the program is."""
    exact = f"{proof.exact:.1g} of their scale in float32"
    rounded = "" if proof.dtype == "float32" else f", and by {proof.written:.1g} once rounded to {proof.dtype}"
    return (
        f"proof: the program is {whose}; on {proof.tokens} random tokens the logits differ from the trained "
        f"model's by {exact}{rounded}."
    )
