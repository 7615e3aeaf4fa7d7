"""A load whose speed is predicted or measured, and the deployment of a model over hardware."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

import torch

from surgeon.errors import did_you_mean
from surgeon.runtime.batching.request import Request, Sampling
from surgeon.runtime.comm.collectives import Link
from surgeon.runtime.comm.wires import WIRES
from surgeon.runtime.plan.specification import HalvesMode, KvMode, LowRankMode


@dataclass(frozen=True)
class Workload:
    """Texts that are continued together: their prompts in one pass, then one token of each at a time.

    Attributes:
        batch: how many texts.
        prompt: tokens of each prompt.
        new: tokens to add to each.
        seed: of random token ids.
    """

    batch: int = 1
    prompt: int = 1024
    new: int = 512
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "prompt", "new"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")

    @classmethod
    def within(
        cls, positions: int, batch: int = 1, prompt: int | None = None, new: int | None = None
    ) -> Workload:
        """A load with default lengths that fit a model of so many positions."""
        usual = min(cls.prompt, positions // 2), max(2, min(cls.new, positions // 4))
        return cls(batch, prompt or usual[0], new or usual[1])

    @property
    def length(self) -> int:
        return self.prompt + self.new

    def requests(self, vocabulary: int) -> list[Request]:
        """Make the texts, of random tokens; end tokens do not end them."""
        generator = torch.Generator().manual_seed(self.seed)
        texts = torch.randint(vocabulary, (self.batch, self.prompt), generator=generator).tolist()
        sampling = Sampling(max_new_tokens=self.new, ignore_end=True)
        return [Request(number, tuple(text), sampling) for number, text in enumerate(texts)]


DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Deployment:
    """A model's spread over hardware.

    Attributes:
        dtype: to compute in; None for that of the weights, but float32 where kernels are launched one by one.
        link, network: within a node and between nodes, by name; by default the hardware's first.
        node: ranks of a node; by default as many as it has devices.
        graphs: whether decoding passes are captured graphs; by default where the host is asynchronous.
        adding: whether GPUs add and norm in one launch, as our kernels do.
        compress: what reductions are sent as, if not as they are.
        low_rank: how ranks share factors; `auto` is gather or replicate, whichever is faster for one token.
        kv: what attentions with factors of k and v keep.
        halves: whether passes are computed in two halves.
        emulated: a link as `surgeon bench` emulates it, on top.
        connected: whether ranks wait for each other at all (`upper-bound`).
    """

    ranks: int = 1
    dtype: str | None = None
    link: str | None = None
    network: str | None = None
    node: int | None = None
    graphs: bool | None = None
    adding: bool = True
    compress: str | None = None
    low_rank: LowRankMode = "auto"
    kv: KvMode = "full"
    halves: HalvesMode = "off"
    emulated: Link | None = None
    connected: bool = True

    def __post_init__(self) -> None:
        for what, word, known in (
            ("dtype {!r}", self.dtype, DTYPES),
            ("compression {!r}", self.compress, tuple(WIRES)),
            ("way {!r} of sharing factors among ranks", self.low_rank, get_args(LowRankMode)),
            ("kv {!r}", self.kv, ("full", "lowrank")),
            ("mode {!r} of computing passes in halves", self.halves, get_args(HalvesMode)),
        ):
            if word is not None and word not in known:
                raise ValueError(f"there is no {what.format(word)}; {did_you_mean(word, known)}")
        if self.ranks < 1:
            raise ValueError(f"the number of ranks must be at least 1, not {self.ranks}")
        if self.node is not None and self.node < 1:
            raise ValueError(f"a node has at least 1 rank, not {self.node}")
