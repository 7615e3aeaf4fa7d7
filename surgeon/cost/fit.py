"""From what a round has measured to a machine's figures, as the cost model counts.

Every part of a pass is held against the kernels that stand for it (`surgeon.cost.work`), so that a figure is what the
model needs to give the measured seconds back, for these shapes and numbers of rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

from surgeon.cost.dissect import ATTENDING, BEST, EMBEDDING, HEAD, NORM, READING, STARTING, SUBLAYER, WAITING, WRITING
from surgeon.cost.kernels import Kernel
from surgeon.cost.samples import PROMPT, SHORT, SIZES, WHOLE, PassSample, Round
from surgeon.cost.work import OF_EXPERTS, Forward, RankWork
from surgeon.models.shapes import ModelShapes
from surgeon.runtime.plan.placement import work_of
from surgeon.runtime.plan.specification import Plan

Figures = dict[str, float]  # by where they stand in a hardware file, below a number of ranks

LEAST = 0.02  # of a measured time that is left, at least, when launches or parts are taken off it
KINDS = "AF"
PRODUCTS = "shares.flops."  # figures by rows
CACHE = "shares.cache"


@dataclass(frozen=True)
class KernelTime:
    """A kernel, and what it took."""

    kernel: Kernel
    seconds: float


class Waits(NamedTuple):
    """What a rank waits in a pass's collectives beyond what these take when nobody computes in between.

    Attributes:
        each: seconds in every one.
        uneven: seconds for each second of computing before it.
    """

    each: float
    uneven: float


class Fit:
    """One round of one number of ranks.

    Ranks wait for the slowest of them, and where they outnumber the cores, for these. What they wait longer the more
    they compute is therefore counted as computing: every part takes `1 + uneven` times what it took.
    """

    def __init__(self, plan: Plan, shapes: ModelShapes, measured: Round, adding: bool) -> None:
        self.plan = plan
        self.shapes = shapes
        self.measured = measured
        self.adding = adding
        self.rank_work = RankWork(plan, shapes, lambda _: False, adding=False)  # norms that are timed add nothing
        self.works = work_of(plan, 0)
        self.waits = self._waits()
        self.product_launch = self._launch("product")

    def figures(self, ways: Sequence[str]) -> Figures:
        """All of them, rates in units per second."""
        found = {"host.launch": self._launch("operation"), "host.launches.product.1": self.product_launch}
        found |= {f"host.launches.{name}.1": self._launch(name) for name in ("join", "gathered")}
        found["host.graph"] = self._launch("graph" if "graph" in self.measured.launches else "operation")
        found |= self._products() | self._copies() | self._attention() | self._passes()
        if self.adding:
            found["host.launches.norm.1"] += found.pop("host.launches.add.1")
        if self.plan.ranks > 1:
            found |= self._exchanges(ways)
        return found

    def _launch(self, name: str) -> float:
        return (1 + self.waits.uneven) * self.measured.launches[name]

    def _waits(self) -> Waits:
        """By least squares over decoding passes, each counted by how long it waits."""
        passes = [one for one in self.whole if one.decode and one.counts.get(WAITING)]
        if self.plan.ranks == 1 or len(passes) < 2:
            return Waits(0.0, 0.0)
        least = min(self.measured.waiting.values())
        points = []
        for one in passes:
            computing = sum(one.parts[f"{SUBLAYER} {kind}"] * one.counts[f"{SUBLAYER} {kind}"] for kind in KINDS)
            points.append((computing / one.counts[WAITING], max(0.0, one.parts[WAITING] - least)))
        weights = [1 / max(longer, least) for _, longer in points]
        x, y = (fmean((point[axis] for point in points), weights) for axis in (0, 1))
        spread = sum(weight * (point[0] - x) ** 2 for weight, point in zip(weights, points, strict=True))
        along = sum(w * (point[0] - x) * (point[1] - y) for w, point in zip(weights, points, strict=True))
        uneven = min(max(0.0, along / spread), y / x)
        return Waits(y - uneven * x, uneven)

    def part(self, name: str, sample: PassSample) -> float:
        """Seconds of a part of a sublayer, with the waiting that belongs to it."""
        return (1 + self.waits.uneven) * sample.parts[name]

    def sample(self, texts: int, new: int, layers: str = WHOLE) -> PassSample:
        """The pass of that size."""
        alike = (one for one in self.measured.passes if (one.layers, one.texts, one.new) == (layers, texts, new))
        return next(alike)

    @property
    def whole(self) -> list[PassSample]:
        """All passes through the model's own program."""
        return [one for one in self.measured.passes if one.layers == WHOLE]

    def kernels(self, kind: str, sample: PassSample) -> dict[str, Kernel]:
        """A sublayer's, by what their time was noted under; what has no name there is "rest"."""
        forward = Forward(sample.texts, sample.new, round(sample.cached))
        parts = [(work, part) for work in self.works for part in work.parts if part.sublayer.kind == kind]
        # Of few dense layers before mixtures the mixtures count.
        work, part = max(parts, key=lambda one: self.plan.mixtures.size(one[1].sublayer) is not None)
        kernels = [one for one in self.rank_work.part(work, part, forward) if isinstance(one, Kernel)]
        products = [one for one in kernels if one.nature == "product"]
        experts = [one for one in products if one.name.endswith(OF_EXPERTS)]
        writing = products[-1]
        if experts:  # they are timed together
            flops, moved = (sum(getattr(one, what) for one in experts) for what in ("flops", "moved"))
            writing = replace(experts[-1], flops=flops, moved=moved)
        rest = [one for one in kernels if one.name in ("place", "activation")]
        return {NORM: kernels[0], READING: products[0], WRITING: writing, "rest": rest[-1]}

    def attending(self, sample: PassSample) -> Kernel:
        """An attention's, in the mean over layers, of which some may look back less far: so their time was noted."""
        forward = Forward(sample.texts, sample.new, round(sample.cached))
        items = [item for work in self.works for item in self.rank_work.items(work, forward)]
        each = [one for one in items if isinstance(one, Kernel) and one.nature == "attention"]
        flops, moved = (fmean(getattr(one, what) for one in each) for what in ("flops", "moved"))
        return replace(each[0], flops=flops, moved=moved)

    def timed(self, kind: str, name: str, sample: PassSample) -> KernelTime:
        """A kernel of a sublayer, and what was measured of it."""
        kernel = self.kernels(kind, sample)[name]
        if name != "rest":
            return KernelTime(kernel, self.part(f"{name} {kind}", sample))
        inside = [f"{each} {kind}" for each in (NORM, READING, WRITING)] + [ATTENDING] * (kind == "A")
        whole = self.part(f"{SUBLAYER} {kind}", sample)
        return KernelTime(kernel, _beyond(whole, sum(self.part(each, sample) for each in inside)))

    # Products: by rows.

    def _products(self) -> Figures:
        by_rows: dict[int, list[KernelTime]] = {}
        for sample in self.whole:
            timed = [self.timed(kind, name, sample) for kind in KINDS for name in (READING, WRITING)]
            for one in timed:
                by_rows.setdefault(round(one.kernel.rows), []).append(one)
        rates = {
            rows: _rate((one.kernel.flops, _beyond(one.seconds, self.product_launch)) for one in timed)
            for rows, timed in by_rows.items()
        }
        moving = [(one.kernel.moved, _beyond(one.seconds, self.product_launch)) for one in by_rows[1]]
        found = {f"{PRODUCTS}{rows}": rate for rows, rate in sorted(rates.items())}
        return found | {"shares.bandwidth": max(moved / seconds for moved, seconds in moving)}

    # Small operations: what one of them takes whatever it moves, and how fast many of them move much.

    def _copies(self) -> Figures:
        one = self.sample(1, 1)
        launches = {
            "norm": sum(self.timed(kind, NORM, one).seconds for kind in KINDS) / 2,
            "place": self.timed("A", "rest", one).seconds + self._fixed_attention(),
            "activation": self.timed("F", "rest", one).seconds,
        }
        found = {f"host.launches.{name}.1": seconds for name, seconds in launches.items()}
        rates: dict[int, list[tuple[float, float]]] = {}
        for sample in self.whole:
            if sample.texts * sample.new >= PROMPT:
                for kind, name in (("A", NORM), ("F", NORM), ("A", "rest"), ("F", "rest")):
                    timed = self.timed(kind, name, sample)
                    seconds = _beyond(timed.seconds, launches[timed.kernel.name])
                    size = 2 * self.rank_work.numbers.size * sample.texts * sample.new * self.plan.hidden
                    rates.setdefault(size, []).append((timed.kernel.moved, seconds))
        return found | {f"shares.copies.{size}": _rate(each) for size, each in sorted(rates.items())}

    # Attention: each text by itself, so much for each however short, and then by what it reads and computes.

    def _per_text(self) -> float:
        one, many = (self.sample(texts, 1) for texts in (1, 32))
        return max(0.0, (self.part(ATTENDING, many) - self.part(ATTENDING, one)) / (many.texts - one.texts))

    def _fixed_attention(self) -> float:
        return max(0.0, self.part(ATTENDING, self.sample(1, 1)) - self._per_text())

    def _attention(self) -> Figures:
        some = self.sample(8, PROMPT)
        near = self.sample(1, 1)
        per_chunk = max(0.0, self.part(ATTENDING, some) - self._fixed_attention()) / some.texts
        alone = [one for one in self.whole if one.texts == 1]
        long = max(alone, key=lambda one: one.new)  # the prompt
        far = max((one for one in alone if one.decode), key=lambda one: one.cached)
        read = self.attending(far).moved - self.attending(near).moved
        longer = _beyond(self.part(ATTENDING, far), self.part(ATTENDING, near))
        found = {
            "host.launches.attention.1": self._per_text(),
            f"host.launches.attention.{PROMPT}": per_chunk,
            "shares.attention": self.attending(long).flops / _beyond(self.part(ATTENDING, long), per_chunk),
        }
        if read:  # not where windows end within the shortest text: what is read then is part of the launch
            found[CACHE] = read / longer
        return found

    # What is left of passes: something for every sublayer, something for every pass.

    def _passes(self) -> Figures:
        whole = self.sample(1, 1)
        short = self.sample(1, 1, SHORT)
        more = _sublayers(whole) - _sublayers(short)
        each = max(0.0, (self._left(whole) - self._left(short)) / more)
        found = {"host.launches.add.1": each}
        for sample in (one for one in self.measured.passes if one.layers == SHORT and one.decode):
            found[f"host.forward.{sample.texts}"] = max(0.0, self._left(sample) - each * _sublayers(sample))
        # With several ranks these have collectives inside, and rank 0 waits for the others to hear of a pass.
        times = (list(each.values()) for each in (self.measured.starting, self.measured.waiting))
        sent = sum(min(each) for each in times if each)
        for name in (EMBEDDING, BEST):
            found[f"host.launches.{name}.1"] = max(0.0, whole.parts[name] - sent)
        return found

    def _left(self, sample: PassSample) -> float:
        """Seconds of a pass outside its sublayers and collectives, embedding and head."""
        noted = (f"{SUBLAYER} A", f"{SUBLAYER} F", STARTING, WAITING, EMBEDDING, NORM, HEAD, BEST)
        return sample.seconds - sum(sample.parts.get(name, 0.0) * sample.counts.get(name, 0) for name in noted)

    # Collectives.

    def _exchanges(self, ways: Sequence[str]) -> Figures:
        starting = self.measured.starting
        waiting = self.measured.waiting
        least = SIZES[0]
        most = SIZES[-1]
        ranks = self.plan.ranks
        found = {"host.collective": starting[ways[0], least]}
        for way in ways:
            times = {size: starting[way, size] + waiting[way, size] for size in SIZES}
            slope = _beyond(times[most], times[least]) / (most - least)
            often = ranks + 1 if way == "shm" else 2 * (ranks - 1) / ranks  # how often an operand's bytes are moved
            found[f"links.{way}.base"] = max(0.0, times[least] - found["host.collective"]) + self.waits.each
            found[f"links.{way}.rate"] = often / slope
        return found


def rising(figures: Figures) -> Figures:
    """The same figures, in which products of more rows reach no less: where they did, something disturbed measuring."""
    found = dict(figures)
    most = 0.0
    for rows in sorted(int(key.removeprefix(PRODUCTS)) for key in figures if key.startswith(PRODUCTS)):
        found[f"{PRODUCTS}{rows}"] = most = max(most, figures[f"{PRODUCTS}{rows}"])
    return found


def _sublayers(sample: PassSample) -> int:
    return sum(sample.counts[f"{SUBLAYER} {kind}"] for kind in KINDS)


def _rate(pairs: Iterable[tuple[float, float]]) -> float:
    """Amount per second over all amounts and seconds."""
    amounts, seconds = zip(*pairs, strict=True)
    return float(sum(amounts) / sum(seconds))


def _beyond(seconds: float, others: float) -> float:
    """What is left of a time without others that are in it; never nothing, because of what disturbs measuring."""
    return max(seconds - others, LEAST * seconds)
