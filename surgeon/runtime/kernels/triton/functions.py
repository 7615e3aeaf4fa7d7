"""The kernels for GPUs as functions of tensors, which compute what PyTorch's operations in runtime/model compute.

Shapes: T tokens of a pass, B texts, H heads and K KV heads of a slice, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from surgeon.runtime.kernels.triton import Placing, TextBlocks

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "tanh_gelu",
    "gelu_pytorch_tanh": "tanh_gelu",
    "relu": "relu",
}  # of gates, by what transformers calls them
# Bytes of keys that a program of `attend` has in shared memory at a time, and as many of values.
TILE_BYTES = 16384
# Keys at a time; a product of matrices has 16 rows and columns at least
LEAST = 16
MOST_TOKENS = 64
MOST_PARTS = 64  # of the keys of a text
PROGRAMS_PER_PROCESSOR = 2  # that attention is divided into, where texts and heads are fewer
COLUMNS = 1024  # of a program of `gate`
HEADS_AT_ONCE = 16  # of a program of `place`, where there are programs enough
# At a time, where they divide inputs; else the last ones
FEW_COLUMNS = (2048, 1024)
FEW_WARPS = (2, 4)
# Of a program of `product_of_few`; interpreted, each program takes its time
ROWS = 2
INTERPRETED_ROWS = 256
PART = 2048  # numbers of which a program of `highest_of_parts` finds the highest
OVERLAPS_FROM = 9  # compute capability whose kernels can start while others end


class TritonKernels:
    """All functions want floating-point tensors of one dtype whose last dimension lies side by side.

    Attributes:
        programs: that attention is divided into.
    """

    def __init__(self) -> None:
        from triton import knobs  # not everywhere installed

        from surgeon.runtime.kernels.triton import source

        self._source: Any = source
        self._interpreted = bool(knobs.runtime.interpret)  # TRITON_INTERPRET=1
        processors = 1
        if not self._interpreted:
            processors = torch.cuda.get_device_properties().multi_processor_count
        self.programs = PROGRAMS_PER_PROCESSOR * processors
        self._rows = INTERPRETED_ROWS if self._interpreted else ROWS
        overlaps = not self._interpreted and torch.cuda.get_device_capability()[0] >= OVERLAPS_FROM
        self._launching: dict[str, object] = {"OVERLAPS": overlaps}
        if overlaps:
            self._launching["launch_pdl"] = True

    def launch(
        self, name: str, grid: tuple[int, ...], arguments: tuple[object, ...], **constants: object
    ) -> None:
        """Start a kernel; a grid with nothing in it starts none."""
        if 0 not in grid:
            getattr(self._source, name)[grid](*arguments, **constants, **self._launching)

    def attend(
        self,
        queries: Tensor,
        pair: Tensor,
        texts: TextBlocks,
        block_tokens: int,
        scale: float | None = None,
        window: tuple[int, bool] | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """Attended values, (B, H * D), of one token of each text, (B, H, D), over a cache, (2 * K, places, D).

        Args:
            scale, window, softcap, sinks: as of `Weighting`.
        """
        count, heads, dim = queries.shape
        kv_heads = len(pair) // 2
        group = heads // kv_heads
        padded = max(LEAST, _next_power_of_two(dim))
        tokens = min(MOST_TOKENS, max(LEAST, TILE_BYTES // (padded * pair.element_size())))
        wanted = min(MOST_PARTS, -(-self.programs // max(1, count * kv_heads)))
        parts = max(1, min(wanted, -(-texts.tables.shape[1] * block_tokens // tokens)))
        out = queries.new_empty(count, heads * dim)
        sums = queries.new_empty(count, kv_heads, parts, group, dim, dtype=torch.float32)
        totals = queries.new_empty(count, kv_heads, parts, 2, group, dtype=torch.float32)
        self.launch(
            "attend",
            (count, kv_heads, parts),
            (
                *(queries, pair, *texts, out, sums, totals, totals if sinks is None else sinks),
                *(dim**-0.5 if scale is None else scale, softcap or 0.0, (window or (0, False))[0]),
                *(queries.stride(0), pair.stride(0), texts.tables.stride(0), texts.newest.stride(0)),
            ),
            KV_HEADS=kv_heads,
            GROUP=group,
            HEADS_PADDED=max(LEAST, _next_power_of_two(group)),
            DIM=dim,
            DIM_PADDED=padded,
            BLOCK=block_tokens,
            TOKENS=tokens,
            PARTS=parts,
            WINDOWED=window is not None,
            CHUNKED=window is not None and window[1],
            CAPPED=softcap is not None,
            SUNK=sinks is not None,
            # The interpreter multiplies no bfloat16.
            IN_FLOAT32=self._interpreted or pair.dtype == torch.float32,
        )
        return out

    def place(self, qkv: Tensor, heads: int, placing: Placing, places: Tensor, pair: Tensor) -> Tensor:
        """Queries, (T, H, D), as they are compared; keys and values are put into places of an attention's cache.

        Args:
            qkv: queries, keys and values, (T, H + 2 * K, D).
            places: (T,), int64.
            pair: (2 * K, places, D).
        """
        queries = qkv.new_empty(len(qkv), heads, qkv.shape[2])
        self._place(qkv, queries, placing, heads, (places, pair))
        return queries

    def place_(self, x: Tensor, placing: Placing, queries: int) -> None:
        """Queries and keys, (T, heads, D), normed and turned where they are.

        Args:
            queries: how many of the heads are theirs.
        """
        self._place(x, x, placing, queries)

    def keep(self, kept: Tensor, places: Tensor, pair: Tensor) -> None:
        """Put keys and values, (T, 2 * K, D), into places (T,) of an attention's cache, (2 * K, places, D)."""
        self._place(kept, kept, Placing(None, 0.0, None), 0, (places, pair))

    def _place(
        self,
        x: Tensor,
        turned: Tensor,
        placing: Placing,
        queries: int,
        cached: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        tokens, all_heads, dim = x.shape
        places, pair = (x, x) if cached is None else cached
        gain, epsilon, angles, squares = placing
        tile = 1
        if tokens * all_heads > HEADS_AT_ONCE * self.programs:
            tile = HEADS_AT_ONCE
        self.launch(
            "place",
            (tokens, -(-all_heads // tile)),
            (
                *(x, turned, pair, places, x if gain is None else gain, *(angles or (x, x))),
                *(x if squares is None else squares, epsilon),
                *(x.stride(0), turned.stride(0), pair.stride(0)),
            ),
            HEADS=all_heads if cached is None else queries,
            KV_HEADS=0 if cached is None else len(pair) // 2,
            DIM=dim,
            DIM_PADDED=_next_power_of_two(dim),
            TURNED=0 if angles is None else angles[0].shape[-1],
            NORMED=gain is not None,
            TOGETHER=squares is not None,
            OF_QUERIES=queries,
            TILE=tile,
        )

    def mean_squares(self, qkv: Tensor, queries: int, keys: int) -> Tensor:
        """Mean squares of so many features of queries, and of the keys' behind them, of (T, all features): (T, 2)."""
        squares = qkv.new_empty(len(qkv), 2, dtype=torch.float32)
        self.launch(
            "mean_squares",
            (len(qkv), 2),
            (qkv, squares, qkv.stride(0)),
            QUERIES=queries,
            KEYS=keys,
            PADDED=_next_power_of_two(max(queries, keys)),
        )
        return squares

    def norm(
        self,
        x: Tensor,
        gain: Tensor,
        shift: Tensor | None,
        epsilon: float,
        centred: bool,
        added: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """A stream, (T, h), with another one added if there is one, and its norm.

        Args:
            shift: added to the normed stream, if any.
            centred: whether it is a layer norm.
        """
        tokens, width = x.shape
        normed = x.new_empty(tokens, width)
        total = x
        if added is not None:
            total = x.new_empty(tokens, width)
        more = x if added is None else added
        self.launch(
            "norm",
            (tokens,),
            (
                x,
                more,
                total,
                normed,
                gain,
                gain if shift is None else shift,
                epsilon,
                x.stride(0),
                more.stride(0),
            ),
            WIDTH=width,
            WIDTH_PADDED=_next_power_of_two(width),
            ADDS=added is not None,
            CENTRED=centred,
            SHIFTED=shift is not None,
            num_warps=8 if width > COLUMNS else 4,
        )
        return total, normed

    def product(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor | None = None
    ) -> Tensor:
        """Inputs, (up to FEW tokens, in_features), times a weight, (out_features, in_features), of one piece.

        Args:
            bias: (out_features,), added.
            out: where to write it.
        """
        tokens, inputs = x.shape
        y = x.new_empty(tokens, len(weight)) if out is None else out
        way = 0 if inputs % FEW_COLUMNS[0] == 0 else 1
        self.launch(
            "product_of_few",
            (-(-len(weight) // self._rows),),
            (
                x,
                weight,
                weight if bias is None else bias,
                y,
                len(weight),
                inputs,
                x.stride(0),
                y.stride(0),
            ),
            TOKENS=tokens,
            ROWS=self._rows,
            COLUMNS=min(FEW_COLUMNS[way], _next_power_of_two(inputs)),
            BIASED=bias is not None,
            num_warps=FEW_WARPS[way],
        )
        return y

    def highest(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The highest number of each row, (T,), of (T, any), and its place, the first one; infinite if one is NaN."""
        tokens, width = x.shape
        parts = -(-width // PART)
        values = x.new_empty(tokens, parts, dtype=torch.float32)
        at = x.new_empty(tokens, parts, dtype=torch.int32)
        best = x.new_empty(tokens)
        places = x.new_empty(tokens, dtype=torch.int64)
        self.launch(
            "highest_of_parts",
            (tokens, parts),
            (x, values, at, x.stride(0), width),
            PARTS=parts,
            COLUMNS=PART,
        )
        self.launch(
            "highest_part",
            (tokens,),
            (values, at, best, places),
            PARTS=parts,
            PARTS_PADDED=_next_power_of_two(parts),
        )
        return best, places

    def gate_of(self, activation: str) -> Callable[[Tensor], Tensor] | None:
        """A function to activated gates times values, (T, width), of both, (T, 2 * width); None for no such kernel."""
        if activation not in ACTIVATIONS:
            return None

        def gate(wide: Tensor) -> Tensor:
            tokens = wide.shape[0]
            width = wide.shape[1] // 2
            y = wide.new_empty(tokens, width)
            self.launch(
                "gate",
                (tokens, -(-width // COLUMNS)),
                (wide, y, wide.stride(0), width),
                ACTIVATION=ACTIVATIONS[activation],
                COLUMNS=COLUMNS,
            )
            return y

        return gate


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
