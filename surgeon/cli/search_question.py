"""The options of `surgeon search` that say what is asked: of which spaces, within which budget, to make what small."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surgeon.cli.opening import warn

if TYPE_CHECKING:
    from surgeon.analysis.subject import Subject
    from surgeon.cost.hardware import Hardware
    from surgeon.cost.predict import Deployment
    from surgeon.cost.workload import Workload
    from surgeon.language.program import Program
    from surgeon.quality.data import Windows
    from surgeon.searches.limits import Limit, SearchBudget
    from surgeon.searches.mixture import Mixture
    from surgeon.searches.objectives import Objective
    from surgeon.searches.quantities import Aspect


@dataclass(frozen=True)
class PredictedUse:
    """What ranks and times are predicted for, in the user's words; a group of options (see grouped.py)."""

    ranks: Annotated[
        int, typer.Option(min=1, help="Tensor-parallel ranks, for tracks and whatever depends on them.")
    ] = 2
    batch: Annotated[int, typer.Option(min=1, help="For a latency or speedup: texts computed together.")] = 1
    prompt: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="For a latency or speedup: tokens of each prompt. Default: 1024, or half of the model's positions.",
            show_default=False,
        ),
    ] = None
    new: Annotated[
        int | None,
        typer.Option(
            min=2,
            help="For a latency or speedup: tokens added to each. Default: 512, or a quarter of the model's positions.",
            show_default=False,
        ),
    ] = None
    link_delay: Annotated[
        str | None,
        typer.Option(
            help="For a latency or speedup: a link on top, how long a collective takes at least, e.g. 1ms.",
            show_default=False,
        ),
    ] = None

    def deployment(self) -> Deployment:
        """The ranks and their link; ValueError if the delay is no time."""
        from surgeon.cost.predict import Deployment
        from surgeon.runtime.comm.link import parse_link

        return Deployment(self.ranks, emulated=parse_link(self.link_delay, None))

    def workload(self, positions: int) -> Workload:
        """What is asked of a model of so many positions."""
        from surgeon.cost.workload import Workload

        prompt, new = self.prompt or min(1024, positions // 2), self.new or max(2, min(512, positions // 4))
        return Workload(self.batch, prompt, new)


@dataclass(frozen=True)
class SearchQuestion:
    """What is searched for, in the user's words; a group of options (see grouped.py)."""

    space: Annotated[
        str,
        typer.Option(
            "--space",
            metavar="NAME[:N],...",
            help="What may change, one or several at once: pair (LP; pair:4 groups of 2 to 4), par, ladder, drop, "
            "order, tracks, desync, fuse, rank. docs/searching.md describes them.",
        ),
    ] = "pair"
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            help="What to come down to, several by commas: depth=12, syncs, params=0.8x, weight_bytes=20MB, kv_bytes, "
            "wire_bytes, latency=12ms@h100-sxm, speedup>=1.3@h100-sxm; and the quality to keep: divergence<=0.02, "
            "perplexity<=1.05x. Without one: how deep is this model really?",
            show_default=False,
        ),
    ] = None
    objective: Annotated[
        str,
        typer.Option(
            "--objective",
            help="What to make small: divergence, perplexity, accuracy:TASK, or a cost such as depth. Several by "
            "commas give a Pareto front.",
        ),
    ] = "divergence"

    def limits(self) -> tuple[Limit, ...]:
        """Of --budget; ValueError as `parse_limits`."""
        from surgeon.searches.limits import parse_limits

        return () if self.budget is None else parse_limits(self.budget)

    def objectives(self) -> tuple[Objective, ...]:
        """Of --objective; ValueError as `parse_objectives`."""
        from surgeon.searches.objectives import parse_objectives

        return parse_objectives(self.objective)

    def mixture(self, name: str, config: Any, use: PredictedUse, own: Program | None = None) -> Mixture:
        """The spaces on a model, of which only the configuration has been read.

        Args:
            own: its program, where that is not its layers one after the other.

        Raises:
            ValueError: if there is no such space, the model can have none of its edits, or it is an edited one.
        """
        from surgeon.language.operations.within import require_whole_layers
        from surgeon.models.shapes import ModelShapes
        from surgeon.searches.mixture import Mixture
        from surgeon.searches.spaces import Searched, parse_spaces

        if own is not None:
            try:
                require_whole_layers(own, int(config.num_hidden_layers))
            except ValueError as error:
                raise ValueError(f"{name} is an edited model; search the one that it was made of ({error})") from error
        mixture = Mixture(parse_spaces(self.space), Searched(ModelShapes.of(name, config), use.ranks, own))
        mixture.require_edits()
        return mixture

    def aspects(self) -> tuple[Aspect, ...]:
        """The costs that have to be known; ValueError as `limits`, `objectives` and `require_quality`."""
        from surgeon.searches.limits import aspects_of
        from surgeon.searches.objectives import aspects_to_price
        from surgeon.searches.question import looked_along, require_quality

        limits, objectives = self.limits(), self.objectives()
        require_quality(limits, objectives)
        along = looked_along(limits, objectives)
        return (*aspects_of(limits), *aspects_to_price(objectives), *([along] if along else []))

    @property
    def is_timed_here(self) -> bool:
        """Whether a cost is a time on this machine; ValueError as `aspects`."""
        from surgeon.searches.quantities import HERE

        return any(aspect.on == HERE for aspect in self.aspects())

    def within(self, mixture: Mixture, use: PredictedUse, here: Hardware | None = None) -> SearchBudget:
        """The budget for a model.

        Args:
            here: this machine, if a cost is a time on it.

        Raises:
            FileNotFoundError, ValueError: if there is no such quantity or hardware, or the spaces do not bring the
                model to the budget.
        """
        from surgeon.searches.limits import SearchBudget
        from surgeon.searches.pricing import open_pricing
        from surgeon.searches.question import levels_of, looked_along
        from surgeon.searches.reach import require_reachable

        shapes = mixture.model.shapes
        workload = use.workload(shapes.positions)
        pricing = open_pricing(shapes, self.aspects(), use.deployment(), workload, here, mixture.model.own)
        warn(pricing.notes)
        budget = SearchBudget(self.limits(), pricing)
        if budget.of_programs:
            warn(budget.require_work())
            require_reachable(budget, mixture)
        along = looked_along(budget.limits, self.objectives())
        if along is not None and not levels_of(along, budget, mixture):
            raise ValueError(
                f"--space {self.space}: nothing of it lessens {along}, along which this search would look; add a space "
                "that does, or give a --budget"
            )
        return budget


@dataclass(frozen=True)
class HeldOutText:
    """The text that winners are measured on again, in the user's words; a group of options (see grouped.py)."""

    holdout: Annotated[
        int | None,
        typer.Option(
            "--holdout",
            min=0,
            help="Tokens held out from the search, to measure the winner and the runners-up on again: those that "
            "follow in the data. 0: none. Default: as many as are searched on.",
            show_default=False,
        ),
    ] = None
    holdout_data: Annotated[
        str | None,
        typer.Option("--holdout-data", help="Hold out this text instead, as --data takes it.", show_default=False),
    ] = None

    def windows(self, subject: Subject) -> Windows | None:
        """The held-out text; None if none is wanted.

        Raises:
            FileNotFoundError, ValueError: as `held_out`.
        """
        from surgeon.quality.held_out import held_out

        if self.holdout == 0:
            return None
        return held_out(subject.tokenizer, subject.windows, self.holdout, self.holdout_data)
