"""A rank's engine: it runs the program with the one executor, for many sequences in one pass.

A pass is a list of rows, each the next tokens of one sequence: one token of a text that is being continued, or a chunk
of a prompt. Ranks keep nothing about sequences but their keys and values; which rows a pass has is decided on rank 0
and sent to the others (worker.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from surgeon.checkpoint.read import Checkpoint
from surgeon.models.weights import ModelWeights
from surgeon.runtime.batching.request import UNDEFINED, TokenLogprob, UndefinedLogits
from surgeon.runtime.batching.sequence import Row, Wanted, asked_of
from surgeon.runtime.batching.windows import BLOCK_TOKENS, blocks_for
from surgeon.runtime.comm.collectives import Collectives
from surgeon.runtime.kernels.functions import kernels_for
from surgeon.runtime.kernels.recording import Recording
from surgeon.runtime.model.coda import RankCoda
from surgeon.runtime.model.ends import Ends, Index, Vocabulary
from surgeon.runtime.model.layers import Angles, Attend, Pass, rotation
from surgeon.runtime.model.paged_cache import PagedCache, PagedLayout, angles_at
from surgeon.runtime.model.program import Phase, RankProgram
from surgeon.runtime.model.recorded import RecordedDecode
from surgeon.runtime.model.static_decode import CudaRecorder, StaticDecode
from surgeon.runtime.model.thread_choice import OneThread, ThreadChoice
from surgeon.runtime.plan.groups import cache_groups
from surgeon.runtime.plan.kept import is_static, read_at_once
from surgeon.runtime.plan.specification import Plan


@dataclass
class Figures:
    """What passes have cost: those with tokens of prompts, those that continue sequences, and those that draft."""

    prefill: Phase = field(default_factory=Phase)
    decode: Phase = field(default_factory=Phase)
    drafting: Phase = field(default_factory=Phase)


class Results(NamedTuple):
    """What a pass brings; the same on every rank.

    Attributes:
        best: the most likely next token of every row that wants it, or, of drafted rows, the one behind each of their
            tokens; UNDEFINED where the logits are not finite.
        logits: (rows, vocabulary), of those that want logits, as above; None if none does.
        scores: of every row with targets, how likely each of them is; NaN where the logits are not finite.
    """

    best: list[int]
    logits: Tensor | None
    scores: list[list[TokenLogprob]]


FIRST_ANGLES = 4096  # positions whose rotary angles are computed at once where passes are recorded
SCORED_TOKENS = 64  # whose logits are computed at a time: those of a long prompt would fill the memory


class RankEngine(RankProgram):
    """The slices of a model that one rank holds, and the collectives that make them whole.

    Attributes:
        figures: what all passes so far have cost; may be replaced.
        all_angles: rotary angles of every position, where there are such and passes of fixed shapes.
        coda: that drafts tokens, if any.
        recorded: decode passes that kernels compute by themselves, where they can.
    """

    def __init__(self, plan: Plan, collectives: Collectives, device: torch.device) -> None:
        super().__init__(plan, collectives, device)
        self.figures = Figures()
        self.counts = self.figures.prefill
        self._since: float | None = None
        self._static = self._static_decode()
        source = ModelWeights(Checkpoint(plan.folder), plan.family, plan.head_dim)
        self.load(source)
        self.vocabulary = Vocabulary(source, plan, collectives, device)
        self._threads = self._thread_choice()
        self.ends = Ends(source, plan, device)
        self.coda: RankCoda | None = None
        if plan.coda is not None:
            self.coda = RankCoda(plan.coda, len(self.attentions()), self.vocabulary, collectives, device)
        # Static passes may be recorded with the address of theirs, which therefore never grow.
        self.all_angles = self._turn(plan.max_tokens) if self._static is not None else None
        self.recorded = self._recorded_decode()
        # Where kernels are recorded with the address of theirs, there are new recordings when it grows.
        first = 0 if self.recorded is None else min(plan.max_tokens, FIRST_ANGLES)
        self._angles = self.all_angles or self._turn(first)
        self._reusable: PagedCache | None = None
        self._reusable_grouped = False

    def _thread_choice(self) -> ThreadChoice | OneThread:
        """How many threads PyTorch's operations have; the kernels always have all, and wait for none without a core."""
        threads, kernels = torch.get_num_threads(), kernels_for(self.vocabulary.like)
        if kernels is not None:
            kernels.use_threads(threads)
            if all(made.by_kernels for made in self.sublayers.values()):
                return OneThread()
        # Of several ranks none can tell by its own passes: they take as long as the slowest rank's.
        chooses = self.device.type == "cpu" and self.plan.ranks == 1 and kernels is None
        return ThreadChoice(threads if chooses else 1)

    def _static_decode(self) -> StaticDecode | None:
        """What computes decode passes, if not the way all other passes are computed."""
        gpu, wanted = self.device.type == "cuda", self.plan.decoding
        if wanted == "captured" and not gpu:
            raise ValueError("decoding can be captured on GPUs only; choose static, dynamic or auto decoding on a CPU")
        if wanted == "captured" and not self.collectives.capturable:
            raise ValueError("decoding cannot be captured with these collectives; use nccl, or static or auto decoding")
        if not is_static(self.plan, self.device.type):
            return None
        captured = gpu and wanted != "static" and self.collectives.capturable
        return StaticDecode(self, CudaRecorder(self.device) if captured else None)

    def _recorded_decode(self) -> RecordedDecode | None:
        """What computes decode passes without Python, where kernels compute all that takes long."""
        kernels, wanted = kernels_for(self.vocabulary.like), self.plan.decoding == "auto" and self.coda is None
        if kernels is None or not wanted or not isinstance(self._threads, OneThread):
            return None
        return RecordedDecode(self, kernels) if all(one.recordable for one in self.groups.values()) else None

    def new_cache(self, blocks: int, texts: int = 1, grouped: bool = False) -> PagedCache:
        """An empty cache for the attentions of this rank's work.

        Args:
            texts: that are going to be computed together; with more of them its buffers grow.
            grouped: whether attentions with a window keep no more than that (`cache_groups`); rows have blocks in
                each group then. Otherwise a row's blocks are those of all attentions.
        """
        spare = 0 if self._static is None else self._static.spare_blocks
        like = self.vocabulary.like
        heads, rebuilds = self.kv_heads(), self.rebuilds()
        if self.coda is not None:
            rebuilds |= {len(heads) + slot: rebuild for slot, rebuild in self.coda.layers.rebuilds().items()}
            heads += self.coda.layers.kv_heads()
        groups = cache_groups(self.plan) if grouped else None
        division = () if groups is None else (groups.slots[self.rank], groups.windows)
        cache = PagedCache(heads, blocks + spare, self.plan.head_dim, like, rebuilds, *division)
        together, most_blocks = read_at_once(self.plan, self._static is not None, texts)
        cache.buffers.reserve(together * min(blocks, most_blocks) * BLOCK_TOKENS)
        return cache

    def reusable_cache(self, blocks: int, grouped: bool = False) -> PagedCache:
        """A cache of at least so many blocks, for when all that used the one returned before have ended.

        It is the same one if it can be, where passes are recorded: recordings hold its address.

        Args:
            grouped: as of `new_cache`.
        """
        if self._static is None and self.recorded is None:
            return self.new_cache(blocks, grouped=grouped)
        spare = 0 if self._static is None else self._static.spare_blocks
        tokens = (blocks + spare) * BLOCK_TOKENS
        if self._reusable is None or self._reusable_grouped != grouped or self._reusable.tokens < tokens:
            self._reusable = None  # so that there is room for the new one
            self._reusable, self._reusable_grouped = self.new_cache(blocks, grouped=grouped), grouped
        return self._reusable

    @torch.inference_mode()
    def step(self, rows: Sequence[Row], cache: PagedCache) -> Results:
        """One forward pass, which extends the cache."""
        decodes = all(row.start and (row.drafted or len(row.tokens) == 1) for row in rows)
        with self._counted(self.figures.decode if decodes else self.figures.prefill, rows):
            if self._static is not None and self._static.fits(rows):
                return self._static_step(self._static, rows, cache)
            return self._dynamic_step(rows, cache)

    @torch.inference_mode()
    def draft(self, rows: Sequence[Row], cache: PagedCache) -> Results:
        """One pass through rack 0 and its coda, which extends the cache by one token of each of some texts.

        Rows are those of texts in an order that stays the same until the `step` that verifies what was drafted, and
        those that are done with drafting come last. What rack 0 gives is kept for that step.
        """
        coda = self.coda
        assert coda is not None, "tokens are drafted with a coda, and this engine has none"
        with self._counted(self.figures.drafting, rows):
            tokens, layout, shared = self._laid_out(rows, cache)
            stream = self.stream_after(self._embedded(tokens, layout.positions), shared, end=coda.nodes)
            coda.keep(stream)
            stream = coda.stream_after(stream, shared, self.counts)
            asked = asked_of(rows)
            return Results(*self._next(stream[asked.places], asked.wanted, coda.logits), [])

    @contextmanager
    def _counted(self, phase: Phase, rows: Sequence[Row]) -> Iterator[None]:
        """Add what a pass costs to a phase."""
        began, begun = self._since or time.perf_counter(), self.passes
        self.counts = phase
        tokens = sum(len(row.tokens) for row in rows)
        with self._threads.during_pass(tokens):
            yield
        self._since = time.perf_counter()
        phase.seconds += self._since - began
        phase.passes += 1
        self.passes = begun + 1
        phase.tokens += tokens

    def _dynamic_step(self, rows: Sequence[Row], cache: PagedCache) -> Results:
        """A pass of whatever shape the rows have."""
        if self.recorded is not None and self.recorded.fits(rows) and all(row.wanted for row in rows):
            return Results(*self._chosen(self.recorded.logits(rows, cache), [row.wanted for row in rows]), [])
        asked = asked_of(rows)
        stream = self._forward(rows, cache, asked.places)
        last, rest = stream.split([len(asked.wanted), len(asked.places) - len(asked.wanted)])
        return Results(*self._next(last, asked.wanted, self._own_logits), self._scores(rest, rows))

    def _static_step(self, static: StaticDecode, rows: Sequence[Row], cache: PagedCache) -> Results:
        """A decode pass of one of a few shapes."""
        best, own = static.step(rows, cache)
        full = [at for at, row in enumerate(rows) if row.wanted == Wanted.LOGITS]
        tokens = best.tolist()  # the one time in a pass that this process waits for a GPU
        wanted = [token for token, row in zip(tokens, rows, strict=False) if row.wanted == Wanted.BEST]
        return Results(wanted, self.vocabulary.gather(own[full], self.counts.vocabulary) if full else None, [])

    def pause(self) -> None:
        """Say that there is nothing to do, so that waiting is not counted as a pass's time."""
        self._since = None

    @torch.inference_mode()
    def logits(self, rows: Sequence[Row], cache: PagedCache) -> Tensor:
        """One forward pass; logits of all its tokens, (tokens, vocabulary), on every rank."""
        self.counts = self.figures.prefill
        if self.recorded is not None and self.recorded.fits(rows):
            own = self.recorded.logits(rows, cache)
        else:
            own = self._own_logits(self._forward(rows, cache))
        return self.vocabulary.gather(own, self.counts.vocabulary)

    def text_logits(self, tokens: list[int]) -> Tensor:
        """Logits of one text, (tokens, vocabulary), on every rank, with a cache of its own."""
        blocks = blocks_for(len(tokens))
        return self.logits([Row(0, tokens, ([(0, blocks)],), Wanted.NOTHING)], self.new_cache(blocks))

    def greedy(self, prompt: list[int], new_tokens: int) -> list[int]:
        """Continue one text with the most likely tokens, the same on every rank: without a scheduler or rank 0.

        Raises:
            UndefinedLogits: if the logits are not finite somewhere.
        """
        found: list[int] = []
        blocks = blocks_for(len(prompt) + new_tokens)
        cache, start, newest = self.new_cache(blocks), 0, prompt
        while len(found) < new_tokens:
            best = self.step([Row(start, newest, ([(0, blocks)],), Wanted.BEST)], cache).best
            if UNDEFINED in best:
                raise UndefinedLogits(f"the model's logits are not finite after {start + len(newest)} tokens")
            start, newest = start + len(newest), best
            found += best
        return found

    def _forward(self, rows: Sequence[Row], cache: PagedCache, places: list[int] | None = None) -> Tensor:
        """The stream after the program, (tokens, hidden), of the rows' tokens or of those at some places."""
        tokens, layout, shared = self._laid_out(rows, cache)
        if self.coda is None:
            return self.stream_after(self._embedded(tokens, layout.positions), shared, places=places)
        drafted, fresh = [row for row in rows if row.drafted], [row for row in rows if not row.drafted]
        streams = [self.coda.take(drafted)] if drafted else []
        if fresh:
            inside = self._laid_out(fresh, cache) if drafted else (tokens, layout, shared)
            streams.append(self._through_rack(*inside, self.coda))
        stream = streams[0] if len(streams) == 1 else torch.cat(streams)
        return self.stream_after(stream, shared, self.coda.nodes, places=places)

    def _through_rack(self, tokens: Tensor, layout: PagedLayout, shared: Pass, coda: RankCoda) -> Tensor:
        """The stream after rack 0, (tokens, hidden); the coda caches what it needs of it."""
        stream = self.stream_after(self._embedded(tokens, layout.positions), shared, end=coda.nodes)
        coda.stream_after(stream, shared, self.counts)
        return stream

    def _laid_out(self, rows: Sequence[Row], cache: PagedCache) -> tuple[Tensor, PagedLayout, Pass]:
        """The rows' tokens, (tokens,), where they are, and what their attentions share."""
        tokens = torch.tensor([token for row in rows for token in row.tokens], dtype=torch.long, device=self.device)
        longest = max(row.start + len(row.tokens) for row in rows)
        angles = self.angles_up_to(longest)
        layout = PagedLayout(rows, cache, angles)
        turned = angles_at(angles, layout.positions)
        return tokens, layout, Pass(layout.attend, turned)

    def _embedded(self, tokens: Tensor, positions: Index) -> Tensor:
        """The stream before the program, (tokens, hidden), of tokens (tokens,)."""
        embedded = self.ends.scaled(self.vocabulary.embed(tokens, self.counts.vocabulary))
        return self.ends.placed(embedded, positions)

    def next_logits(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """This rank's logits, (texts, rows), of one token (texts,) of each of some texts; nothing waits for a GPU."""
        turned = angles_at(self._angles, positions)
        stream = self.stream_after(self._embedded(tokens, positions), Pass(attend, turned))
        return self._own_logits(stream)

    def angles_up_to(self, tokens: int) -> Angles | None:
        """Rotary angles of so many positions or more, if there are any; others than before if those were fewer."""
        if self._angles is not None and tokens > len(self._angles[0]):
            self._angles = self._turn(2 * tokens)
        return self._angles

    @contextmanager
    def sums_recorded(self, recording: Recording) -> Iterator[None]:
        """Have what is sent between ranks noted in a recording."""
        with self.groups_recorded(recording):
            self.vocabulary.collectives = self.groups[self.collectives.group]
            try:
                yield
            finally:
                self.vocabulary.collectives = self.collectives

    def check_collectives(self) -> None:
        """See that sums in recorded passes have waited for nobody in vain.

        Raises:
            TimeoutError: if they have.
        """
        for collectives in self.groups.values():
            if (failure := collectives.failure()) is not None:
                raise failure

    def replayed(self, spans: Sequence[tuple[Any, float, float]]) -> None:
        """Take note of when a recorded pass has computed what spans of it were noted for (`recording.spanned`)."""

    def _turn(self, tokens: int) -> Angles | None:
        """Rotary angles of the first so many positions."""
        return None if self.plan.rotary is None else rotation(self.plan.rotary, 0, tokens, self.vocabulary.like)

    def _scores(self, stream: Tensor, rows: Sequence[Row]) -> list[list[TokenLogprob]]:
        """How likely the targets of rows are, given the stream before each, (all targets, hidden)."""
        found: list[list[TokenLogprob]] = []
        start = 0
        for _, targets, top in (row.targets for row in rows if row.targets is not None):
            found.append([])
            for begin in range(0, len(targets), SCORED_TOKENS):
                tokens = targets[begin : begin + SCORED_TOKENS]
                own = self._own_logits(stream[start + begin : start + begin + len(tokens)])
                found[-1] += self.vocabulary.score(own, tokens, top, self.counts.vocabulary)
            start += len(targets)
        return found

    def _next(
        self, stream: Tensor, wanted: Sequence[Wanted], head: Callable[[Tensor], Tensor]
    ) -> tuple[list[int], Tensor | None]:
        """What is wanted of tokens' next ones, given their stream, (wanted, hidden)."""
        return self._chosen(head(stream), wanted) if wanted else ([], None)

    def _chosen(self, own: Tensor, wanted: Sequence[Wanted]) -> tuple[list[int], Tensor | None]:
        """What is wanted of this rank's logits, (tokens, rows)."""
        best = [at for at, want in enumerate(wanted) if want == Wanted.BEST]
        if len(best) == len(wanted):
            return self.best_tokens(own).tolist(), None
        full = [at for at, want in enumerate(wanted) if want == Wanted.LOGITS]
        likeliest = self.best_tokens(own[best]).tolist() if best else []
        return likeliest, self.vocabulary.gather(own[full], self.counts.vocabulary)

    def _own_logits(self, stream: Tensor) -> Tensor:
        return self.vocabulary.logits(self.ends.final_norm(stream))

    def best_tokens(self, own: Tensor) -> Tensor:
        """The most likely token of each text, (texts,), from each rank's own logits, (texts, rows)."""
        return self.vocabulary.best(own, self.counts.vocabulary)
