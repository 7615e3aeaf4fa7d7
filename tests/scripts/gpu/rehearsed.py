"""What an engine goes through in a rehearsal, on a CPU and on GPUs that are not there; ranks import it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric
from torch import Tensor

from surgeon.runtime.batching.blocks import blocks_for
from surgeon.runtime.batching.request import Row, Wanted
from surgeon.runtime.comm import shared_memory as symmetric_memory
from surgeon.runtime.comm.collectives import Collectives, Compressed, TorchCollectives
from surgeon.runtime.comm.shared_memory import Operation
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.plan.memory import cache_groups
from surgeon.runtime.plan.specification import Plan
from surgeon.runtime.worker.rank import Rank
from tests.pretended import Noted, pretended_gpus

PROMPTS = (5, 14, 33)
NEW = 6
LONGEST = 64
CLOSE = 1e-4  # relative; float32 on both sides


@dataclass
class Found:
    """What an engine made of some texts.

    Attributes:
        tokens: of each pass that chooses some.
        logits: behind the last one, (texts, vocabulary).
        launches, waits: of the last pass that added one token to each text, on a GPU that is not there.
    """

    tokens: list[list[int]] = field(default_factory=list)
    logits: Tensor = field(default_factory=lambda: torch.empty(0))
    launches: Counter[str] = field(default_factory=Counter)
    waits: list[str] = field(default_factory=list)

    def require(self, expected: Found) -> None:
        """See that it is what was expected."""
        assert self.tokens == expected.tokens, (
            f"other tokens: {self.tokens} in place of {expected.tokens}"
        )
        require_close(self.logits, expected.logits)


def require_close(found: Any, expected: Any, most: float = CLOSE) -> None:
    found = torch.as_tensor(found).double()
    expected = torch.as_tensor(expected).double()
    error = float((found - expected).norm() / expected.norm())
    assert error <= most, f"{error:.1e} off"


def continued(
    engine: RankEngine,
    noted: Noted | None = None,
    prompts: Sequence[int] = PROMPTS,
    new_tokens: int = NEW,
    ahead: Callable[[], object] | None = None,
) -> Found:
    """Prompts in two chunks, tokens one by one, a prompt beside them, and logits; a text's blocks lie apart.

    Args:
        ahead: called when passes have been recorded before texts come, as a server has it; None where none are.
    """
    groups = cache_groups(engine.plan).windows
    blocks = blocks_for(LONGEST)
    cache = engine.new_cache(
        len(groups) * (len(prompts) + 1) * blocks, len(prompts) + 1, grouped=len(groups) > 1
    )
    if ahead is not None:
        for way in engine.ways:
            for passed in way.passes_to_record(cache, len(prompts)):
                engine.record_ahead(passed, cache)
        ahead()
    texts = [
        [(3 + 7 * text + place) % engine.plan.vocabulary for place in range(length)]
        for text, length in enumerate(prompts)
    ]

    def runs(text: int) -> Any:
        firsts = [(group * (len(prompts) + 1) + text) * blocks for group in range(len(groups))]
        return tuple([(first + 1, blocks - 1), (first, 1)] for first in firsts)

    def rows(starts: Sequence[int], tokens: Sequence[list[int]], wanted: Wanted) -> list[Row]:
        each = zip(starts, tokens, strict=True)
        return [Row(start, own, runs(text), wanted) for text, (start, own) in enumerate(each)]

    engine.step(rows([0] * len(texts), [text[:3] for text in texts], Wanted.NOTHING), cache)
    best = engine.step(rows([3] * len(texts), [text[3:] for text in texts], Wanted.BEST), cache).best
    found = Found([best])
    for new in range(new_tokens):
        starts = [length + new for length in prompts]
        if noted is not None:
            noted.clear()
        best = engine.step(rows(starts, [[token] for token in best], Wanted.BEST), cache).best
        found.tokens.append(best)
    if noted is not None:
        found.launches = noted.launches.copy()
        found.waits = noted.waits.copy()
    starts = [length + new_tokens for length in prompts]
    beside = Row(0, texts[0], runs(len(prompts)), Wanted.BEST)
    best = engine.step([beside, *rows(starts, [[token] for token in best], Wanted.BEST)], cache).best
    found.tokens.append(best)
    last = rows([start + 1 for start in starts], [[token] for token in best[1:]], Wanted.LOGITS)
    logits = engine.step(last, cache).logits
    assert logits is not None
    found.logits = logits.cpu()
    return found


def on_rank(rank: Rank, plans: Sequence[Plan], compression: Any) -> list[Found]:
    """Runs on a rank: what it makes of the texts, by a plan for the CPU and then by some for GPUs."""
    collectives: Collectives = rank.collectives
    if compression is not None:
        collectives = Compressed(collectives, compression)
    found = [continued(RankEngine(plans[0], collectives, rank.device))]
    for plan in plans[1:]:
        with pretended_gpus(2):
            found.append(continued(RankEngine(plan, collectives, torch.device("cuda", rank.rank))))
    return found


class Memory:
    """Stands for PyTorch's symmetric memory on GPUs that are not there; ranks add up over gloo in its place.

    Attributes:
        sums: bytes of what went each way, and whether that was beside the current stream.
    """

    def __init__(self) -> None:
        self.sums: list[tuple[str, int, bool]] = []
        self._rooms: list[Tensor] = []

    def empty(self, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        self._rooms.append(torch.empty(size, dtype=dtype, device=device))
        return self._rooms[-1]

    def rendezvous(self, room: Tensor, group: str) -> SimpleNamespace:  # noqa: ARG002 - as PyTorch has it
        copies = room.new_empty(2, len(room))

        def read(rank: int, sizes: Sequence[int], dtype: torch.dtype) -> Tensor:
            return copies[rank, : sizes[0] * dtype.itemsize].view(dtype)

        def fetch() -> None:
            dist.all_gather_into_tensor(copies.view(-1), room)

        return SimpleNamespace(multicast_ptr=0, barrier=fetch, get_buffer=read)

    def way(self, name: str) -> Operation:
        """One of its operations."""

        def add(operand: Tensor, group: str, result: Tensor) -> None:  # noqa: ARG001 - as PyTorch has it
            self.sums.append((name, operand.nbytes, operand.data_ptr() == self._rooms[1].data_ptr()))
            dist.all_reduce(operand)
            result.copy_(operand)

        return add


def through_memory(rank: Rank, plans: Sequence[Plan], shared: bool) -> tuple[Found, Found, str, Memory]:
    """Runs on a rank: what it makes of texts by a plan for the CPU and one for GPUs with symmetric memory.

    Args:
        shared: whether ranks share a GPU, and record what they send.
    """
    assert isinstance(rank.collectives, TorchCollectives)
    expected = continued(RankEngine(plans[0], rank.collectives, rank.device))
    memory = Memory()

    with pretended_gpus(2 - shared) as noted, ExitStack() as stack:
        device = torch.device("cuda", 0 if shared else rank.rank)
        stack.enter_context(
            mock.patch.dict(os.environ, {symmetric_memory.OVERLAPPING: str(int(shared))})
        )
        stack.enter_context(
            mock.patch.multiple(symmetric, empty=memory.empty, rendezvous=memory.rendezvous)
        )
        ways = {name: memory.way(name) for name in ("one shot", "two shots")}
        stack.enter_context(mock.patch.dict(symmetric_memory.OPERATIONS, ways, clear=True))
        collectives = symmetric_memory.with_symmetric_memory(rank.collectives, device)
        found = continued(RankEngine(plans[1], collectives, device), noted)
    memory._rooms.clear()
    return expected, found, str(collectives), memory
