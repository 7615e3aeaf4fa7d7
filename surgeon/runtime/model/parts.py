"""The parts of a program that one rank has: their weights, what computes them, and whom they exchange with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from surgeon.language.program import Program, Step
from surgeon.language.sublayer import ATTENTION, WRITING, Sublayer
from surgeon.models.families import Projection
from surgeon.models.weights import ModelWeights, Tensors
from surgeon.runtime.comm.collectives import Collectives, Counts
from surgeon.runtime.kernels.functions import kernels_for
from surgeon.runtime.kernels.recording import Arena, Recording, Replay
from surgeon.runtime.model.cuda_graphs import CudaRecorder, GraphRecorder
from surgeon.runtime.model.latent import LatentMaps
from surgeon.runtime.model.layers import Attention, FeedForward, Norm, torch_dtype
from surgeon.runtime.model.linear import Linear, LinearMap, count_outputs, is_factored
from surgeon.runtime.model.low_rank import Maps, Sharing, gathering_is_faster, time_of
from surgeon.runtime.model.mixture import MixtureOfExperts
from surgeon.runtime.model.outputs import StepOutputs, summed_in_rank_space
from surgeon.runtime.model.phase import Phase
from surgeon.runtime.model.rotary import centred, in_halves
from surgeon.runtime.plan.mixtures import ExpertTimes, WholeExperts
from surgeon.runtime.plan.placement import (
    Group,
    Part,
    Work,
    computed_of,
    groups_within,
    open_mixture,
    whole_experts,
    work_of,
)
from surgeon.runtime.plan.specification import Plan

Made = Attention | FeedForward | MixtureOfExperts  # computes a part
MEASURED_TOKENS = 8  # to find out how experts are better shared
PartKey = tuple[Sublayer, Group, range | None]


class RankParts:
    """What one rank has of the plan's program, and the groups of ranks that it exchanges with.

    Attributes:
        counts: where collectives are counted now; may be replaced.
        graphs: records passes that are captured; None where they are not.
        expert_times: by which it was settled how ranks share experts, where that was open.
    """

    def __init__(self, plan: Plan, collectives: Collectives, device: torch.device) -> None:
        self.plan = plan
        self.collectives = collectives
        self.device = device
        self.counts = Phase()
        captured = device.type == "cuda" and plan.is_static("cuda") and plan.decoding != "static"
        self.graphs: GraphRecorder | None = CudaRecorder(device) if captured and collectives.capturable else None
        self.program = Program.parse(plan.program)
        self.rank = collectives.rank
        self.groups: dict[Group, Collectives] = {collectives.group: collectives}
        for group in groups_within(self.program, plan.ranks, plan.exchanges, plan.sliced):
            self.groups[group] = collectives.subgroup(group)
        self.work = work_of(plan, self.rank)
        self.sublayers: dict[PartKey, Made] = {}
        self.norms: dict[Sublayer, Norm] = {}
        self.outputs: dict[Step, StepOutputs] = {}  # of steps that this rank has slices of
        self.expert_times: ExpertTimes | None = None
        self._ways: dict[tuple[object, ...], bool] = {}  # whether first factors of one shape are shared out

    def load(self, source: ModelWeights, beside: Iterable[RankParts] = ()) -> None:
        """The slices of this rank's work, and what stands behind the sums of every step it has a share in.

        Args:
            beside: what this rank has loaded already; a slice of the same weights is taken from there.
        """
        beside = [other for other in beside if self.has_weights_of(other)]
        self._settle_experts(source, beside)
        alike = (other.sublayers.items() for other in beside)
        there = {key: made for sublayers in alike for key, made in sublayers if not self.plan.exchanges(key[0])}
        for work in self.work:
            for sublayer in dict.fromkeys(work.step.sublayers):
                if (
                    self.plan.family.spec(sublayer.kind, sublayer.layers[0]).post_norm is not None
                    and sublayer not in self.norms
                ):
                    tensors = self._here(source.norms(sublayer, torch_dtype(self.plan)))
                    self.norms[sublayer] = Norm(tensors, "post_norm", self.plan)
            if not work.whole and work.step not in self.outputs:
                self.outputs[work.step] = self._step_outputs(work.step, source)
            for part in work.parts:
                key = self.key(part)
                if key not in self.sublayers:
                    self.sublayers[key] = there.get(key) or self._part(work, part, source)

    def _settle_experts(self, source: ModelWeights, beside: list[RankParts]) -> None:
        """Measure how experts are better shared, where that is open: by a rank's first such mixture, on all ranks.

        What is settled holds for the whole program, and for others over the same weights.
        """
        parts = [open_mixture(self.plan, rank) for rank in range(self.plan.ranks)]
        if not any(parts):
            return
        known = (other.expert_times for other in beside if other.expert_times is not None)
        self.expert_times = next(known, None) or self._measured_experts(parts[self.rank], source)
        self.plan = replace(self.plan, mixtures=replace(self.plan.mixtures, dividing=self.expert_times.dividing))

    def _measured_experts(self, part: Part | None, source: ModelWeights) -> ExpertTimes:
        """Both ways of sharing a mixture's experts, of some tokens one by one; a rank without any waits for nobody."""
        times = torch.zeros(2, MEASURED_TOKENS, dtype=torch.float64, device=self.device)
        if part is not None:
            for own, way in zip(times, (False, True), strict=True):
                mixtures = replace(self.plan.mixtures, dividing=way)
                whole = mixtures.whole_experts(part.sublayer, len(part.sharers))
                own.copy_(self._times_of(self._mixture(part, source, whole)))
        return ExpertTimes(*self.collectives.exact.all_gather(times, Counts()).amax(0).mean(1).tolist())

    @torch.inference_mode()
    def _times_of(self, made: MixtureOfExperts) -> Tensor:
        """Seconds that each of some tokens takes, which are the same on every rank."""
        tokens = torch.randn(MEASURED_TOKENS, 1, self.plan.hidden, generator=torch.Generator().manual_seed(0))
        x = tokens[0].to(self.device, torch_dtype(self.plan))
        times = list[float]()
        again = self._repeatable(partial(made, waits=self.device.type == "cpu"), x, made.by_kernels)
        for token in tokens:
            x.copy_(token)
            times.append(time_of(again, self.device))
        return torch.tensor(times, dtype=torch.float64)

    def has_weights_of(self, other: RankParts) -> bool:
        """Whether another one on this rank reads the same tensors, in the same dtype."""
        own = self.plan
        others = other.plan
        return (own.folder, own.dtype, self.device) == (others.folder, others.dtype, other.device)

    def _here(self, tensors: Tensors) -> Tensors:
        return {name: tensor.to(self.device) for name, tensor in tensors.items()}

    def _step_outputs(self, step: Step, source: ModelWeights) -> StepOutputs:
        """What stands behind the sums of a step, with the second factors that sums in rank space go through."""
        norms = {index: self.norms[one] for index, one in enumerate(step.sublayers) if one in self.norms}
        seconds: dict[int, LinearMap] = {}
        for index in self._in_rank_space(step):
            sublayer = step.sublayers[index]
            (role,) = (projection.role for projection in self._projections(sublayer) if projection.role in WRITING)
            tensors = self._here(source.written(sublayer, torch_dtype(self.plan)))
            weight = tensors[f"{role}.second.weight"]
            bias = tensors.get(f"{role}.bias")
            seconds[index] = Linear([weight], [bias], self.plan.output_scale)
        return StepOutputs(step, self.plan.hidden, seconds, norms)

    def _in_rank_space(self, step: Step) -> frozenset[int]:
        if self.plan.low_rank == "base":
            return frozenset()
        normed = all(one in self.norms for one in step.sublayers)
        return summed_in_rank_space(step, self.plan.hidden, normed, self.plan.mixtures)

    def _projections(self, sublayer: Sublayer) -> tuple[Projection, ...]:
        return self.plan.family.spec(sublayer.kind, sublayer.layers[0]).projections

    def key(self, part: Part) -> PartKey:
        """The same for parts that have the same weights and exchange the same, which depends on who shares them."""
        whole = whole_experts(self.plan, part)
        exchanges = self.plan.exchanges(part.sublayer)
        return part.sublayer, part.sharers if exchanges else (), None if whole is None else whole.own

    def _part(self, work: Work, part: Part, source: ModelWeights) -> Made:
        """What computes a part, with its weights."""
        plan = self.plan
        sublayer = computed_of(self.plan, work, part)
        if plan.mixtures.size(sublayer) is not None:
            return self._mixture(part, source, whole_experts(plan, part))
        spec = plan.family.spec(sublayer.kind, sublayer.layers[0])
        tensors = self._turning(sublayer, self._here(source.sublayer(sublayer, torch_dtype(plan))))
        if sublayer.kind == ATTENTION and plan.latent is not None:
            inside = {path.removeprefix(f"{spec.modules[0]}."): tensor for path, tensor in tensors.items()}
            latent = LatentMaps(inside, plan.latent, plan, sublayer.piece)
            return Attention(latent.tensors, latent, spec, plan, plan.window(sublayer), plan.rotary_of(sublayer))
        later: frozenset[str] = frozenset()  # roles whose second factors are no business of this part
        if sublayer.kind == ATTENTION:
            kv_heads = count_outputs(tensors, "k") // plan.head_dim
            if plan.kept_factors(sublayer, kv_heads) is not None:
                later = frozenset("kv")  # the cache keeps what the first ones give
        based = sublayer != part.sublayer
        maps = self._maps(work, part, tensors, later, based)
        if sublayer.kind == ATTENTION:
            sharing = None if len(part.sharers) == 1 or based else self._sharing(part)
            return Attention(tensors, maps, spec, plan, plan.window(sublayer), plan.rotary_of(sublayer), sharing)
        return FeedForward(tensors, maps, plan)

    def _turning(self, sublayer: Sublayer, tensors: Tensors) -> Tensors:
        """A sublayer's tensors as ranks compute with them: features of heads in the order in which they turn.

        Heads that go through layer norms are centred by their matrices.
        """
        family = self.plan.family
        if sublayer.kind == ATTENTION and family.attention.gains_each_head and family.norm_kind != "rms":
            tensors = centred(tensors, self.plan.head_dim)
        if sublayer.kind == ATTENTION and family.rotary_neighbours and self.plan.rotaries:
            return in_halves(tensors, self.plan.rotaries[0].width, self.plan.head_dim)
        return tensors

    def _mixture(self, part: Part, source: ModelWeights, whole: WholeExperts | None) -> MixtureOfExperts:
        dtype = torch_dtype(self.plan)
        if whole is None:
            return MixtureOfExperts(self._here(source.by_role(part.sublayer, dtype)), self.plan)
        numbers = [number for one in source.each_expert(whole.of) for number in one.experts or ()]
        own = replace(whole.of, experts=tuple(numbers[whole.own.start : whole.own.stop]))
        return MixtureOfExperts(self._here(source.by_role(part.sublayer, dtype, own)), self.plan, whole.own.start)

    def _sharing(self, part: Part) -> Sharing:
        """The ranks that compute slices of a part's sublayer, which are others while passes are recorded."""
        return Sharing(lambda: self.groups[part.sharers], lambda: self.counts.layers)

    def _maps(self, work: Work, part: Part, tensors: Tensors, later: frozenset[str], based: bool) -> Maps:
        """The linear maps of a part: by itself, or together with the ranks that share its sublayer."""
        scale = self.plan.output_scale
        if len(part.sharers) == 1 or not part.sublayer.ranks:
            return Maps(tensors, scale, later)
        sharing = self._sharing(part)
        if based:
            return Maps(tensors, scale, later, base=sharing)
        if part.index in self._in_rank_space(work.step):
            later |= frozenset(WRITING)
        alone = Maps(tensors, scale, later)
        shared = Maps(tensors, scale, later, shared=sharing)
        if self._shares_out(part, alone, shared):
            return shared
        return alone

    def _shares_out(self, part: Part, alone: Maps, shared: Maps) -> bool:
        """Whether first factors are shared out: as the plan says, or as measured once for each shape."""
        if self.plan.low_rank != "auto":
            return self.plan.low_rank == "gather"
        roles = [one.role for one in self._projections(part.sublayer) if one.reads_stream]
        if not any(is_factored(role, alone.tensors) for role in roles):
            return False
        key = (replace(part.sublayer, layers=(0,), piece=None), part.sharers)
        if key not in self._ways:
            like = next(iter(alone.tensors.values()))
            x = torch.zeros(1, self.plan.hidden, dtype=like.dtype, device=like.device)
            before = self.counts
            self.counts = Phase()  # what measuring sends is no pass's
            with torch.inference_mode():
                ways = alone.reading(roles), shared.reading(roles)
                by_itself, together = (self._repeatable(one, x, one.by_kernels) for one in ways)
                self._ways[key] = gathering_is_faster(by_itself, together, self.groups[part.sharers], self.device)
            self.counts = before
        return self._ways[key]

    def _repeatable(self, compute: Callable[[Tensor], object], x: Tensor, by_kernels: bool) -> Callable[[], object]:
        """Computes once, and gives what does so again as passes will: without Python where they are recorded."""
        if self.graphs is not None:
            return self.graphs(partial(compute, x))
        kernels = kernels_for(x)
        recordable = all(one.recordable for one in self.groups.values())
        if kernels is None or not recordable or self.plan.decoding != "auto" or not by_kernels:
            compute(x)
            return partial(compute, x)
        recording = Recording(kernels, Arena())
        with self.groups_recorded(recording), recording.during():
            compute(x)
        replay = recording.finished()
        if replay is None:
            return partial(compute, x)
        return partial(_replayed, replay, (compute, x))

    @contextmanager
    def groups_recorded(self, recording: Recording) -> Iterator[None]:
        """Have what is sent between ranks noted in a recording."""
        groups = self.groups
        self.groups = {group: one.recorded(recording) for group, one in groups.items()}
        try:
            yield
        finally:
            self.groups = groups


def _replayed(replay: Replay, owners: object) -> None:  # noqa: ARG001 - of the memory that a replay reads
    """Compute again what was recorded."""
    replay(False)
