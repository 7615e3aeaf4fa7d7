"""A load whose speed is predicted or measured."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from surgeon.runtime.batching.request import Request, Sampling


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
