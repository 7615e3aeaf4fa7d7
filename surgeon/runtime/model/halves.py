"""Passes in two halves that take turns, so that one computes while the other's reductions are on their way.

It is a schedule of the executor (`in_turn`), not a program: the same steps, of half of the tokens at a time.
Collectives are twice as many, of half the bytes each, and weights are read twice: it pays where reductions take long,
and for prompts, which are limited by computing rather than reading. Each half has about as many tokens as the other. A
text may go into both: its later tokens look at keys and values that its earlier ones have left in the cache just
before, step by step.

A token gets the same numbers to the bit wherever these do not depend on how many others are computed with it. Products
and attention of the kernels for CPUs (runtime/kernels) do not; a text is never cut so that one token of it is left
alone, as single tokens are attended to in another way. PyTorch's own operations may round otherwise for other numbers
of tokens (products; activations of widths that are no multiple of 16), gloo adds up what four or more ranks have in
another order, and how ranks share factors and experts may differ by the number of tokens (auto); then halves give to
the bit what the same tokens give as two passes one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from surgeon.runtime.batching.sequence import Row, halves_of
from surgeon.runtime.model.dynamic import DynamicPasses
from surgeon.runtime.model.paged_cache import PagedCache
from surgeon.runtime.model.paged_layout import as_index


class HalvedPasses(DynamicPasses):
    """Computes any pass that has two halves."""

    def fits(self, rows: Sequence[Row]) -> bool:
        """Whether there are two halves of it."""
        return halves_of(rows) is not None

    def stream(self, rows: Sequence[Row], cache: PagedCache, places: list[int] | None = None) -> Tensor:
        """The stream after the program, (tokens, hidden), of the rows' tokens or of those at some places."""
        halves = halves_of(rows)
        assert halves is not None, "rows without two halves fit no such pass"
        self.model.counts.halved += 1
        tokens, _, passes = zip(*(self.laid_out(half, cache) for half in halves), strict=True)
        spans = [slice(row.start, row.start + len(row.tokens)) for row in rows]
        embedded = self.model.embedded(torch.cat(tokens), as_index(spans, self.model.device))
        sizes = [len(half) for half in tokens]
        taking_turns = [replace(one, parts=len(passes)) for one in passes]
        if places is None:
            return torch.cat(self.model.streams_after(embedded.split(sizes), taking_turns))
        order = sorted(places)
        few = [[at for at in order if at < sizes[0]], [at - sizes[0] for at in order if at >= sizes[0]]]
        stream = torch.cat(self.model.streams_after(embedded.split(sizes), taking_turns, places=few))
        if order == places:
            return stream
        return stream[[order.index(at) for at in places]]
