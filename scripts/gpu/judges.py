"""Whether what GPUs computed is what a CPU computed, and how messages put it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

TIE = 1e-4  # between the best two logits, next to the best: rounding may decide there
FLOAT32_PRODUCTS = 1e-5  # beside float64; TF32 has an error of 1e-3


@dataclass(frozen=True)
class Judgement:
    """What was expected and found, in words, and whether that is right."""

    expected: str
    found: str
    right: bool


Judge = Callable[[Any, Any], Judgement]
Numbers = dict[str, float]


def judge_error(most: float) -> Callable[[Any, Any], Judgement]:
    """Of tensors: how far they may be apart, next to the size of what is expected."""

    def judge(expected: Any, found: Any) -> Judgement:
        wanted = torch.tensor(expected).double()
        own = torch.tensor(found).double()
        error = float((own - wanted).norm() / wanted.norm()) if own.shape == wanted.shape else math.inf
        return Judgement(f"the CPU's, to {most:g}", f"{error:.1e} off", error <= most)

    return judge


def judge_numbers(most: float) -> Callable[[Numbers, Numbers], Judgement]:
    """Of numbers by their names: the same names, and how far each may be from what is expected, next to that."""

    def judge(expected: Numbers, found: Numbers) -> Judgement:
        errors = [abs(found[name] / expected[name] - 1) for name in expected if name in found]
        far = math.nan if any(map(math.isnan, errors)) else max(errors, default=math.inf)
        shown = (
            f"{len(expected)} numbers" if len(expected) > 1 else f"{next(iter(expected.values())):.5g}"
        )
        right = found.keys() == expected.keys() and far <= most
        return Judgement(f"{shown}, to {most:g}", f"{far:.1e} off", right)

    return judge


def judge_tokens(expected: Any, found: Any) -> Judgement:
    """Of greedy tokens: the same, but for those behind a place where rounding may choose."""
    tokens, own = expected["tokens"], found["tokens"]
    gaps = expected.get("gaps") or [[math.inf] * len(text) for text in tokens]
    count = sum(map(len, tokens))
    speed = f", {found['ms']:.3g} ms each" if "ms" in found else ""
    if [len(text) for text in own] != [len(text) for text in tokens]:
        return Judgement(f"{count} tokens", f"{sum(map(len, own))} tokens", False)
    places = [_first_difference(*pair) for pair in zip(tokens, own, strict=True)]
    differing = [(text, place) for text, place in enumerate(places) if place is not None]
    if not differing:
        return Judgement(f"{count} tokens", f"the same{speed}", True)
    text, place = min(differing, key=lambda one: -gaps[one[0]][one[1]])
    ties = all(gaps[text][place] <= TIE for text, place in differing)
    words = "the same but for ties" if ties else f"others from token {place} of text {text} on"
    return Judgement(f"{count} tokens", words + speed, ties)


def _first_difference(left: Sequence[int], right: Sequence[int]) -> int | None:
    return next(
        (place for place, pair in enumerate(zip(left, right, strict=True)) if pair[0] != pair[1]), None
    )


def judge_bench(expected: Any, found: Any) -> Judgement:
    """What is sent is the same; a rate is some number."""
    sent = {name: value for name, value in expected.items() if name != "rate"}
    right = all(found[name] == value for name, value in sent.items()) and 0 < found["rate"] < math.inf
    words = "{all_reduces}+{all_gathers}, {bytes} bytes"  # sums and gathers of a pass
    same = "the same" if right else words.format(**found)
    return Judgement(words.format(**sent), f"{same}, {found['rate']:.0f} tokens/s", right)


def judge_product(_: Any, found: Any) -> Judgement:
    error = found["error"]
    return Judgement(f"below {FLOAT32_PRODUCTS:g} off", f"{error:.1e} off", error < FLOAT32_PRODUCTS)


def judge_switch(_: Any, found: Any) -> Judgement:
    return Judgement("off", "on" if found else "off", not found)
