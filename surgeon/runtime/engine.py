"""One rank's share of a model: it runs the program with the one executor, and decodes greedily."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from surgeon.checkpoint.read import Checkpoint
from surgeon.execute import Branch, Machine, Pending, run
from surgeon.program import ATTENTION, Fork, Program, Step
from surgeon.runtime.collectives import Collectives, Counts
from surgeon.runtime.kv_cache import KVCache, causal_mask
from surgeon.runtime.layers import Attention, FeedForward, Norm, Pass, rotation
from surgeon.runtime.placement import Group, Work, fork_share, groups_within, rank_work
from surgeon.runtime.plan import Plan
from surgeon.runtime.sharding import Source


@dataclass(frozen=True)
class Phase:
    """What some forward passes cost, as one rank measured it.

    Attributes:
        passes: how many there were.
        layers: collectives of the program's steps and forks.
        vocabulary: collectives of the embedding and the output head.
    """

    seconds: float
    passes: int
    layers: Counts
    vocabulary: Counts


@dataclass(frozen=True)
class Figures:
    """What one generation cost: the prompt's pass, which gives the first new token, and one for each token after it."""

    prompt_tokens: int
    new_tokens: int
    prefill: Phase
    decode: Phase


class Meter:
    """Measures the passes of an engine from when it is made."""

    def __init__(self, engine: RankEngine) -> None:
        self.engine = engine
        self.began = time.perf_counter()
        self.layers, self.vocabulary = engine.layers.copy(), engine.vocabulary.copy()

    def read(self, passes: int) -> Phase:
        """What has been spent so far."""
        seconds = time.perf_counter() - self.began
        return Phase(seconds, passes, self.engine.layers - self.layers, self.engine.vocabulary - self.vocabulary)


class RankEngine:
    """The slices of a model that one rank holds, and the collectives that make them whole.

    Every rank builds one from the same plan, and all of them then call the same methods in the same order.

    Attributes:
        layers: counts the collectives of the program's steps and forks as they start.
        vocabulary: counts those of the embedding and the output head.
    """

    def __init__(self, plan: Plan, collectives: Collectives, device: torch.device) -> None:
        self.plan = plan
        self.collectives = collectives
        self.layers = Counts()
        self.vocabulary = Counts()
        self.device = device
        self.program = Program.parse(plan.program)
        self.rank = collectives.rank
        self.groups: dict[Group, Collectives] = {collectives.group: collectives}
        for group in groups_within(self.program, plan.ranks):
            self.groups[group] = collectives.subgroup(group)
        self.work = rank_work(self.program, self.rank, plan.ranks)
        source = Source(Checkpoint(plan.folder), plan.family, plan.head_dim)
        self._load_layers(source)
        self._load_ends(source)

    def _load_layers(self, source: Source) -> None:
        self.sublayers: dict[object, Attention | FeedForward] = {}
        for sublayer in {part.sublayer for work in self.work for part in work.parts}:
            tensors = source.sublayer(sublayer, self.plan.dtype)
            tensors = {name: tensor.to(self.device) for name, tensor in tensors.items()}
            made = Attention if sublayer.kind == ATTENTION else FeedForward
            self.sublayers[sublayer] = made(tensors, self.plan.family.spec(sublayer.kind), self.plan)

    def _load_ends(self, source: Source) -> None:
        """This rank's rows of the embedding and of the head (the same ones where they are tied), and the final norm."""
        family, plan = self.plan.family, self.plan

        def read(path: str, bounds: tuple[int, int] | None = None) -> Tensor:
            return source.tensor(path, bounds).to(plan.dtype).to(self.device)

        self.rows = -(-plan.vocabulary // plan.ranks)  # per rank; the last rank may have fewer
        self.first_row = min(self.rank * self.rows, plan.vocabulary)
        bounds = self.first_row, min(self.first_row + self.rows, plan.vocabulary)
        self.embedding = read(f"{family.embedding}.weight", bounds)
        head = f"{family.head}.weight"
        self.head = self.embedding if plan.tied else read(head, bounds)
        bias = f"{family.head}.bias"
        self.head_bias = read(bias, bounds) if bias in source else None
        self.positions = read(f"{family.position_embedding}.weight") if family.position_embedding else None
        norm = family.final_norm
        paths = [path for path in (f"{norm}.weight", f"{norm}.bias") if path in source]
        self.final_norm = Norm({path: read(path) for path in paths}, norm, plan)

    def new_cache(self, batch: int) -> KVCache:
        """An empty cache for a batch of texts of up to the plan's number of tokens."""
        parts = [part for work in self.work for part in work.parts if part.slot is not None]
        attentions = [self.sublayers[part.sublayer] for part in sorted(parts, key=lambda part: part.slot or 0)]
        kv_heads = [made.kv_heads for made in attentions if isinstance(made, Attention)]
        return KVCache(kv_heads, batch, self.plan.max_tokens, self.plan.head_dim, self.embedding)

    def forward(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """The normed stream after the program, (batch, tokens) to (batch, tokens, hidden); extends the cache."""
        count = tokens.shape[1]
        stream = self._embed(tokens, cache.length)
        rotary = self.plan.rotary
        shared = Pass(
            cache,
            None if rotary is None else rotation(rotary, cache.length, count, stream),
            causal_mask(count, cache.length, self.device),
        )
        stream = run(self.program, stream, RankMachine(self, shared, self.collectives.group, iter(self.work)))
        cache.advance(count)
        return self.final_norm(stream)

    def _embed(self, tokens: Tensor, first: int) -> Tensor:
        """Each rank looks up the tokens among its own rows; the others' give zero."""
        own = tokens - self.first_row
        outside = (own < 0) | (own >= len(self.embedding))
        looked_up = F.embedding(own.masked_fill(outside, 0), self.embedding) if len(self.embedding) else None
        if looked_up is None:
            looked_up = self.embedding.new_zeros(*tokens.shape, self.plan.hidden)
        stream = self.collectives.exact.all_reduce(looked_up.masked_fill(outside[..., None], 0), self.vocabulary)()
        if self.positions is None:
            return stream
        offset = first + self.plan.family.position_offset
        return stream + self.positions[offset : offset + tokens.shape[1]]

    def _own_logits(self, normed: Tensor) -> Tensor:
        return F.linear(normed, self.head, self.head_bias)

    def logits(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """Logits over the whole vocabulary for new tokens, (batch, tokens, vocabulary), on every rank."""
        own = self._own_logits(self.forward(tokens, cache))
        padded = F.pad(own, (0, self.rows - own.shape[-1]))
        gathered = self.collectives.all_gather(padded, self.vocabulary)
        return torch.cat(list(gathered), -1)[..., : self.plan.vocabulary]

    def best_token(self, tokens: Tensor, cache: KVCache) -> Tensor:
        """The most likely next token of each text, (batch,), the same on every rank."""
        own = self._own_logits(self.forward(tokens, cache)[:, -1])
        best, at = (
            own.max(-1) if own.shape[-1] else (own.new_full(own.shape[:1], -torch.inf), tokens.new_zeros(len(own)))
        )
        # Two float64 numbers per text instead of a vocabulary; a token id is exact in them.
        candidates = self.collectives.all_gather(
            torch.stack([best.double(), (at + self.first_row).double()], -1), self.vocabulary
        )
        winner = candidates[..., 0].argmax(0)
        return candidates[..., 1].gather(0, winner[None])[0].long()

    @torch.inference_mode()
    def generate(
        self, prompt: Tensor, new_tokens: int, stop: bool = True, notify: Callable[[list[int]], None] | None = None
    ) -> tuple[Tensor, Figures]:
        """Decode greedily.

        Args:
            prompt: token ids, (batch, tokens).
            new_tokens: how many to add at most.
            stop: end when every text has had an end token (what a text has after its own is to be ignored).
            notify: called with the newest token of every text.

        Returns:
            The new tokens, (batch, up to new_tokens), and what they cost.
        """
        cache = self.new_cache(len(prompt))
        ends = torch.tensor(self.plan.ends, dtype=torch.long, device=self.device)
        ended = torch.zeros(len(prompt), dtype=torch.bool, device=self.device)
        found: list[Tensor] = []
        newest, meter, prefill = prompt, Meter(self), None
        while len(found) < new_tokens:
            token = self.best_token(newest, cache)
            found.append(token)
            newest = token[:, None]
            if notify is not None:
                notify(token.tolist())
            ended |= torch.isin(token, ends)
            all_ended = bool(ended.all())  # waits for the device, so that the times below are right
            if prefill is None:
                prefill, meter = meter.read(1), Meter(self)
            if stop and all_ended:
                break
        assert prefill is not None
        return torch.stack(found, 1).cpu(), Figures(prompt.shape[1], len(found), prefill, meter.read(len(found) - 1))


class RankMachine(Machine):
    """One forward pass on one rank, seen from a group of ranks it belongs to."""

    def __init__(self, engine: RankEngine, shared: Pass, group: Group, work: Iterator[Work]) -> None:
        self.engine = engine
        self.shared = shared
        self.group = group
        self.work = work  # shared with the machines of forks: the executor comes to steps in this order
        self.counted_elsewhere = False

    def compute(self, step: Step, stream: Tensor) -> Tensor:
        work = next(self.work)
        assert work.step == step, f"the executor is at {step}, the rank's work at {work.step}"
        outputs = []
        for part in work.parts:
            made = self.engine.sublayers[part.sublayer]
            if isinstance(made, Attention):
                assert part.slot is not None
                outputs.append(made(stream, part.slot, self.shared))
            else:
                outputs.append(made(stream))
        total = outputs[0]
        for output in outputs[1:]:
            total = total + output
        return total

    def reduce(self, output: Tensor) -> Pending:
        if len(self.group) == 1:
            return lambda: output
        if self.counted_elsewhere:
            output, self.counted_elsewhere = torch.zeros_like(output), False
        return self.engine.groups[self.group].all_reduce(output, self.engine.layers)

    def assign(self, fork: Fork) -> Iterable[tuple[Branch, Machine]]:
        branches, group = fork_share(fork, self.engine.rank, self.group)
        machine = RankMachine(self.engine, self.shared, group, self.work)
        # A group of several ranks has its branch's output on each of them; only the first adds it to the fork's sum.
        self.counted_elsewhere = group.index(self.engine.rank) > 0
        return [(branch, machine) for branch in branches]
