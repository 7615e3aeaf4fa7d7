"""One rank's part of a program: its weights, and how the executor runs it.

Embedding, cache, batches and output head are not in it: this package's engine has its own, and so has vLLM
(vllm_plugin).

Most steps have one sum, of what all ranks add to the stream, (T, h). Two things keep sublayers of a step apart: a norm
behind a sublayer (Gemma2), and a product of two factors, summed before the second one, of as many values as its rank.
Then each of the step's sublayers has a segment of its own in what is reduced, (T, all segments).

Shapes: T tokens of a pass, h the stream's width.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import zip_longest

import torch
from torch import Tensor

from surgeon.language.execute import Branch, Machine, Partial, Pending, State, in_turn, land
from surgeon.language.program import Fork, Node, Program, Step
from surgeon.language.sublayer import ATTENTION, WRITING, Sublayer
from surgeon.models.families import Projection
from surgeon.models.families.specs import unit_share
from surgeon.models.weights import ModelWeights, Tensors
from surgeon.runtime.comm.collectives import Counts, Peers, Phase
from surgeon.runtime.kernels.functions import Kernels, kernels_for
from surgeon.runtime.kernels.recording import Arena, CudaRecorder, GraphRecorder, Recording
from surgeon.runtime.model import linear
from surgeon.runtime.model.attending import Pass, centre_heads, in_halves
from surgeon.runtime.model.layers import (
    Attention,
    FeedForward,
    LatentMaps,
    Norm,
    Rebuild,
    norm_before,
    torch_dtype,
)
from surgeon.runtime.model.linear import Linear, Maps, Sharing, count_outputs, is_factored
from surgeon.runtime.model.mixture import MixtureOfExperts
from surgeon.runtime.plan.placement import (
    Group,
    Part,
    Work,
    assigned_branches,
    computed_of,
    groups_within,
    in_rank_space,
    rank_work,
    summed_apart,
    work_of,
)
from surgeon.runtime.plan.specification import Plan


@dataclass(frozen=True)
class StepOutputs:
    """The sums of one step, on ranks that compute slices of its sublayers.

    Attributes:
        widths: by number in the step, of sublayers that have a segment of their own; none where all are one sum.
        seconds: second factors of sublayers that are summed in rank space.
        norms: behind those sublayers that have one.
    """

    widths: Mapping[int, int]
    seconds: Mapping[int, Linear]
    norms: Mapping[int, Norm]

    def partial(self, outputs: list[tuple[int, Tensor]]) -> Partial:
        """This rank's part of the step's output, of its parts' outputs by their sublayers' numbers."""
        if not self.widths:
            return Partial(reduce(torch.add, (output for _, output in outputs)))
        like = outputs[0][1]
        parts = []
        for number, width in self.widths.items():
            own = [output for index, output in outputs if index == number]
            parts.append(reduce(torch.add, own) if own else like.new_zeros(len(like), width))
        return Partial(parts[0] if len(parts) == 1 else torch.cat(parts, -1), self._finish)

    def _finish(self, totals: Tensor) -> Tensor:
        """Make the step's output, (T, h), of the sums of its sublayers, (T, all widths)."""
        outputs = list[Tensor]()
        parts = totals.split(list(self.widths.values()), -1)
        for number, total in zip(self.widths, parts, strict=True):
            output = total
            if number in self.seconds:
                output = self.seconds[number](total)
            if number in self.norms:
                output = self.norms[number](output)
            outputs.append(output)
        return reduce(torch.add, outputs)


Made = Attention | FeedForward | MixtureOfExperts  # computes a part
PartKey = tuple[Sublayer, Group, range | None, bool]


class RankProgram:
    """One rank's part of the plan's program; every rank makes one, and all call the same methods in the same order.

    Attributes:
        graphs: records passes that are captured; None where they are not.
        passes: computed so far; of the current one, the share of its steps that is done.
        slots: the attentions of its work, by their slots of the cache.
        travelling: nodes whose sums are on their way while something else is computed.
        attended: after how many nodes, and how much of its work, no attention looks at tokens any more.
        watched: is entered with each step, and with the end of each fork, while it is computed; may be replaced.
    """

    def __init__(self, plan: Plan, peers: Peers, device: torch.device) -> None:
        self.plan = plan
        self.peers = peers
        self.device = device
        self.passes = 0.0
        captured = device.type == "cuda" and plan.is_static("cuda") and plan.decoding == "auto"
        self.graphs: GraphRecorder | None = (
            CudaRecorder(device) if captured and peers.collectives.capturable else None
        )
        program = Program.parse(plan.program)
        self.nodes = program.nodes
        for group in groups_within(program, plan.ranks, plan.exchanges, plan.sliced):
            peers.collectives.subgroup(group)  # all ranks at the same time
        self.work = work_of(plan, peers.rank)
        # By slots, which are numbered in this order.
        self.slots = [(work, part) for work in self.work for part in work.parts if part.slot is not None]
        self.travelling = frozenset(steps_in_flight(self.nodes))
        self.sublayers: dict[PartKey, Made] = {}
        self.norms: dict[Sublayer, Norm] = {}
        self.outputs: dict[Step, StepOutputs] = {}  # of steps that this rank has slices of
        # Whether first factors of one shape are shared out.
        self._ways: dict[tuple[object, ...], bool] = {}
        attended = program.attended_nodes
        before = Program(self.nodes[:attended])
        self.attended = (
            attended,
            len(rank_work(before, peers.rank, plan.ranks, plan.sliced, plan.balance)),
        )
        self.watched: Callable[[Node], AbstractContextManager[object]] = nullcontext

    def load(self, source: ModelWeights, beside: Iterable[RankProgram] = ()) -> None:
        """Load the slices of this rank's work, and what stands behind the sums of its steps."""
        alike = (other.sublayers.items() for other in beside)
        there = {
            key: made
            for sublayers in alike
            for key, made in sublayers
            if not self.plan.exchanges(key[0])
        }
        for work in self.work:
            for sublayer in dict.fromkeys(work.step.sublayers):
                if (
                    self.plan.family.spec(sublayer.kind, sublayer.layers[0]).norms_output
                    and sublayer not in self.norms
                ):
                    tensors = self._here(source.norms(sublayer, torch_dtype(self.plan)))
                    self.norms[sublayer] = Norm(tensors, "post_norm", self.plan)
            if not work.whole and work.step not in self.outputs:
                step = work.step
                norms = {
                    index: self.norms[one]
                    for index, one in enumerate(step.sublayers)
                    if one in self.norms
                }
                # The second factors that sums in rank space go through.
                seconds: dict[int, Linear] = {}
                for index in in_rank_space(self.plan, step):
                    sublayer = step.sublayers[index]
                    (role,) = (one.role for one in self._projections(sublayer) if one.role in WRITING)
                    tensors = self._here(source.written_part(sublayer, torch_dtype(self.plan)))
                    weight = tensors[f"{role}.second.weight"]
                    bias = tensors.get(f"{role}.bias")
                    seconds[index] = Linear([weight], [bias], self.plan.arithmetic.output_scale)
                self.outputs[step] = StepOutputs(summed_apart(self.plan, step), seconds, norms)
            for part in work.parts:
                key = self.key(work, part)
                if key not in self.sublayers:
                    self.sublayers[key] = there.get(key) or self._part(work, part, source)

    def _here(self, tensors: Tensors) -> Tensors:
        return {name: tensor.to(self.device) for name, tensor in tensors.items()}

    def _projections(self, sublayer: Sublayer) -> tuple[Projection, ...]:
        return self.plan.family.spec(sublayer.kind, sublayer.layers[0]).projections

    def key(self, work: Work, part: Part) -> PartKey:
        """A key that is the same for parts with the same weights and exchanges, summed in the same space."""
        whole = self.plan.mixtures.whole_experts(part.sublayer, len(part.sharers))
        exchanges = self.plan.exchanges(part.sublayer)
        inside = (
            bool(part.sublayer.ranks)
            and len(part.sharers) > 1
            and part.index in in_rank_space(self.plan, work.step)
        )
        sharers = part.sharers if exchanges else ()
        return part.sublayer, sharers, None if whole is None else whole.own, inside

    def _part(self, work: Work, part: Part, source: ModelWeights) -> Made:
        plan = self.plan
        dtype = torch_dtype(plan)
        sublayer = computed_of(plan, work, part)
        spec = source.spec(sublayer)
        if plan.mixtures.size(sublayer) is not None:
            whole = plan.mixtures.whole_experts(sublayer, len(part.sharers))
            if whole is None:
                return MixtureOfExperts(self._here(source.by_role(sublayer, dtype)), spec, plan)
            numbers = [number for one in source.each_expert(whole.of) for number in one.experts or ()]
            own = replace(whole.of, experts=tuple(numbers[whole.own.start : whole.own.stop]))
            tensors = self._here(source.by_role(sublayer, dtype, own))
            return MixtureOfExperts(tensors, spec, plan, whole.own.start)
        tensors = self._here(source.sublayer(sublayer, dtype))
        based = sublayer != part.sublayer
        later = frozenset[str]()  # roles whose second factors are no business of this part
        if sublayer.kind != ATTENTION:
            maps = self._maps(work, part, tensors, later, based)
            return FeedForward(tensors, maps, plan, norm_before(tensors, spec, plan))
        # Features of heads lie as they turn, and heads behind layer norms are centred by their matrices.
        family = plan.family
        if family.attention.head_norm.gains == "each" and family.norms.kind != "rms":
            tensors = centre_heads(tensors, plan.head_dim)
        if family.positions.neighbours and plan.arithmetic.rotaries:
            tensors = in_halves(tensors, plan.arithmetic.rotaries[0].width, plan.head_dim)
        looks = plan.window(sublayer), plan.arithmetic.rotary_of(sublayer)
        if plan.latent is not None:
            inside = {path.removeprefix(f"{spec.module}."): tensor for path, tensor in tensors.items()}
            latent = LatentMaps(inside, plan.latent, plan, sublayer.piece)
            return Attention(latent.tensors, latent, spec, plan, *looks)
        if plan.kept_factors(sublayer, count_outputs(tensors, "k") // plan.head_dim) is not None:
            later = frozenset("kv")  # the cache keeps what the first ones give
        maps = self._maps(work, part, tensors, later, based)
        if len(part.sharers) == 1 or based:
            return Attention(tensors, maps, spec, plan, *looks)
        units = source.units(sublayer)
        of_queries = unit_share(units, spec.projection("q").unit, sublayer.piece)
        of_keys = unit_share(units, spec.projection("k").unit, sublayer.piece)
        sharing = Sharing(self.peers, part.sharers)
        return Attention(tensors, maps, spec, plan, *looks, sharing, (of_queries, of_keys))

    def _maps(
        self, work: Work, part: Part, tensors: Tensors, later: frozenset[str], based: bool
    ) -> Maps:
        """The linear maps of a part: by itself, or together with the ranks that share its sublayer."""
        scale = self.plan.arithmetic.output_scale
        if len(part.sharers) == 1 or not part.sublayer.ranks:
            return Maps(tensors, scale, later)
        sharing = Sharing(self.peers, part.sharers)
        if based:
            return Maps(tensors, scale, later, base=sharing)
        if part.index in in_rank_space(self.plan, work.step):
            later |= frozenset(WRITING)
        alone = Maps(tensors, scale, later)
        shared = Maps(tensors, scale, later, shared=sharing)
        if self.plan.low_rank == "gather":
            return shared
        roles = [one.role for one in self._projections(part.sublayer) if one.reads_stream]
        if self.plan.low_rank != "auto" or not any(is_factored(role, tensors) for role in roles):
            return alone
        # First factors are shared out if that is faster, as measured once for each shape.
        key = (replace(part.sublayer, layers=(0,), piece=None), part.sharers)
        if key not in self._ways:
            like = next(iter(tensors.values()))
            x = torch.zeros(1, self.plan.hidden, dtype=like.dtype, device=like.device)
            before = self.peers.counts
            self.peers.counts = Phase()  # what measuring sends is no pass's
            with torch.inference_mode():
                ways = alone.in_projections(roles), shared.in_projections(roles)
                by_itself, together = (self._repeatable(one, x, one.by_kernels) for one in ways)
                times = [linear.time_of(one, self.device) for one in (by_itself, together)]
                # Those of all ranks that share the sublayer, so that they choose alike.
                own = torch.tensor(times, dtype=torch.float64, device=self.device)
                total = self.peers.collectives.subgroup(part.sharers).exact.all_reduce(own, Counts())()
                self._ways[key] = bool(total[1] < total[0])
            self.peers.counts = before
        if self._ways[key]:
            return shared
        return alone

    def recording_kernels(self, like: Tensor) -> Kernels | None:
        """The kernels where passes can be recorded: nothing that ranks send has to be waited for in Python."""
        if self.peers.collectives.recordable and self.plan.decoding == "auto":
            return kernels_for(like)
        return None

    def _repeatable(
        self, compute: Callable[[Tensor], object], x: Tensor, by_kernels: bool
    ) -> Callable[[], object]:
        """Compute once, and give what does so again as passes will: without Python where they are recorded."""
        if self.graphs is not None:
            return self.graphs(partial(compute, x))
        kernels = self.recording_kernels(x)
        if kernels is None or not by_kernels:
            compute(x)
            return partial(compute, x)
        recording = Recording(kernels, Arena())
        with recording.during():
            compute(x)
        replay = recording.finish()
        if replay is None:
            return partial(compute, x)
        memory = compute, x  # which the replay reads

        def again() -> None:
            assert memory
            replay(False)

        return again

    def attentions(self) -> list[Sublayer]:
        """The attentions of this rank's work, by cache slot."""
        return [part.sublayer for _, part in self.slots]

    def kv_heads(self) -> list[int]:
        """The KV heads that this rank has of each, once they are loaded."""
        return [made.kv_heads for made in self._attentions()]

    def sinks(self) -> list[Tensor]:
        """The sinks of each attention's heads, once they are loaded."""
        return [made.weighting.sinks for made in self._attentions() if made.weighting.sinks is not None]

    def rebuilds(self) -> dict[int, Rebuild]:
        """Makers of keys and values by slot, where the cache is in rank space."""
        return {
            slot: made.rebuild
            for slot, made in enumerate(self._attentions())
            if made.rebuild is not None
        }

    def _attentions(self) -> list[Attention]:
        found = [self.sublayers[self.key(work, part)] for work, part in self.slots]
        return [made for made in found if isinstance(made, Attention)]

    def run(self, state: State, shared: Pass) -> State:
        """Run the program; what its last node left pending may be on its way still."""
        return self._run(self.nodes, self.work, [state], [shared])[0]

    def _run(
        self,
        nodes: Sequence[Node],
        work: Sequence[Work],
        states: Sequence[State],
        passes: Sequence[Pass],
    ) -> Sequence[State]:
        """Run nodes whose work begins with this, for parts of a batch that take turns."""
        machines = [RankMachine(self, shared, self.peers.everybody, deque(work)) for shared in passes]
        return in_turn(nodes, states, machines)

    def stream_after(self, stream: Tensor, shared: Pass, places: list[int] | None = None) -> Tensor:
        """The stream after the program, (tokens, hidden).

        Args:
            places: of the tokens whose stream is wanted, all by default; for others, nothing is computed behind the
                last attention.
        """
        return self.streams_after([stream], [shared], None if places is None else [places])[0]

    def streams_after(
        self,
        streams: Sequence[Tensor],
        passes: Sequence[Pass],
        places: Sequence[list[int]] | None = None,
    ) -> list[Tensor]:
        """Run parts of a batch that take turns; the stream after the program of each."""
        nodes = self.nodes
        states: Sequence[State] = [State(stream) for stream in streams]
        if places is None or all(
            few == list(range(len(one))) for few, one in zip(places, streams, strict=True)
        ):
            return [land(state).stream for state in self._run(nodes, self.work, states, passes)]
        attended, worked = self.attended
        states = self._run(nodes[:attended], self.work, states, passes)
        # One place at least: who times steps counts on all in every pass.
        states = [_of_places(state, few or [0]) for state, few in zip(states, places, strict=True)]
        states = self._run(nodes[attended:], self.work[worked:], states, passes)
        return [land(state).stream[: len(few)] for state, few in zip(states, places, strict=True)]


def _of_places(state: State, places: list[int]) -> State:
    chosen = torch.tensor(places, device=state.stream.device)
    pending = state.pending
    return replace(
        state,
        stream=state.stream[chosen],
        pending=None if pending is None else lambda: pending()[chosen],
    )


def steps_in_flight(nodes: Branch) -> Iterator[Node]:
    """Late steps and the nodes before them: their sums are under way when something else is computed or sent."""
    for node, following in zip_longest(nodes, nodes[1:]):
        if any(isinstance(one, Step) and one.late for one in (node, following)):
            yield node
        if isinstance(node, Fork):
            for branch in node.branches:
                yield from steps_in_flight(branch)


class RankMachine(Machine):
    """One forward pass on one rank, seen from a group of ranks it belongs to.

    A norm behind a whole sublayer (Gemma2) is applied here, and the step is reduced like any other; of slices,
    `StepOutputs` says what is reduced.
    """

    def __init__(self, rank_program: RankProgram, shared: Pass, group: Group, work: deque[Work]) -> None:
        self.rank_program = rank_program
        self.shared = shared
        self.group = group
        self.work = work  # shared with the machines of forks: the executor comes to steps in this order
        self._node: Node | None = None  # whose output is reduced next

    def compute(self, step: Step, stream: Tensor) -> Partial:
        program = self.rank_program
        self._node = step
        with program.watched(step):
            work = self.work.popleft()
            assert work.step == step, f"the executor is at {step}, the rank's work at {work.step}"
            outputs = list[tuple[int, Tensor]]()
            for part in work.parts:
                made = program.sublayers[program.key(work, part)]
                if isinstance(made, Attention):
                    assert part.slot is not None
                    output = made(stream, part.slot, self.shared)
                elif isinstance(made, MixtureOfExperts):
                    output = made(stream, self.shared.waits)
                else:
                    output = made(stream)
                if work.whole and part.sublayer in program.norms:
                    output = program.norms[part.sublayer](output)
                outputs.append((part.index, output))
            program.passes += 1 / (len(program.work) * self.shared.parts)
            if work.whole:
                return Partial(reduce(torch.add, (output for _, output in outputs)))
            return program.outputs[step].partial(outputs)

    def add(self, stream: Tensor, output: Tensor) -> Tensor:
        """Add, and norm in the same launch for the part that comes next, if kernels can."""
        program = self.rank_program
        if self.work and self.work[0].parts:
            key = program.key(self.work[0], self.work[0].parts[0])
            return program.sublayers[key].norm.add(stream, output)
        return stream + output

    def reduce(self, partial: Partial) -> Pending:
        part, finish = partial
        if len(self.group) == 1:
            return lambda: part if finish is None else finish(part)
        program = self.rank_program
        at_once = self.shared.parts == 1 and self._node not in program.travelling
        wait = program.peers.collectives.subgroup(self.group).all_reduce(
            part, program.peers.counts.layers, at_once
        )
        if finish is None:
            return wait
        return lambda: finish(wait())

    def assign(self, fork: Fork) -> Iterable[tuple[Branch, Machine]]:
        branches, group = self._assign(fork)
        machine = RankMachine(self.rank_program, self.shared, group, self.work)
        return [(branch, machine) for branch in branches]

    def join(self, fork: Fork, added: Tensor) -> Partial:
        self._node = fork
        with self.rank_program.watched(fork):
            _, group = self._assign(fork)
        # A group of several ranks has its branch's output on each of them; only the first adds it to the fork's sum.
        return Partial(added if group[0] == self.rank_program.peers.rank else torch.zeros_like(added))

    def _assign(self, fork: Fork) -> tuple[tuple[Branch, ...], Group]:
        return assigned_branches(fork, self.rank_program.peers.rank, self.group)
