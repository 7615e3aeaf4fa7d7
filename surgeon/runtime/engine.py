"""One rank's share of a model: it runs the program with the one executor, for many sequences in one pass.

A pass is a list of rows, each the next tokens of one sequence: one token of a text that is being continued, or a chunk
of a prompt. Ranks keep nothing about sequences but their keys and values; which rows a pass has is decided on rank 0
and sent to the others (worker.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from surgeon.checkpoint.read import Checkpoint
from surgeon.runtime.blocks import BLOCK_TOKENS, blocks_for
from surgeon.runtime.collectives import Collectives
from surgeon.runtime.layers import Attend, Attention, Norm, Pass, rotation, softcap, transposed
from surgeon.runtime.paged_cache import Index, Layout, PagedCache
from surgeon.runtime.plan import Plan
from surgeon.runtime.request import UNDEFINED, TokenLogprob, UndefinedLogits
from surgeon.runtime.scoring import score
from surgeon.runtime.sequence import Row, Wanted
from surgeon.runtime.sharding import Source
from surgeon.runtime.share import Phase, Share
from surgeon.runtime.static_decode import CudaRecorder, StaticDecode


@dataclass
class Figures:
    """What passes have cost: those with tokens of prompts, and those that add one token to each sequence."""

    prefill: Phase = field(default_factory=Phase)
    decode: Phase = field(default_factory=Phase)


class Results(NamedTuple):
    """What a pass brings; the same on every rank.

    Attributes:
        best: the most likely next token of every row that wants it; UNDEFINED where the logits are not finite.
        logits: (rows, vocabulary), of those that want logits; None if none does.
        scores: of every row with targets, how likely each of them is; NaN where the logits are not finite.
    """

    best: list[int]
    logits: Tensor | None
    scores: list[list[TokenLogprob]]


SCORED_TOKENS = 64  # whose logits are computed at a time: those of a long prompt would fill the memory


class RankEngine(Share):
    """The slices of a model that one rank holds, and the collectives that make them whole.

    Attributes:
        figures: what all passes so far have cost; may be replaced.
    """

    def __init__(self, plan: Plan, collectives: Collectives, device: torch.device) -> None:
        super().__init__(plan, collectives, device)
        self.figures = Figures()
        self.counts = self.figures.prefill
        self._since: float | None = None
        self._static = self._static_decode()
        source = Source(Checkpoint(plan.folder), plan.family, plan.head_dim)
        self.load(source)
        self._load_ends(source)
        # Static passes may be recorded with the address of theirs, which therefore never grow.
        self._all_angles = self._turn(plan.max_tokens) if self._static is not None else None
        self._angles = self._all_angles or self._turn(0)
        self._reusable: PagedCache | None = None

    def _static_decode(self) -> StaticDecode | None:
        """What computes decode passes, if not the way all other passes are computed."""
        gpu, wanted = self.device.type == "cuda", self.plan.decoding
        if wanted == "captured" and not gpu:
            raise ValueError("decoding can be captured on GPUs only; choose static, dynamic or auto decoding on a CPU")
        if wanted == "captured" and not self.collectives.capturable:
            raise ValueError("decoding cannot be captured with these collectives; use nccl, or static or auto decoding")
        if wanted == "dynamic" or (wanted == "auto" and not gpu):
            return None
        captured = gpu and wanted != "static" and self.collectives.capturable
        return StaticDecode(self, CudaRecorder(self.device) if captured else None)

    def _load_ends(self, source: Source) -> None:
        """This rank's rows of the embedding and of the head (the same ones where they are tied), and the final norm."""
        family, plan = self.plan.family, self.plan

        def read(path: str, bounds: tuple[int, int] | None = None) -> Tensor:
            return source.tensor(path, bounds).to(plan.dtype).to(self.device)

        self.rows = -(-plan.vocabulary // plan.ranks)  # per rank; the last rank may have fewer
        self.first_row = min(self.rank * self.rows, plan.vocabulary)
        bounds = self.first_row, min(self.first_row + self.rows, plan.vocabulary)
        self.embedding = read(f"{family.embedding}.weight", bounds)
        self.embedding_scale: Tensor | None = None
        if plan.embedding_scale is not None:
            self.embedding_scale = self.embedding.new_tensor(plan.embedding_scale)  # rounded to the dtype first
        head = self.embedding if plan.tied else read(f"{family.head}.weight", bounds)
        self.head = head.t() if plan.tied else transposed(head)
        bias = f"{family.head}.bias"
        self.head_bias = read(bias, bounds) if bias in source else None
        self.positions = read(f"{family.position_embedding}.weight") if family.position_embedding else None
        norm = family.final_norm
        paths = [path for path in (f"{norm}.weight", f"{norm}.bias") if path in source]
        self.final_norm = Norm({path: read(path) for path in paths}, norm, plan)

    def new_cache(self, blocks: int) -> PagedCache:
        """An empty cache for the attentions of this rank's work."""
        attentions = [self.sublayers[attention] for attention in self.attentions()]
        kv_heads = [made.kv_heads for made in attentions if isinstance(made, Attention)]
        spare = 0 if self._static is None else self._static.spare_blocks
        return PagedCache(kv_heads, blocks + spare, self.plan.head_dim, self.embedding)

    def reusable_cache(self, blocks: int) -> PagedCache:
        """A cache of at least so many blocks, for when all that used the one returned before have ended.

        It is the same one if it can be, where passes are recorded: recordings hold its address.
        """
        if self._static is None:
            return self.new_cache(blocks)
        if self._reusable is None or self._reusable.tokens < (blocks + self._static.spare_blocks) * BLOCK_TOKENS:
            self._reusable = None  # so that there is room for the new one
            self._reusable = self.new_cache(blocks)
        return self._reusable

    @torch.inference_mode()
    def step(self, rows: Sequence[Row], cache: PagedCache) -> Results:
        """One forward pass, which extends the cache."""
        began, begun = self._since or time.perf_counter(), self.passes
        decodes = all(row.start and len(row.tokens) == 1 for row in rows)
        self.counts = self.figures.decode if decodes else self.figures.prefill
        if self._static is not None and self._static.fits(rows):
            results = self._static_step(self._static, rows, cache)
        else:
            results = self._dynamic_step(rows, cache)
        self._since = time.perf_counter()
        self.counts.seconds += self._since - began
        self.counts.passes += 1
        self.passes = begun + 1
        self.counts.tokens += sum(len(row.tokens) for row in rows)
        return results

    def _dynamic_step(self, rows: Sequence[Row], cache: PagedCache) -> Results:
        """A pass of whatever shape the rows have."""
        layout = Layout(rows, cache)
        stream = self._forward(rows, layout)
        return Results(*self._next(stream, layout, [row.wanted for row in rows]), self._scores(stream, rows))

    def _static_step(self, static: StaticDecode, rows: Sequence[Row], cache: PagedCache) -> Results:
        """A decode pass of one of a few shapes."""
        best, own = static.step(rows, cache)
        full = [at for at, row in enumerate(rows) if row.wanted == Wanted.LOGITS]
        tokens = best.tolist()  # the one time in a pass that this process waits for a GPU
        wanted = [token for token, row in zip(tokens, rows, strict=False) if row.wanted == Wanted.BEST]
        return Results(wanted, self._gather(own[full]) if full else None, [])

    def pause(self) -> None:
        """Say that there is nothing to do, so that waiting is not counted as a pass's time."""
        self._since = None

    @torch.inference_mode()
    def logits(self, rows: Sequence[Row], cache: PagedCache) -> Tensor:
        """One forward pass; logits of all its tokens, (tokens, vocabulary), on every rank."""
        self.counts = self.figures.prefill
        return self._gather(self._own_logits(self._forward(rows, Layout(rows, cache))))

    def text_logits(self, tokens: list[int]) -> Tensor:
        """Logits of one text, (tokens, vocabulary), on every rank, with a cache of its own."""
        blocks = blocks_for(len(tokens))
        return self.logits([Row(0, tokens, [(0, blocks)], Wanted.NOTHING)], self.new_cache(blocks))

    def greedy(self, prompt: list[int], new_tokens: int) -> list[int]:
        """Continue one text with the most likely tokens, the same on every rank: without a scheduler or rank 0.

        Raises:
            UndefinedLogits: if the logits are not finite somewhere.
        """
        found: list[int] = []
        blocks = blocks_for(len(prompt) + new_tokens)
        cache, start, newest = self.new_cache(blocks), 0, prompt
        while len(found) < new_tokens:
            best = self.step([Row(start, newest, [(0, blocks)], Wanted.BEST)], cache).best
            if UNDEFINED in best:
                raise UndefinedLogits(f"the model's logits are not finite after {start + len(newest)} tokens")
            start, newest = start + len(newest), best
            found += best
        return found

    def _forward(self, rows: Sequence[Row], layout: Layout) -> Tensor:
        """The stream after the program, (tokens, hidden)."""
        tokens = torch.tensor([token for row in rows for token in row.tokens], dtype=torch.long, device=self.device)
        turned = None
        if self._angles is not None:
            longest = max(row.start + len(row.tokens) for row in rows)
            if longest > len(self._angles[0]):
                self._angles = self._turn(2 * longest)
            assert self._angles is not None
            turned = self._angles[0][layout.positions], self._angles[1][layout.positions]
        return self._run(tokens, layout.positions, Pass(layout.attend, turned))

    def _run(self, tokens: Tensor, positions: Index, shared: Pass) -> Tensor:
        """The stream after the program, (tokens, hidden), of tokens (tokens,)."""
        return self.stream_after(self._embed(tokens, positions), shared)

    def next_logits(self, tokens: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """This rank's logits, (texts, rows), of one token (texts,) of each of some texts; nothing waits for a GPU."""
        turned = None
        if self._all_angles is not None:
            turned = self._all_angles[0].index_select(0, positions), self._all_angles[1].index_select(0, positions)
        return self._own_logits(self._run(tokens, positions, Pass(attend, turned)))

    def _turn(self, tokens: int) -> tuple[Tensor, Tensor] | None:
        """Rotary angles of the first so many positions."""
        return None if self.plan.rotary is None else rotation(self.plan.rotary, 0, tokens, self.embedding)

    def _embed(self, tokens: Tensor, positions: Index) -> Tensor:
        """Each rank looks up the tokens among its own rows; the others' give zero."""
        if self.plan.ranks == 1:
            return self._placed(F.embedding(tokens, self.embedding), positions)
        own = tokens - self.first_row
        outside = (own < 0) | (own >= len(self.embedding))
        looked_up = F.embedding(own.masked_fill(outside, 0), self.embedding) if len(self.embedding) else None
        if looked_up is None:
            looked_up = self.embedding.new_zeros(*tokens.shape, self.plan.hidden)
        looked_up = looked_up.masked_fill(outside[..., None], 0)
        return self._placed(self.collectives.exact.all_reduce(looked_up, self.counts.vocabulary)(), positions)

    def _placed(self, stream: Tensor, positions: Index) -> Tensor:
        """The stream of embedded tokens, (tokens, hidden), with what it has of their positions."""
        if self.embedding_scale is not None:
            stream = stream * self.embedding_scale
        if self.positions is None:
            return stream
        return stream + self.positions[self.plan.family.position_offset :][positions]

    def _scores(self, stream: Tensor, rows: Sequence[Row]) -> list[list[TokenLogprob]]:
        """How likely the targets of rows are."""
        found: list[list[TokenLogprob]] = []
        start = 0
        for row in rows:
            if row.targets is not None:
                first, tokens, top = row.targets
                places = stream[start + first : start + first + len(tokens)].split(SCORED_TOKENS)
                found.append([])
                for number, part in enumerate(places):
                    begin = number * SCORED_TOKENS
                    found[-1] += self._score(part, tokens[begin : begin + SCORED_TOKENS], top)
            start += len(row.tokens)
        return found

    def _score(self, stream: Tensor, targets: list[int], top: int) -> list[TokenLogprob]:
        def all_gather(tensor: Tensor) -> Tensor:
            return self.collectives.all_gather(tensor, self.counts.vocabulary)

        return score(self._own_logits(stream), self.first_row, self.rows, targets, top, all_gather)

    def _next(self, stream: Tensor, layout: Layout, wanted: list[Wanted]) -> tuple[list[int], Tensor | None]:
        """What the rows want of their last tokens; only these go through the head."""
        last = [at for at, want in zip(layout.last, wanted, strict=True) if want]
        if not last:
            return [], None
        own = self._own_logits(stream if len(last) == len(stream) else stream[last])
        wanted = [want for want in wanted if want]
        best = [at for at, want in enumerate(wanted) if want == Wanted.BEST]
        if len(best) == len(wanted):
            return self.best_tokens(own).tolist(), None
        full = [at for at, want in enumerate(wanted) if want == Wanted.LOGITS]
        return (self.best_tokens(own[best]).tolist() if best else []), self._gather(own[full])

    def _own_logits(self, stream: Tensor) -> Tensor:
        normed = self.final_norm(stream)
        logits = normed @ self.head if self.head_bias is None else torch.addmm(self.head_bias, normed, self.head)
        if self.plan.logit_scale is not None:
            logits = logits * self.plan.logit_scale
        return logits if self.plan.logit_softcap is None else softcap(logits, self.plan.logit_softcap)

    def _gather(self, own: Tensor) -> Tensor:
        """Logits over the whole vocabulary, (tokens, vocabulary), from each rank's own rows."""
        padded = F.pad(own, (0, self.rows - own.shape[-1]))
        gathered = self.collectives.all_gather(padded, self.counts.vocabulary)
        return torch.cat(list(gathered), -1)[..., : self.plan.vocabulary]

    def best_tokens(self, own: Tensor) -> Tensor:
        """The most likely token of each text, (texts,), from each rank's own logits, (texts, rows).

        It is UNDEFINED where the highest logit is not finite: NaN counts as higher than any number. Nothing waits for
        a GPU.
        """
        if own.shape[-1]:
            best, at = own.max(-1)
        else:  # the vocabulary has fewer rows than there are ranks
            best, at = own.new_full(own.shape[:1], -torch.inf), own.new_zeros(own.shape[:1], dtype=torch.long)
        if self.plan.ranks == 1:
            return at.masked_fill(~best.isfinite(), UNDEFINED)
        # Two float64 numbers per text instead of a vocabulary; a token id is exact in them.
        candidates = self.collectives.all_gather(
            torch.stack([best.double(), (at + self.first_row).double()], -1), self.counts.vocabulary
        )
        highest, winner = candidates[..., 0].max(0)
        return candidates[..., 1].gather(0, winner[None])[0].long().masked_fill(~highest.isfinite(), UNDEFINED)
