"""A whole model on one rank, from tokens to logits.

`RankModel` knows nothing of passes. Ways of computing one (`Way`) are `DynamicPasses` for whatever rows there are, and
in a file of their own (recorded.py) those that add one token to each text; engine.py chooses.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from surgeon.checkpoint.random_weights import open_weights
from surgeon.checkpoint.tensor_file import TensorFiles
from surgeon.models.weights import ModelWeights
from surgeon.runtime.batching.request import (
    Row,
    Rows,
    TokenLogprob,
    Wanted,
    asked_of,
    halves_of,
)
from surgeon.runtime.comm.collectives import Collectives, Peers
from surgeon.runtime.kernels.functions import Weighting
from surgeon.runtime.model.attending import AllAngles, Attend, AttendRaw, Pass, rotate_angles, rotation
from surgeon.runtime.model.ends import Ends, Index, Vocabulary, final_norm
from surgeon.runtime.model.layers import Rebuild
from surgeon.runtime.model.paged_cache import PagedCache, PagedLayout, angles_at, as_index
from surgeon.runtime.model.program import RankProgram
from surgeon.runtime.plan.specification import CodaPlan, Plan


class Results(NamedTuple):
    """Results of a pass; the same on every rank.

    Attributes:
        best: the most likely next token of every row that wants it, or, of drafted rows, the one behind each of their
            tokens; UNDEFINED where the logits are not finite.
        logits: (rows, vocabulary), of those that want logits, as above; None if none does.
        scores: of the targets of every row with some; NaN where the logits are not finite.
    """

    best: list[int]
    logits: Tensor | None
    scores: list[list[TokenLogprob]]


class Way(ABC):
    """A way of computing a pass: every rank takes the same one for the same rows.

    Attributes:
        spare_blocks: of a cache, beyond those of texts.
        holds_caches: whether it keeps the addresses of the caches that passes were computed with.
    """

    spare_blocks = 0
    holds_caches = False

    def passes_to_record(self, cache: PagedCache, texts: int) -> Iterator[list[Row]]:  # noqa: ARG002 - most record nothing
        """Rows of passes over up to so many texts that it would record when they first come; nobody has their block."""
        return iter(())

    @abstractmethod
    def fits(self, rows: Rows) -> bool:
        """True if it can compute a pass of these rows."""

    @abstractmethod
    def step(self, rows: Rows, cache: PagedCache) -> Results:
        """Compute one pass, which extends the cache."""

    def several(self, rows: Rows, passes: int, cache: PagedCache) -> list[list[int]]:
        """Compute passes that add a token to each text, each with the tokens of the one before; the tokens of each.

        Behind logits that are not finite (UNDEFINED) any token does.
        """
        found = list[list[int]]()
        for _ in range(passes):
            found.append(self.step(rows, cache).best)
            rows = [
                row._replace(start=row.start + 1, tokens=[max(0, token)])
                for row, token in zip(rows, found[-1], strict=True)
            ]
        return found

    @abstractmethod
    def logits(self, rows: Rows, cache: PagedCache) -> Tensor:
        """Compute one pass; this rank's logits of all tokens, (tokens, its rows), which the next one may overwrite."""


class RankModel:
    """One rank's part of a model.

    Attributes:
        coda: behind the program, if any; the model predicts by it, but where ranks have stretches of the program.
        arriving: of a stretch that embeds no tokens, the stream before it.
        watcher: told when a recorded pass has computed its spans (`recording.spanned`).
    """

    def __init__(
        self,
        plan: Plan,
        collectives: Collectives,
        device: torch.device,
        beside: Iterable[RankModel] = (),
    ) -> None:
        """Load it; weights of models in `beside`, which this rank has already, are there once."""
        self.plan = plan
        self.device = device
        self.peers = Peers(collectives)
        self.program = RankProgram(plan, self.peers, device)
        source = open_weights(plan.folder, plan.family, plan.head_dim, device)
        alike = [  # they read the same tensors, in the same dtype
            other
            for other in beside
            if (plan.folder, plan.dtype, device) == (other.plan.folder, other.plan.dtype, other.device)
        ]
        self.program.load(source, [other.program for other in alike])
        self.vocabulary: Vocabulary
        self.ends: Ends
        if alike:
            self.vocabulary = copy(alike[0].vocabulary)
            self.vocabulary.plan = plan
            self.vocabulary.peers = self.peers
            self.ends = alike[0].ends
        else:
            self.vocabulary = Vocabulary(source, plan, device, self.peers)
            self.ends = Ends(source, plan, device)
        self._angles = self._angles_of(0)
        self.coda = None
        if plan.coda is not None:
            self.coda = RankCoda(plan.coda, self)
        self.arriving: Tensor | None = None
        self.watcher: Callable[[Sequence[tuple[Any, float, float]]], None] | None = None

    @property
    def by_kernels(self) -> bool:
        """True if kernels compute all expensive parts."""
        return all(
            made.by_kernels for program in self._programs() for made in program.sublayers.values()
        )

    def _programs(self) -> list[RankProgram]:
        if self.coda is None:
            return [self.program]
        return [self.program, self.coda.program]

    def kv_heads(self) -> list[int]:
        """KV heads that this rank has of each attention, the coda's among them."""
        return [heads for program in self._programs() for heads in program.kv_heads()]

    def rebuilds(self) -> dict[int, Rebuild]:
        """Makers of keys and values of what is cached in rank space, by slot, the coda's among them."""
        rebuilds = self.program.rebuilds()
        if self.coda is not None:
            first = self.coda.first_slot
            rebuilds |= {first + slot: rebuild for slot, rebuild in self.coda.program.rebuilds().items()}
        return rebuilds

    def angles_up_to(self, tokens: int) -> AllAngles:
        """Rotary angles of so many positions or more; others than before if those were fewer."""
        largest = max((len(cosine) for cosine, _ in self._angles), default=tokens)
        if tokens > largest:
            self._angles = self._angles_of(max(tokens, 2 * largest))
        return self._angles

    def _angles_of(self, tokens: int) -> AllAngles:
        return tuple(
            rotation(rotary, tokens, self.vocabulary.like) for rotary in self.plan.arithmetic.rotaries
        )

    def turns_by_position(self, row: Row) -> bool:
        """Tell whether a row's tokens turn by no more than their positions, as in texts that end with them."""
        long_texts = self.plan.long_texts
        return long_texts is None or row.prompt <= long_texts.beyond or row.start + 1 >= row.prompt

    def embed(self, tokens: Tensor, positions: Index) -> Tensor:
        """The stream before the program, (tokens, hidden), of tokens (tokens,)."""
        if self.arriving is not None:
            return self.arriving[: len(tokens)]
        embedded = self.ends.scale(self.vocabulary.embed(tokens))
        return self.ends.add_positions(embedded, positions)

    def stream_after(self, stream: Tensor, shared: Pass, places: list[int] | None = None) -> Tensor:
        """The stream after the program and its coda, (tokens, hidden); of a stretch both, side by side."""
        if self.coda is None:
            return self.program.stream_after(stream, shared, places)
        stream = self.program.stream_after(stream, shared)
        behind = self.coda.behind(stream, shared, places)
        if self.plan.stretch is None:
            return behind
        return torch.cat([stream, behind], -1)

    def next_logits(
        self,
        tokens: Tensor,
        positions: Tensor,
        angles: AllAngles,
        attend: Attend,
        attend_raw: AttendRaw | None = None,
    ) -> Tensor:
        """Compute one token (texts,) of each of some texts, to `end`; nothing waits for a GPU."""
        shared = Pass(attend, angles_at(angles, positions), attend_raw, waits=False)
        return self.end(self.stream_after(self.embed(tokens, positions), shared))

    def end(self, stream: Tensor) -> Tensor:
        """This rank's logits, (tokens, rows), of the stream behind the program; of a stretch that stream."""
        if self.plan.stretch is None:
            return self.own_logits(stream)
        return stream

    def own_logits(self, stream: Tensor) -> Tensor:
        """This rank's logits, (tokens, rows), of the stream behind the program."""
        if self.coda is not None and self.plan.stretch is None:
            return self.coda.logits(stream)
        return self.vocabulary.logits(self.ends.final_norm(stream))

    def choose(self, own: Tensor, wanted: Sequence[Wanted]) -> tuple[list[int], Tensor | None]:
        """Choose the `best` and the `logits` of results, by these logits, (tokens, rows)."""
        best, full = (
            [at for at, want in enumerate(wanted) if want == kind]
            for kind in (Wanted.BEST, Wanted.LOGITS)
        )
        likeliest: list[int] = []
        logits: Tensor | None = None
        if best:
            likeliest = self.vocabulary.best(own if len(best) == len(wanted) else own[best]).tolist()
        if full:
            logits = self.vocabulary.gather(own if len(full) == len(wanted) else own[full])
        return likeliest, logits


class RankCoda:
    """The coda on one rank; its attentions have the slots of the cache from `first_slot` on, behind the rack's."""

    def __init__(self, plan: CodaPlan, rack: RankModel) -> None:
        self.program = RankProgram(plan.plan, rack.peers, rack.device)
        source = ModelWeights(TensorFiles(plan.file), plan.plan.family, plan.plan.head_dim)
        self.program.load(source)
        self.vocabulary = rack.vocabulary.with_head(source, plan.plan, rack.device)
        self.first_slot = len(rack.program.slots)
        self._norm = final_norm(source, plan.plan, rack.device)

    def behind(self, stream: Tensor, shared: Pass, places: list[int] | None = None) -> Tensor:
        """Run the coda's layers on the stream behind the rack, (tokens, hidden), as `stream_after`."""

        def attend(slot: int, queries: Tensor, kept: Tensor, weighting: Weighting) -> Tensor:
            return shared.attend(self.first_slot + slot, queries, kept, weighting)

        return self.program.stream_after(stream, Pass(attend, shared.angles, waits=shared.waits), places)

    def logits(self, stream: Tensor) -> Tensor:
        """This rank's logits, (tokens, its rows of the vocabulary), of the stream behind the coda's layers."""
        return self.vocabulary.logits(self._norm(stream))


SCORED_TOKENS = 64  # whose logits are computed at a time: those of a long prompt would fill the memory


class DynamicPasses(Way):
    """Any passes."""

    def __init__(self, model: RankModel) -> None:
        self.model = model

    def fits(self, rows: Rows) -> bool:  # noqa: ARG002 - whatever they are
        return True

    def step(self, rows: Rows, cache: PagedCache) -> Results:
        return self.results(self.stream(rows, cache, asked_of(rows)), rows)

    def results(self, stream: Tensor, rows: Rows) -> Results:
        """Choose by the stream behind the program at the places that are asked of, (places, hidden)."""
        wanted = [row.wanted for row in rows if row.wanted]
        predicting = stream[len(wanted) :]
        best: list[int] = []
        logits: Tensor | None = None
        if wanted:
            best, logits = self.model.choose(self.model.own_logits(stream[: len(wanted)]), wanted)
        scores = list[list[TokenLogprob]]()
        start = 0
        for _, targets, top in (row.targets for row in rows if row.targets is not None):
            scores.append([])
            for begin in range(0, len(targets), SCORED_TOKENS):
                tokens = targets[begin : begin + SCORED_TOKENS]
                own = self.model.own_logits(predicting[start + begin : start + begin + len(tokens)])
                scores[-1] += self.model.vocabulary.score(own, tokens, top)
            start += len(targets)
        return Results(best, logits, scores)

    def logits(self, rows: Rows, cache: PagedCache) -> Tensor:
        """Compute one pass; this rank's logits of all tokens."""
        tokens, positions, shared = self.laid_out(rows, cache)
        model = self.model
        return model.end(model.stream_after(model.embed(tokens, positions), shared))

    def stream(self, rows: Rows, cache: PagedCache, places: list[int] | None = None) -> Tensor:
        """The stream after the program, (tokens, hidden), of the rows' tokens or of those at some places."""
        tokens, positions, shared = self.laid_out(rows, cache)
        return self.model.stream_after(self.model.embed(tokens, positions), shared, places)

    def laid_out(self, rows: Rows, cache: PagedCache) -> tuple[Tensor, Index, Pass]:
        """Lay out rows: their tokens, (tokens,), positions, and what their attentions share."""
        model = self.model
        tokens = torch.tensor(
            [token for row in rows for token in row.tokens], dtype=torch.long, device=model.device
        )
        angles = model.angles_up_to(max(row.end for row in rows))
        layout = PagedLayout(rows, cache, angles)
        if all(map(model.turns_by_position, rows)):
            own = angles_at(angles, layout.positions)
        else:
            places = list[int]()
            lengths = list[int]()  # of the text that each token turns as in
            for row in rows:
                places += range(row.start, row.end)
                lengths += (max(row.prompt, place + 1) for place in range(row.start, row.end))
            both = torch.tensor([places, lengths], device=model.device)
            own = tuple(
                rotate_angles(rotary, both[0], both[1], model.vocabulary.like)
                for rotary in model.plan.arithmetic.rotaries
            )
        return tokens, layout.positions, Pass(layout.attend, own)


class HalvedPasses(DynamicPasses):
    """Passes in two halves that take turns."""

    def fits(self, rows: Rows) -> bool:
        return halves_of(rows) is not None

    def stream(self, rows: Rows, cache: PagedCache, places: list[int] | None = None) -> Tensor:
        halves = halves_of(rows)
        assert halves is not None, "rows without two halves fit no such pass"
        self.model.peers.counts.halved += 1
        tokens, _, passes = zip(*(self.laid_out(half, cache) for half in halves), strict=True)
        spans = [slice(row.start, row.end) for row in rows]
        embedded = self.model.embed(torch.cat(tokens), as_index(spans, self.model.device))
        sizes = [len(half) for half in tokens]
        taking_turns = [replace(one, parts=len(passes)) for one in passes]
        if places is None:
            return torch.cat(self.model.program.streams_after(embedded.split(sizes), taking_turns))
        order = sorted(places)
        few = [[at for at in order if at < sizes[0]], [at - sizes[0] for at in order if at >= sizes[0]]]
        stream = torch.cat(
            self.model.program.streams_after(embedded.split(sizes), taking_turns, places=few)
        )
        if order == places:
            return stream
        return stream[[order.index(at) for at in places]]
