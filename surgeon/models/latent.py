"""The sizes of multi-head latent attention (DeepSeek-V2, section 2.1).

Keys and values of all heads are made of one small latent of a token, queries of another one or of the stream.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Latent:
    """The sizes of latent attentions.

    Attributes:
        heads: of an attention.
        width: features of a query or key.
        turned: how many of them turn with positions.
        value: features of a value; no more than `width`.
        rank: features of the latent that keys and values are made of.
        query_rank: of the one that queries are made of; None where they are made of the stream.
        neighbours: whether neighbouring features turn as pairs.
    """

    heads: int
    width: int
    turned: int
    value: int
    rank: int
    query_rank: int | None
    neighbours: bool

    def share(self, piece: tuple[int, int] | None) -> slice:
        """The heads of a slice, (index, count)."""
        index, count = piece or (0, 1)
        return slice(self.heads * index // count, self.heads * (index + 1) // count)

    def shapes(self, hidden: int) -> dict[str, tuple[int, ...]]:
        """Of an attention's matrices, on a stream of so many features, and of its latents' norms, by their modules."""
        made = self.heads * self.width
        expanded = self.heads * (self.width - self.turned + self.value)
        found: dict[str, tuple[int, ...]] = {
            "kv_a_proj_with_mqa": (self.rank + self.turned, hidden),
            "kv_a_layernorm": (self.rank,),
            "kv_b_proj": (expanded, self.rank),
            "o_proj": (hidden, self.heads * self.value),
        }
        if self.query_rank is None:
            return found | {"q_proj": (made, hidden)}
        through = {"q_a_proj": (self.query_rank, hidden), "q_a_layernorm": (self.query_rank,)}
        return found | through | {"q_b_proj": (made, self.query_rank)}

    def products(self, hidden: int, heads: int) -> dict[str, tuple[int, int]]:
        """The matrices, (out_features, in_features), that ranks multiply with for so many heads of theirs.

        What reads the stream is one matrix, and values are as wide as keys.
        """
        queries = heads * self.width
        expanded = heads * (self.width - self.turned + self.value)
        found = {"latents": (self.rank + self.turned + (self.query_rank or queries), hidden)}
        if self.query_rank is not None:
            found["q"] = (queries, self.query_rank)
        return found | {"k v": (expanded, self.rank), "o": (hidden, heads * self.width)}
