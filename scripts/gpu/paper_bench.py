"""Measures specs on ranks: programs of one model beside each other, with one copy of the weights that they share."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from scripts.commands import changed_environment
from scripts.gpu.paper_specs import Measured, Place, Spec, record_of
from surgeon.benchmarks.measure import Needs, RankBench, summarise
from surgeon.benchmarks.timing import load_timed
from surgeon.checkpoint.random_weights import RandomCheckpoint
from surgeon.checkpoint.stored import StoredModel
from surgeon.cost.deployment import USABLE, activation_bytes
from surgeon.language.program import Program
from surgeon.machine import free_bytes, show_size
from surgeon.models.shapes import ModelShapes
from surgeon.opened import open_model
from surgeon.runtime.plan.memory import footprint
from surgeon.runtime.plan.specification import Plan, Ways
from surgeon.runtime.worker.rank import RankOptions
from surgeon.runtime.worker.ranks import RankFailed, Ranks
from surgeon.runtime.worker.worker import forget_cache, unload
from surgeon.words import first_line

UPPER = "upper"  # the system whose ranks do not wait for each other
NO_P2P = "NCCL_P2P_DISABLE"


@dataclass(frozen=True)
class Settings:
    """How everything is measured.

    Attributes:
        folder: for configurations.
        pass_tokens: of prompts, in one pass.
        decoding: as `Plan.decoding`.
        started: how many ranks torchrun has started, on one machine or several; None where they are started here.
    """

    place: Place
    folder: Path
    device: str
    rounds: int = 3
    pass_tokens: int = 8192
    decoding: str = "auto"
    started: int | None = None

    @cached_property
    def free(self) -> int:
        """Bytes that a rank may take: of a GPU's, most, and none is opened here to see who else uses it."""
        if self.device == "cpu":
            return free_bytes() // 2
        gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        return int(USABLE * min(gpu.total_memory for gpu in gpus))


@dataclass
class Shared:
    """A model, and those of its specs that run on the same ranks."""

    settings: Settings
    specs: Sequence[Spec]
    stored: StoredModel = field(init=False)
    shapes: ModelShapes = field(init=False)

    def __post_init__(self) -> None:
        model = self.specs[0].model
        config = self.settings.place.write_config(self.settings.folder, model)
        self.stored = replace(open_model(config, weights=False), files=RandomCheckpoint(config))
        self.shapes = ModelShapes.of(model, self.stored.config)

    def plan(self, spec: Spec) -> Plan:
        """What ranks load for a spec, for the longest texts of all.

        Raises:
            ValueError: if so many ranks cannot run it.
        """
        tokens = max(one.load.length for one in self.specs)
        settings = self.settings
        ways: Ways = {"decoding": settings.decoding, "low_rank": spec.low_rank}
        needs = Needs(spec.ranks, tokens, settings.device, ways)
        return needs.plan(self.stored, spec.program(self.shapes))  # type: ignore[arg-type]

    def why_not(self, spec: Spec) -> str | None:
        """Why a spec cannot be measured, if that is known beforehand."""
        gpus = self.settings.place.gpus
        started = self.settings.started
        if started is not None and spec.ranks != started:
            return f"is for {spec.ranks} ranks, torchrun has started {started}"
        if started is not None and spec.p2p == (os.environ.get(NO_P2P) == "1"):
            return f"wants {NO_P2P}={0 if spec.p2p else 1} where torchrun starts"
        if gpus is not None and spec.ranks > gpus:
            return f"needs {spec.ranks} GPUs, {gpus} here"
        try:
            plan = self.plan(spec)
        except ValueError as error:
            return f"cannot run on {spec.ranks} ranks: {first_line(error)}"
        sizes = footprint(plan, self.shapes)
        chunk = min(spec.batch * spec.prompt, self.settings.pass_tokens)
        blocks = sizes.blocks(spec.batch, spec.load.length, chunk)
        needed = max(
            weights + blocks * block for weights, block in zip(sizes.weights, sizes.block, strict=True)
        )
        needed += activation_bytes(self.shapes, plan, spec.batch, chunk)
        if needed <= self.settings.free:
            return None
        where = "for each rank" if self.settings.device == "cpu" else f"on each of {spec.ranks} GPUs"
        return f"needs {show_size(needed)} {where}, {show_size(self.settings.free)} can be used"

    @cached_property
    def bytes_together(self) -> int:
        """What all programs take on a rank, loaded at once, beside the largest cache."""
        plans = {spec.name: self.plan(spec) for spec in self.specs}
        nodes = [node for plan in plans.values() for node in Program.parse(plan.program).nodes]
        every = Program(tuple(dict.fromkeys(nodes)))  # slices that several have count once
        first = next(iter(plans.values()))
        weights = max(footprint(replace(first, program=str(every)), self.shapes).weights)
        sizes = {name: footprint(plan, self.shapes) for name, plan in plans.items()}
        chunk = self.settings.pass_tokens
        loads = ((sizes[one.name], one.batch, one.load.length) for one in self.specs)
        return weights + max(max(size.block) * size.blocks(*load, chunk) for size, *load in loads)


@dataclass
class Running:
    """Ranks, and the programs of one model that they hold."""

    ranks: Ranks
    settings: Settings
    model: str = ""
    plans: dict[str, Plan] = field(default_factory=dict)

    def measure(self, shared: Shared, spec: Spec) -> dict[str, Any]:
        """Load what a spec runs if it is not there, and run it."""
        fits = spec.name in self.plans or shared.bytes_together <= self.settings.free
        if self.model != spec.model or not fits:
            for name in self.plans:
                self.ranks.call(unload, name)
            self.model = spec.model
            self.plans = {}
        if spec.name not in self.plans:
            plan = shared.plan(spec)
            self.ranks.call(load_timed, plan, spec.name, spec.system != UPPER)
            self.plans[spec.name] = plan
        free = {spec.name} if spec.system == UPPER else ()
        bench = RankBench(self.ranks, self.plans, free, self.settings.pass_tokens)
        bench.run(spec.name, spec.load)  # passes of all sizes are recorded
        runs = [bench.run(spec.name, spec.load) for _ in range(self.settings.rounds)]
        rounds = [summarise(one, spec.load, spec.system != UPPER) for one in runs]
        rounds = bench.split(spec.name, spec.load, rounds)
        self.ranks.call(forget_cache, spec.name)
        return record_of(spec, Program.parse(self.plans[spec.name].program), rounds)


def measure(settings: Settings, specs: Sequence[Spec]) -> Iterator[tuple[Spec, Measured | str]]:
    """What each spec came to, or why there is nothing; those of one model on the same ranks one after the other."""
    for (ranks, p2p), some in _grouped(specs, lambda one: (one.ranks, one.p2p)):
        models = {
            model: Shared(settings, own) for (model,), own in _grouped(some, lambda one: (one.model,))
        }
        possible: deque[Spec] = deque()
        for model, shared in models.items():
            reasons = {spec: shared.why_not(spec) for spec in shared.specs}
            yield from ((spec, why) for spec, why in reasons.items() if why is not None)
            models[model].specs = [spec for spec, why in reasons.items() if why is None]
            possible += shared.specs
        while possible:
            try:
                with _started(settings.device, ranks, p2p) as started:
                    running = Running(started, settings)
                    while possible:
                        yield possible[0], running.measure(models[possible[0].model], possible[0])
                        possible.popleft()
            except (
                RankFailed,
                ValueError,
            ) as error:  # the ranks are gone; others go on, unless torchrun's were they
                yield possible.popleft(), f"failed: {first_line(error)}"
                if settings.started is not None:
                    yield from (
                        (spec, f"not run: {spec.ranks} ranks of torchrun's have ended")
                        for spec in possible
                    )
                    return


@contextmanager
def _started(device: str, ranks: int, p2p: bool) -> Iterator[Ranks]:
    """Ranks, which read each other's memory or do not."""
    variables = {} if p2p else {NO_P2P: "1"}
    with changed_environment(**variables), Ranks(RankOptions(ranks, device)) as started:
        yield started


def _grouped(specs: Iterable[Spec], key: Any) -> list[tuple[tuple[Any, ...], list[Spec]]]:
    """Specs by something that they have in common, in their order."""
    found: dict[tuple[Any, ...], list[Spec]] = {}
    for spec in specs:
        found.setdefault(key(spec), []).append(spec)
    return list(found.items())
