"""What scripts/gpu/check's processes are told, what a check is, and whether what GPUs computed is what a CPU did."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from ctypes import CDLL, byref, c_int
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch

from surgeon.runtime.plan.specification import Decoding

TIE = 1e-4  # between the best two logits, next to the best: rounding may decide there
FLOAT32_PRODUCTS = 1e-5  # beside float64; TF32 has an error of 1e-3


Side = Literal["expected", "found", "speed"]


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
    differing = []
    for text, pair in enumerate(zip(tokens, own, strict=True)):
        others = (place for place, (one, other) in enumerate(zip(*pair, strict=True)) if one != other)
        differing += [(text, place) for place in islice(others, 1)]
    if not differing:
        return Judgement(f"{count} tokens", f"the same{speed}", True)
    text, place = min(differing, key=lambda one: -gaps[one[0]][one[1]])
    ties = all(gaps[text][place] <= TIE for text, place in differing)
    words = "the same but for ties" if ties else f"others from token {place} of text {text} on"
    return Judgement(f"{count} tokens", words + speed, ties)


def judge_bench(expected: Any, found: Any) -> Judgement:
    """What is sent is the same; a rate is some number."""
    sent = {name: value for name, value in expected.items() if name != "rate"}
    right = all(found[name] == value for name, value in sent.items()) and 0 < found["rate"] < math.inf
    words = "{all_reduces}+{all_gathers}, {bytes} bytes"  # sums and gathers of a pass
    same = "the same" if right else words.format(**found)
    return Judgement(words.format(**sent), f"{same}, {found['rate']:.0f} tokens/s", right)


def judge_overlap(_: Any, found: Any) -> Judgement:
    return Judgement("above 0 ms hidden", f"{found:.3g} ms", found > 0)


def judge_product(_: Any, found: Any) -> Judgement:
    error = found["error"]
    return Judgement(f"below {FLOAT32_PRODUCTS:g} off", f"{error:.1e} off", error < FLOAT32_PRODUCTS)


def judge_switch(_: Any, found: Any) -> Judgement:
    return Judgement("off", "on" if found else "off", not found)


SHARING_NCCL = 23000  # 2.30, from which on ranks may share a GPU


@dataclass(frozen=True)
class Setup:
    """What the processes of a run are told.

    Attributes:
        device: what is found is found on: "cuda" or, to try the script, "cpu".
        gpus: how many there are.
        folder: for models and results.
    """

    device: str
    gpus: int
    folder: str

    @property
    def demo(self) -> Path:
        """The demo model in float32, which GPUs compute in then, too."""
        return Path(self.folder) / "demo"

    @property
    def wide(self) -> Path:
        """A random one in bfloat16, with heads of 128 and fewer than 8 KV heads."""
        return Path(self.folder) / "wide"

    def on(self, side: Side) -> str:
        """Where one side computes."""
        if side == "expected":
            return "cpu"
        return self.device

    @property
    def ways(self) -> tuple[Decoding, ...]:
        """How passes that add a token are computed."""
        if self.device == "cuda":
            return ("dynamic", "static", "auto")
        return ("dynamic", "static")

    @property
    def collectives(self) -> tuple[str, ...]:
        """How two ranks talk: over NCCL where each has a GPU of its own or may share one, and over gloo on one.

        On one GPU also through its "memory", beside gloo: what is recorded goes by PyTorch's symmetric memory alone.
        """
        if self.gpus != 1:
            return ("nccl", "gloo")[not self.gpus :]
        version = c_int()  # of the library that is there; PyTorch tells which one it was built with
        with suppress(OSError):
            CDLL("libnccl.so.2").ncclGetVersion(byref(version))
        return ("nccl", "memory", "gloo")[version.value < SHARING_NCCL :]


@dataclass(frozen=True)
class Check:
    """Something that is computed on both sides.

    Attributes:
        compute: yields the names of rows of the table with values as JSON has them.
        rows: how each is judged.
        against: what is expected of a row, where that is another row of another check.
    """

    compute: Callable[[Setup, Side], Iterator[tuple[str, Any]]]
    rows: Mapping[str, Judge]
    against: Mapping[str, str] = field(default_factory=dict)

    def key(self, row: str) -> str:
        """The row that has what is expected of a row."""
        return self.against.get(row, row)
