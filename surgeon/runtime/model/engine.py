"""A rank's engine: it runs a model's program with the one executor, for many sequences in one pass.

A pass is a list of rows, each the next tokens of one sequence: one token of a text that is being continued, or a chunk
of a prompt. Ranks keep nothing about sequences but their keys and values; which rows a pass has is decided on rank 0
and sent to the others (worker.py). `ways_through` says which ways of computing passes there are for a model.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from surgeon.beside import torch_threads
from surgeon.checkpoint.tensor_file import TensorFile
from surgeon.models.weights import ModelWeights
from surgeon.runtime.batching.sequence import Row, Wanted, halves_of
from surgeon.runtime.batching.windows import BLOCK_TOKENS, Windows, blocks_for
from surgeon.runtime.comm.collectives import Collectives
from surgeon.runtime.kernels.build import SWITCH
from surgeon.runtime.kernels.functions import kernels_for
from surgeon.runtime.kernels.recording import Recording
from surgeon.runtime.kernels.triton import used_on
from surgeon.runtime.model.attending import Pass, Weighting
from surgeon.runtime.model.dynamic import DynamicPasses
from surgeon.runtime.model.ends import final_norm
from surgeon.runtime.model.layers import Rebuild
from surgeon.runtime.model.paged_cache import PagedCache
from surgeon.runtime.model.paged_layout import as_index
from surgeon.runtime.model.phase import Phase
from surgeon.runtime.model.program import RankProgram
from surgeon.runtime.model.rank_model import RankModel, Results, Way
from surgeon.runtime.model.recorded import RecordedDecode
from surgeon.runtime.model.static_decode import StaticDecode
from surgeon.runtime.model.thread_choice import ThreadChoice
from surgeon.runtime.plan.memory import cache_groups
from surgeon.runtime.plan.specification import CodaPlan, Plan


class RankCoda(RankProgram):
    """The coda's program; its attentions have the slots of the cache behind those of the rack.

    Args:
        rack: on the same rank.

    Attributes:
        vocabulary: with the coda's head.
    """

    def __init__(self, plan: CodaPlan, rack: RankModel) -> None:
        super().__init__(plan.plan, rack.collectives, rack.device)
        source = ModelWeights(TensorFile(plan.file), self.plan.family, self.plan.head_dim)
        self.load(source)
        self.vocabulary = rack.vocabulary.with_head(source, self.plan, self.device)
        self._first_slot = len(rack.attentions())
        self._norm = final_norm(source, self.plan, self.device)

    def rebuilds(self) -> dict[int, Rebuild]:
        """What makes keys and values of what is cached in rank space, by slot."""
        return {self._first_slot + slot: rebuild for slot, rebuild in super().rebuilds().items()}

    def behind(self, stream: Tensor, shared: Pass, places: list[int] | None = None) -> Tensor:
        """The stream behind the coda's layers, (tokens, hidden), given that behind the rack.

        Args:
            places: of the tokens whose stream is wanted, all by default.
        """

        def attend(slot: int, queries: Tensor, kept: Tensor, weighting: Weighting) -> Tensor:
            return shared.attend(self._first_slot + slot, queries, kept, weighting)

        return self.stream_after(stream, Pass(attend, shared.angles, waits=shared.waits), places=places)

    def logits(self, stream: Tensor) -> Tensor:
        """This rank's logits, (tokens, its rows of the vocabulary), of the stream behind the coda's layers."""
        return self.vocabulary.logits(self._norm(stream))


class HalvedPasses(DynamicPasses):
    """Computes any pass that has two halves."""

    def fits(self, rows: Sequence[Row]) -> bool:
        """Whether there are two halves of it."""
        return halves_of(rows) is not None

    def stream(self, rows: Sequence[Row], cache: PagedCache, places: list[int] | None = None) -> Tensor:
        """The stream after the program, (tokens, hidden), of the rows' tokens or of those at some places."""
        halves = halves_of(rows)
        assert halves is not None, "rows without two halves fit no such pass"
        self.model.counts.halved += 1
        tokens, _, passes = zip(*(self.laid_out(half, cache) for half in halves), strict=True)
        spans = [slice(row.start, row.start + len(row.tokens)) for row in rows]
        embedded = self.model.embedded(torch.cat(tokens), as_index(spans, self.model.device))
        sizes = [len(half) for half in tokens]
        taking_turns = [replace(one, parts=len(passes)) for one in passes]
        if places is None:
            return torch.cat(self.model.streams_after(embedded.split(sizes), taking_turns))
        order = sorted(places)
        few = [[at for at in order if at < sizes[0]], [at - sizes[0] for at in order if at >= sizes[0]]]
        stream = torch.cat(self.model.streams_after(embedded.split(sizes), taking_turns, places=few))
        if order == places:
            return stream
        return stream[[order.index(at) for at in places]]


LEAST_CAPABILITY = 8  # of GPUs, for products in bfloat16


@dataclass
class Figures:
    """What passes have cost: those with tokens of prompts, those that continue sequences, and those that draft."""

    prefill: Phase = field(default_factory=Phase)
    decode: Phase = field(default_factory=Phase)
    drafting: Phase = field(default_factory=Phase)


class RankEngine(RankModel):
    """The slices of a model that one rank holds, and the collectives that make them whole.

    Attributes:
        figures: what all passes so far have cost; may be replaced.
        coda: behind the program, if any.
        drafter: the engine of the program that drafts tokens, if any; it has the cache of this one, no weights twice.
        ways: through a pass; the first that fits its rows computes it.
    """

    def __init__(
        self, plan: Plan, collectives: Collectives, device: torch.device, beside: Iterable[RankModel] = ()
    ) -> None:
        """Load the model, weights that this rank has already (`beside`) but once.

        Raises:
            ValueError: if the plan's decoding is impossible on this device or with these collectives.
        """
        check_decoding(plan, collectives, device)
        super().__init__(plan, collectives, device, beside)
        self.figures = Figures()
        self.coda = None if plan.coda is None else RankCoda(plan.coda, self)
        self.ways = ways_through(self)
        self.drafter: RankEngine | None = None
        if plan.draft is not None:
            drafter = RankEngine if plan.draft.plan.coda is None else CodaEngine
            self.drafter = drafter(plan.draft.plan, collectives, device, [self, *beside])
        self._lent: WeakKeyDictionary[PagedCache, PagedCache] = WeakKeyDictionary()  # to the drafter
        self._threads = self._thread_choice()
        self._since: float | None = None
        self._reusable: tuple[PagedCache, bool] | None = None  # whether it is grouped

    def _thread_choice(self) -> ThreadChoice | None:
        """How many threads PyTorch's operations have, None for one; the kernels always have all of them."""
        threads = torch.get_num_threads()
        kernels = kernels_for(self.vocabulary.like)
        if kernels is not None:
            kernels.use_threads(threads)
            if self.by_kernels:
                return None
        # Of several ranks none can tell by its own passes: they take as long as the slowest rank's.
        chooses = self.device.type == "cpu" and self.plan.ranks == 1 and kernels is None
        return ThreadChoice(threads if chooses else 1)

    def new_cache(self, blocks: int, texts: int = 1, grouped: bool = False) -> PagedCache:
        """An empty cache for the attentions of this rank's work.

        Args:
            texts: that are going to be computed together; with more of them its buffers grow.
            grouped: whether attentions with a window keep no more than that (`cache_groups`); rows have blocks in
                each group then. Otherwise a row's blocks are those of all attentions.
        """
        heads = self.kv_heads()
        rebuilds = self.rebuilds()
        if self.drafter is not None:
            own = self._drafts_own()
            made = self.drafter.rebuilds()
            rebuilds |= {len(heads) + slot: made[one] for slot, one in enumerate(own) if one in made}
            heads = heads + [self.drafter.kv_heads()[one] for one in own]
        division = self.cache_division() if grouped else ()
        all_blocks = blocks + max(way.spare_blocks for way in self.ways)
        cache = PagedCache(heads, all_blocks, self.plan.head_dim, self.vocabulary.like, rebuilds, *division)
        together, most_blocks = self.plan.read_at_once(self.device.type, texts)
        cache.buffers.reserve(together * min(blocks, most_blocks) * BLOCK_TOKENS)
        return cache

    def kv_heads(self) -> list[int]:
        """How many KV heads this rank has of each attention, the coda's among them."""
        return super().kv_heads() + ([] if self.coda is None else self.coda.kv_heads())

    def rebuilds(self) -> dict[int, Rebuild]:
        """What makes keys and values of what is cached in rank space, by slot, the coda's among them."""
        return super().rebuilds() | ({} if self.coda is None else self.coda.rebuilds())

    def cache_division(self) -> tuple[Sequence[int], Windows]:
        """The group of each of this rank's attentions, and the windows of all groups."""
        groups = cache_groups(self.plan)
        return groups.slots[self.rank], groups.windows

    def reusable_cache(self, blocks: int, grouped: bool = False) -> PagedCache:
        """A cache of at least so many blocks, for when all that used the one returned before have ended.

        It is the same one if it can be, where ways through a pass hold its address.

        Args:
            grouped: as of `new_cache`.
        """
        if not any(way.holds_caches for way in self.ways):
            return self.new_cache(blocks, grouped=grouped)
        tokens = (blocks + max(way.spare_blocks for way in self.ways)) * BLOCK_TOKENS
        if self._reusable is None or self._reusable[1] != grouped or self._reusable[0].tokens < tokens:
            self._reusable = None  # so that there is room for the new one
            self._reusable = self.new_cache(blocks, grouped=grouped), grouped
        return self._reusable[0]

    def forget_cache(self) -> None:
        """Give back the memory of the reusable cache; passes that were recorded with it are forgotten, too."""
        self._reusable = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def step(self, rows: Sequence[Row], cache: PagedCache) -> Results:
        """One forward pass, which extends the cache."""
        decodes = all(row.start and len(row.tokens) == 1 for row in rows)
        with self._counted(self.figures.decode if decodes else self.figures.prefill, rows):
            return self._way(rows).step(rows, cache)

    def passes_to_record(self, cache: PagedCache, texts: int) -> list[list[Row]]:
        """Rows of passes over up to so many texts that are recorded when they first come."""
        return [rows for way in self.ways for rows in way.passes_to_record(cache, texts)]

    def record_ahead(self, rows: Sequence[Row], cache: PagedCache) -> None:
        """One of these passes, which counts as none."""
        figures = self.figures
        self.figures = Figures()
        self.step(rows, cache)
        self.figures = figures
        self.pause()

    @torch.inference_mode()
    def draft(self, rows: Sequence[Row], cache: PagedCache) -> Results:
        """One pass of the drafter, which drafts a token of each of some texts.

        Rows of tokens that the model has computed (`Row.known`) bring the drafter the keys and values that are its own.
        """
        assert self.drafter is not None, "tokens are drafted by a program"
        with self._counted(self.figures.drafting, rows):
            self.drafter.counts = self.figures.drafting
            return self.drafter._way(rows).step(rows, self._lent_to_drafter(cache))

    def _lent_to_drafter(self, cache: PagedCache) -> PagedCache:
        """What a cache is for the drafter: always the same one, whose address its ways hold."""
        if cache not in self._lent:
            assert self.plan.draft is not None
            self._lent[cache] = cache.lent(self.plan.draft.slots[self.rank], self._drafts_own())
        return self._lent[cache]

    def _drafts_own(self) -> tuple[int, ...]:
        """Which of the drafter's attentions have slots of their own."""
        if self.plan.draft is None:
            return ()
        return self.plan.draft.own[self.rank]

    def _way(self, rows: Sequence[Row]) -> Way:
        return next(way for way in self.ways if way.fits(rows))

    @contextmanager
    def _counted(self, phase: Phase, rows: Sequence[Row]) -> Iterator[None]:
        """Add what a pass costs to a phase."""
        began = self._since or time.perf_counter()
        begun = self.passes
        self.counts = phase
        tokens = sum(len(row.tokens) for row in rows)
        with torch_threads(1) if self._threads is None else self._threads.during_pass(tokens):
            yield
        self._since = time.perf_counter()
        phase.seconds += self._since - began
        phase.passes += 1
        self.passes = begun + 1
        phase.tokens += tokens

    def pause(self) -> None:
        """Say that there is nothing to do, so that waiting is not counted as a pass's time."""
        self._since = None

    @torch.inference_mode()
    def logits(self, rows: Sequence[Row], cache: PagedCache) -> Tensor:
        """One forward pass; logits of all its tokens, (tokens, vocabulary), on every rank."""
        self.counts = self.figures.prefill
        return self.whole_logits(self._way(rows).logits(rows, cache))

    def text_logits(self, tokens: list[int]) -> Tensor:
        """Logits of one text, (tokens, vocabulary), on every rank, with a cache of its own."""
        blocks = blocks_for(len(tokens))
        return self.logits([Row(0, tokens, ([(0, blocks)],), Wanted.NOTHING)], self.new_cache(blocks))


class CodaEngine(RankEngine):
    """Drafts tokens as the first rack of a model does with its coda."""

    coda: RankCoda

    def stream_after(
        self, stream: Tensor, shared: Pass, first: int = 0, end: int | None = None, places: list[int] | None = None
    ) -> Tensor:
        """The stream behind rack and coda, (tokens, hidden); the arguments are those of `RankProgram.stream_after`."""
        self.coda.counts = self.counts
        return self.coda.behind(super().stream_after(stream, shared, first, end), shared, places)

    def own_logits(self, stream: Tensor) -> Tensor:
        """This rank's logits, (tokens, rows), of the stream behind the coda."""
        return self.coda.logits(stream)

    @property
    def by_kernels(self) -> bool:
        """Whether kernels compute all that takes long."""
        return super().by_kernels and all(made.by_kernels for made in self.coda.sublayers.values())

    @contextmanager
    def groups_recorded(self, recording: Recording) -> Iterator[None]:
        """Have what is sent between ranks noted in a recording."""
        with super().groups_recorded(recording), self.coda.groups_recorded(recording):
            yield


def check_decoding(plan: Plan, collectives: Collectives, device: torch.device) -> None:
    """Refuse to capture passes that cannot be captured, and GPUs that kernels are not for, before anything is loaded.

    Raises:
        ValueError: saying why, and what to choose.
    """
    if plan.decoding == "captured" and device.type != "cuda":
        raise ValueError("decoding can be captured on GPUs only; choose static, dynamic or auto decoding on a CPU")
    if plan.decoding == "captured" and not collectives.capturable:
        raise ValueError("decoding cannot be captured with these collectives; use nccl, or static or auto decoding")
    if device.type == "cuda" and used_on("cuda") and torch.cuda.get_device_capability(device)[0] < LEAST_CAPABILITY:
        raise ValueError(
            f"the kernels for GPUs want compute capability {LEAST_CAPABILITY}.0 or more, and "
            f"{torch.cuda.get_device_name(device)} has less; set {SWITCH}=off in the environment"
        )


def ways_through(model: RankModel) -> tuple[Way, ...]:
    """The ways of computing passes that a plan's decoding, its device and collectives allow; the last one fits all."""
    plan = model.plan
    device = model.device
    decode: list[Way] = [HalvedPasses(model)] if plan.halves == "on" else []
    if plan.is_static(device.type):
        decode.append(StaticDecode(model, model.graphs))
    kernels = kernels_for(model.vocabulary.like)
    if kernels is not None and model.is_recordable and plan.decoding == "auto":
        decode.append(RecordedDecode(model, kernels))
    return *decode, DynamicPasses(model)
