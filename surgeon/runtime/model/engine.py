"""A rank's engine: it runs a model's program with the one executor, for many sequences in one pass.

A pass is a list of rows, each the next tokens of one sequence: one token of a text that is continued, or a chunk of a
prompt. Ranks keep nothing about sequences but their keys and values; rank 0 decides which rows a pass has (worker.py).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from surgeon.machine import torch_threads
from surgeon.runtime.batching.blocks import BLOCK_TOKENS, blocks_for
from surgeon.runtime.batching.request import Row, Rows, Wanted
from surgeon.runtime.comm.collectives import Collectives, Phase
from surgeon.runtime.kernels.build import SWITCH, used_on
from surgeon.runtime.kernels.functions import kernels_for
from surgeon.runtime.model.paged_cache import PagedCache
from surgeon.runtime.model.rank_model import DynamicPasses, HalvedPasses, RankModel, Results, Way
from surgeon.runtime.model.recorded import RecordedDecode, StaticDecode
from surgeon.runtime.plan.memory import cache_groups
from surgeon.runtime.plan.specification import Plan

LEAST_CAPABILITY = 8  # of GPUs, for products in bfloat16


@dataclass
class Figures:
    """The cost of passes with tokens of prompts, of those that continue sequences, and of those that draft."""

    prefill: Phase = field(default_factory=Phase)
    decode: Phase = field(default_factory=Phase)
    drafting: Phase = field(default_factory=Phase)


class RankEngine:
    """An engine of passes over many sequences, on one rank.

    Attributes:
        figures: the cost of all passes so far; may be replaced.
        drafter: the engine of the program that drafts tokens, if any, on the cache of this one and its weights.
        ways: through a pass; the first that fits its rows computes it.
        division: the group of each of this rank's attentions in caches, and the windows of all groups.
    """

    def __init__(
        self,
        plan: Plan,
        collectives: Collectives,
        device: torch.device,
        beside: Iterable[RankEngine] = (),
    ) -> None:
        """Load the model, weights that this rank has already (`beside`) but once."""
        if (
            device.type == "cuda"
            and used_on("cuda")
            and torch.cuda.get_device_capability(device)[0] < LEAST_CAPABILITY
        ):
            raise ValueError(
                f"the kernels for GPUs want compute capability {LEAST_CAPABILITY}.0 or more, and "
                f"{torch.cuda.get_device_name(device)} has less; set {SWITCH}=off in the environment"
            )
        self.model: RankModel = RankModel(plan, collectives, device, [other.model for other in beside])
        self.plan = self.model.plan
        self.device = device
        self.figures = Figures()
        self.ways = ways_through(self.model)
        groups = cache_groups(plan)
        self.division = groups.slots[self.model.peers.rank], groups.windows
        self.drafter: RankEngine | None = None
        if plan.draft is not None:
            self.drafter = RankEngine(plan.draft.plan, collectives, device, [self, *beside])
        self._lent: WeakKeyDictionary[PagedCache, PagedCache] = WeakKeyDictionary()  # to the drafter
        kernels = kernels_for(self.model.vocabulary.like)
        if kernels is not None:
            kernels.use_threads(torch.get_num_threads())
        # Where kernels compute all that takes long, short operations of PyTorch's on several threads would wait until a
        # process that has the core of one gives it back.
        self._one_thread = kernels is not None and self.model.by_kernels
        self._since: float | None = None
        self._reusable: tuple[PagedCache, bool] | None = None  # whether it is grouped

    def new_cache(self, blocks: int, texts: int = 1, grouped: bool = False) -> PagedCache:
        """Make an empty cache for the attentions of this rank's work.

        Args:
            texts: that are going to be computed together; with more of them its buffers grow.
            grouped: whether attentions with a window keep no more than that (`cache_groups`), and rows have blocks in
                each group; otherwise a row's blocks are those of all attentions.
        """
        heads = self.model.kv_heads()
        rebuilds = self.model.rebuilds()
        draft = self.plan.draft
        if self.drafter is not None and draft is not None:
            own = draft.own[self.model.peers.rank]  # its attentions with slots of their own
            made = self.drafter.model.rebuilds()
            rebuilds |= {len(heads) + slot: made[one] for slot, one in enumerate(own) if one in made}
            heads = heads + [self.drafter.model.kv_heads()[one] for one in own]
        division = self.division if grouped else ()
        all_blocks = blocks + max(way.spare_blocks for way in self.ways)
        cache = PagedCache(
            heads, all_blocks, self.plan.head_dim, self.model.vocabulary.like, rebuilds, *division
        )
        together, most_blocks = self.plan.read_at_once(self.device.type, texts)
        cache.buffers.reserve(together * min(blocks, most_blocks) * BLOCK_TOKENS)
        return cache

    def reusable_cache(self, blocks: int, grouped: bool = False) -> PagedCache:
        """Give a cache of at least so many blocks, when all that used the one given before have ended.

        The same one if possible, where ways through a pass hold its address.
        """
        if not any(way.holds_caches for way in self.ways):
            return self.new_cache(blocks, grouped=grouped)
        tokens = (blocks + max(way.spare_blocks for way in self.ways)) * BLOCK_TOKENS
        if self._reusable is None or self._reusable[1] != grouped or self._reusable[0].tokens < tokens:
            self._reusable = None  # so that there is room for the new one
            self._reusable = self.new_cache(blocks, grouped=grouped), grouped
        return self._reusable[0]

    def forget_cache(self) -> None:
        """Free the reusable cache, and the passes that were recorded with it."""
        self._reusable = None
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.inference_mode()
    def step(self, rows: Rows, cache: PagedCache) -> Results:
        """Compute one pass, which extends the cache."""
        with self._count(self._phase(rows), rows):
            return self._way(rows).step(rows, cache)

    @torch.inference_mode()
    def several(self, rows: Rows, passes: int, cache: PagedCache) -> list[list[int]]:
        """Compute passes one after the other, each with the likeliest tokens of the one before; the tokens of each.

        Rows have one token each, want the likeliest next one, and have blocks for those of all passes.
        """
        with self._count(self._phase(rows), rows, passes):
            return self._way(rows).several(rows, passes, cache)

    def record_ahead(self, rows: Rows, cache: PagedCache) -> None:
        """Compute one of these passes, which counts as none."""
        figures = self.figures
        self.figures = Figures()
        self.step(rows, cache)
        self.figures = figures
        self.pause()

    @torch.inference_mode()
    def draft(self, rows: Rows, cache: PagedCache) -> Results:
        """Compute one pass of the drafter, which drafts a token of each of some texts.

        Rows of tokens that the model has computed (`Row.known`) bring the drafter the keys and values that are its own.
        """
        assert self.drafter is not None, "tokens are drafted by a program"
        with self._count(self.figures.drafting, rows):
            self.drafter.model.peers.counts = self.figures.drafting
            if cache not in self._lent:
                draft = self.plan.draft
                assert draft is not None
                rank = self.model.peers.rank
                # Where any rank keeps keys of its own, all ranks compute known tokens again.
                self._lent[cache] = cache.lend(
                    draft.slots[rank], draft.own[rank] if draft.keeps_own else None
                )
            return self.drafter._way(rows).step(rows, self._lent[cache])

    def _phase(self, rows: Rows) -> Phase:
        if all(row.continues for row in rows):
            return self.figures.decode
        return self.figures.prefill

    def _way(self, rows: Rows) -> Way:
        return next(way for way in self.ways if way.fits(rows))

    @contextmanager
    def _count(self, phase: Phase, rows: Rows, passes: int = 1) -> Iterator[None]:
        began = self._since or time.perf_counter()
        program = self.model.program
        begun = program.passes
        self.model.peers.counts = phase
        tokens = passes * sum(len(row.tokens) for row in rows)
        with torch_threads(1) if self._one_thread else nullcontext():
            yield
        self._since = time.perf_counter()
        phase.seconds += self._since - began
        phase.passes += passes
        program.passes = begun + passes
        phase.tokens += tokens

    def pause(self) -> None:
        """Say that there is nothing to do, so that waiting is not counted as a pass's time."""
        self._since = None

    @torch.inference_mode()
    def logits(self, rows: Rows, cache: PagedCache) -> Tensor:
        """Compute one pass; logits of all its tokens, (tokens, vocabulary), on every rank."""
        self.model.peers.counts = self.figures.prefill
        return self.model.vocabulary.gather(self._way(rows).logits(rows, cache))

    def text_logits(self, tokens: list[int]) -> Tensor:
        """Logits of one text, (tokens, vocabulary), on every rank, with a cache of its own."""
        blocks = blocks_for(len(tokens))
        return self.logits([Row(0, tokens, ([(0, blocks)],), Wanted.NOTHING)], self.new_cache(blocks))


def ways_through(model: RankModel) -> tuple[Way, ...]:
    """The ways of computing passes that a plan's decoding, its device and collectives allow; the last one fits all."""
    plan = model.plan
    device = model.device
    decode: list[Way] = []
    if plan.halves == "on":
        decode = [HalvedPasses(model)]
    if plan.is_static(device.type):
        decode.append(StaticDecode(model, model.program.graphs))
    kernels = model.program.recording_kernels(model.vocabulary.like)
    if kernels is not None and model.by_kernels:
        decode.append(RecordedDecode(model, kernels))
    return *decode, DynamicPasses(model)
