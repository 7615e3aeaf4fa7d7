"""The keys and values a rank keeps: one preallocated slot per attention of its work."""

from __future__ import annotations

import torch
from torch import Tensor


class KVCache:
    """Keys and values of every attention slot of one rank, for texts of up to a fixed number of tokens.

    Attributes:
        length: tokens whose keys and values are in.
    """

    def __init__(self, kv_heads: list[int], batch: int, max_tokens: int, head_dim: int, like: Tensor) -> None:
        self.max_tokens = max_tokens
        self.length = 0
        self._slots = [
            (like.new_empty(batch, heads, max_tokens, head_dim), like.new_empty(batch, heads, max_tokens, head_dim))
            for heads in kv_heads
        ]

    def extend(self, slot: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Put in the keys and values of new tokens, (batch, kv_heads, tokens, head_dim); returns all so far."""
        end = self.length + keys.shape[2]
        assert end <= self.max_tokens, f"{end} tokens do not fit a cache for {self.max_tokens}"
        cached_keys, cached_values = self._slots[slot]
        cached_keys[:, :, self.length : end] = keys
        cached_values[:, :, self.length : end] = values
        return cached_keys[:, :, :end], cached_values[:, :, :end]

    def advance(self, tokens: int) -> None:
        """Count tokens whose keys and values every slot has been given."""
        self.length += tokens

    @property
    def nbytes(self) -> int:
        """Memory of all slots."""
        return sum(keys.nbytes + values.nbytes for keys, values in self._slots)


def causal_mask(tokens: int, length: int, device: torch.device) -> Tensor | None:
    """Which of `length + tokens` positions each of the last `tokens` may look at.

    None where a single one may look at all, and for a text's first tokens, which need no mask but a flag.
    """
    if tokens == 1 or length == 0:
        return None
    return torch.ones(tokens, length + tokens, dtype=torch.bool, device=device).tril(length)
