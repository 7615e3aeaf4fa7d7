"""A search's question, in a user's words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from surgeon.cost.deployment import Deployment
from surgeon.cost.hardware import Hardware
from surgeon.cost.workload import Workload
from surgeon.opened import Model
from surgeon.quality.data import DEFAULT_TOKENS
from surgeon.quality.head import GREEDY, SAMPLED
from surgeon.runtime.comm.link import parse_link
from surgeon.searches.drafting import draft_obstacle
from surgeon.searches.mixture import Mixture
from surgeon.searches.pricing import Pricing, open_pricing
from surgeon.searches.quantities import (
    ACCURACY,
    DEPTH,
    DIVERGENCE,
    DRAFT,
    DRAFT_PASS,
    HERE,
    SIZE,
    Aspect,
    Limit,
    parse_limits,
    parse_objectives,
)
from surgeon.searches.spaces import DEEPER, parse_spaces, usual_spaces

SURGEON = "surgeon"  # the sampler that goes by what edits do
_IDENTITY = ("space", "budget", "objective", "ranks", "batch", "prompt", "new", "link_delay", "sampled_acceptance")
_LITTLE = 0.01  # in parts of a cost: a space that saves less is not searched unless it is named


@dataclass(frozen=True)
class Question:
    """A user's question to a search; a study of one is not gone on with under another.

    Attributes:
        space: what may change, as `parse_spaces` takes it; None: all that lessens what is asked for (`on`).
        budget: limits, as `parse_limits` takes them; None: how deep is the model really, and how large?
        objective: as `parse_objectives` takes it; several give a front. Costs alone, without a limit of quality, are
            traded for divergence. A draft is looked for alone.
        ranks: tensor-parallel ranks, for tracks and whatever depends on them.
        batch, prompt, new: for times, texts computed together, and tokens of each prompt and added to it.
        link_delay: for times, how long a collective takes at least, such as 1ms.
        sampled_acceptance: measure that of every program, too; a draft is looked for by it.
        data, tokens, window, separator: the text, as `open_subject` takes it.
        using: folders of passes.

    Raises:
        ValueError: if budget or objectives cannot be read, or do not go together.
    """

    space: str | None = None
    budget: str | None = None
    objective: str = "divergence"
    ranks: int = 2
    batch: int = 1
    prompt: int | None = None
    new: int | None = None
    link_delay: str | None = None
    sampled_acceptance: bool = False
    data: str | None = None
    tokens: int = DEFAULT_TOKENS
    window: int | None = None
    separator: str | None = None
    using: tuple[str, ...] = ()
    memory: int | str | None = None
    output: str = ""
    trials: int = 60
    minutes: float | None = None
    sampler: str = SURGEON
    seed: int = 0
    holdout: int | None = None
    holdout_data: str | None = None
    heal: int | None = None
    heal_data: str | None = None
    heal_batch: int = 8
    storage: str | None = None
    study: str | None = None
    workers: int = 1

    def __post_init__(self) -> None:
        if self.draft is not None:
            if len(self.objectives) > 1:
                raise ValueError(f"objective {self.objective!r}: a {DRAFT} is looked for alone; leave the others out")
            if self.of_quality:
                raise ValueError(
                    f"budget {self.of_quality[0]}: drafts cost no quality, as the model verifies them; leave it out"
                )
        _ = self.limits

    @property
    def identity(self) -> dict[str, Any]:
        """Values that tell studies apart beside model, text, passes and sampler."""
        return {name: getattr(self, name) for name in _IDENTITY if getattr(self, name) is not False}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Question:
        """Invert `asdict`."""
        return cls(**{**values, "using": tuple(values["using"])})

    def on(self, model: Model) -> Question:
        """Name the spaces: of the usual ones, those with edits of this model that save something."""
        if self.space is not None:
            return self
        usual = usual_spaces({DEEPER if aspect.deep else aspect.name for aspect in self.aspects})
        pricing = None if self.is_timed_here else self.pricing(model)  # this machine has to be measured first
        able = []
        for name in usual:
            mixture = self._mixture(name, model)
            if mixture.edits if pricing is None else _saves(mixture, pricing):
                able.append(name)
        return replace(self, space=",".join(able or usual))

    @cached_property
    def limits(self) -> tuple[Limit, ...]:
        if self.budget is None:
            return ()
        return parse_limits(self.budget)

    @property
    def of_quality(self) -> tuple[Limit, ...]:
        return tuple(limit for limit in self.limits if not limit.aspect.is_priced)

    @cached_property
    def objectives(self) -> tuple[Aspect, ...]:
        found = parse_objectives(self.objective)
        # A model that is destroyed has least of every cost.
        is_of_quality = any(not aspect.is_priced for aspect in (*found, *(limit.aspect for limit in self.limits)))
        if is_of_quality:
            return found
        return (DIVERGENCE, *found)

    @cached_property
    def draft(self) -> Aspect | None:
        """The objective of drafting for the unedited model, if that is asked for."""
        return next((objective for objective in self.objectives if objective.name == DRAFT), None)

    @property
    def acceptance(self) -> str:
        if self.sampled_acceptance:
            return SAMPLED
        return GREEDY

    @property
    def recorded(self) -> tuple[Aspect, ...]:
        """A study's values of every trial: the objectives, but those measured of the best only, and `along`."""
        if self.draft is not None:
            return self.objectives
        measured = tuple(one for one in self.objectives if one.name != ACCURACY) or (DIVERGENCE,)
        return tuple(dict.fromkeys([*measured, *self.along]))

    @cached_property
    def along(self) -> tuple[Aspect, ...]:
        """The costs whose levels are searched, as far as edits lessen them.

        Of drafts the time of a pass. Else a cost that is an objective; between limits of both a cost and quality, that
        cost; where no cost is limited, depth, and without a budget size, too, for edits that keep the depth.
        """
        if self.draft is not None:
            return (Aspect(DRAFT_PASS, self.draft.on),)
        costs = [objective for objective in self.objectives if objective.is_priced]
        if costs:
            return (costs[0],)
        limited = [limit.aspect for limit in self.limits if limit.aspect.is_priced]
        if limited:
            return tuple(limited[:1]) if self.is_between_limits else ()
        spaces = () if self.space is None else parse_spaces(self.space)
        smaller = not spaces or any("size" in each.serves and "depth" not in each.serves for each in spaces)
        if smaller and not self.limits:
            return (DEPTH, SIZE)
        return (DEPTH,)

    @property
    def is_between_limits(self) -> bool:
        """Whether both a cost and quality are limited and no cost is to be small."""
        kinds = {limit.aspect.is_priced for limit in self.limits}
        return kinds == {True, False} and not any(objective.is_priced for objective in self.objectives)

    @property
    def aspects(self) -> tuple[Aspect, ...]:
        every = (*(limit.aspect for limit in self.limits), *self.objectives, *self.along)
        return tuple(dict.fromkeys(aspect for aspect in every if aspect.is_priced))

    @property
    def is_timed_here(self) -> bool:
        return any(aspect.on == HERE for aspect in self.aspects)

    def workload(self, positions: int) -> Workload:
        return Workload.within(positions, self.batch, self.prompt, self.new)

    def mixture(self, model: Model) -> Mixture:
        """Apply the spaces to a model, of which only the configuration has to be there."""
        assert self.space is not None, "`on` names the spaces"
        mixture = self._mixture(self.space, model)
        mixture.require_edits()
        return mixture

    def _mixture(self, spaces: str, model: Model) -> Mixture:
        obstacle = None if self.draft is None else draft_obstacle(model, self.ranks)
        return Mixture(parse_spaces(spaces, self.ranks), model, self.ranks, obstacle)

    def pricing(self, model: Model, here: Hardware | None = None) -> Pricing:
        deployment = Deployment(self.ranks, emulated=parse_link(self.link_delay, None))
        return open_pricing(model, self.aspects, deployment, self.workload(model.positions), here)


def _saves(mixture: Mixture, pricing: Pricing) -> bool:
    for aspect, dense in pricing.dense.items():
        best: dict[int, float] = {}
        for edit, program in zip(mixture.edits, mixture.single_edits, strict=True):
            best[edit.first] = max(best.get(edit.first, 0.0), dense - pricing.price(aspect, program))
        if sum(best.values()) > _LITTLE * abs(dense):
            return True
    return False
