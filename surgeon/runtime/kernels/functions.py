"""The kernels as functions of tensors; they compute what PyTorch's operations in runtime/model compute.

Shapes: T tokens of a pass, H heads and K KV heads of a slice, D head_dim.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from ctypes import CDLL, c_float, c_int64, c_void_p, cast
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from surgeon.machine import usable_cores
from surgeon.models.routing import Routed, Routing
from surgeon.runtime.kernels.build import load_kernels, used_on

if TYPE_CHECKING:
    from surgeon.runtime.kernels.triton.functions import TritonKernels

FEW = 2  # tokens that Triton's product takes; for more of them cuBLAS is as fast (an H100, 4 tokens)
GATED = {
    "silu": "gated_silu",
    "swish": "gated_silu",
    "gelu_new": "gated_tanh_gelu",
    "gelu_pytorch_tanh": "gated_tanh_gelu",
}  # by what transformers calls the activation


KINDS = {"p": c_void_p, "n": c_int64, "f": c_float}
# What functions take, in order: pointers, numbers, floats.
RECORDABLE = {
    "product": "pnnppnnp",
    "rms_norm": "ppfnnp",
    "place": "pnnnnpfppnpn",
    "mean_squares": "pnnnnp",
    "gated_silu": "pnnp",
    "gated_tanh_gelu": "pnnp",
    "route": "pnnpnnnfnnnpp",
    "mixture": "pnnppnnnpnnnffp",
    "keep": "pnnnnppn",
    "attend": "pnnnnnpnppffpp",
    "add": "ppnp",
    "scale": "pfnp",
    "copy_rows": "pnnnpn",
    "softcap": "pfnn",
    "take_rows": "pnnnpnp",
    "take_packed_rows": "pnnnpnp",
    "start_exchange": "ppn",
    "finish_sum": "pnnp",
    "finish_gather": "pnnp",
}
OTHERS = {
    "set_threads": "n",
    "attend_text": "pnnnnnpnpnnnnffpp",
    "highest": "pnnpp",
    "replay": "pnp",
}
ARGUMENTS = 16  # that a line of a table has room for, as in replay.h

Call = tuple[str, tuple[Any, ...]]


# The `Recording` that takes in a thread's calls, if any.
NOTES: ContextVar[Any] = ContextVar("notes", default=None)


@contextmanager
def note_calls(notes: Any) -> Iterator[None]:
    """Have this thread's calls noted besides being made; nowhere for None."""
    before = NOTES.set(notes)
    try:
        yield
    finally:
        NOTES.reset(before)


def _word(kind: str, argument: Any) -> int:
    if kind == "f":
        return int.from_bytes(struct.pack("<f", argument), "little")
    if argument is None:
        return 0
    return int(argument)


@cache
def kernels() -> Kernels | None:
    """Load the kernels; None where they cannot be compiled (`build.built` says why).

    None, too, where this thread is bound to fewer cores than PyTorch has threads, as vLLM binds each of its threads to
    one: new threads would all be on this one's.
    """
    library = load_kernels().library
    if library is None or usable_cores() < torch.get_num_threads():
        return None
    made = Kernels(library)
    made.use_threads(torch.get_num_threads())
    return made


def kernels_for(tensor: Tensor) -> Kernels | None:
    """Give the kernels, if they compute with tensors like this one: float32 on CPUs."""
    if tensor.device.type == "cpu" and tensor.dtype == torch.float32:
        return kernels()
    return None


@cache
def _triton_kernels() -> TritonKernels:
    from surgeon.runtime.kernels.triton.functions import TritonKernels  # on GPUs only

    return TritonKernels()


def triton_kernels_for(tensor: Tensor) -> TritonKernels | None:
    """Give the kernels, if they compute with tensors like this one."""
    if used_on(tensor.device.type) and tensor.is_floating_point():
        return _triton_kernels()
    return None


class Window(NamedTuple):
    """The tokens that an attention looks at, where not all up to a token itself.

    Attributes:
        tokens: how many at most, the token itself the last of them.
        chunked: whether none before the last position that is a multiple of so many.
    """

    tokens: int
    chunked: bool = False

    def first(self, end: int) -> int:
        """The first position that the last of so many tokens of a text looks at."""
        if self.chunked:
            return (end - 1) // self.tokens * self.tokens
        return max(0, end - self.tokens)

    @staticmethod
    def within(window: Window | None, tokens: int) -> Window | None:
        """The window, or None where texts of so many tokens are no longer than it."""
        if window is None or window.tokens >= tokens:
            return None
        return window


@dataclass(frozen=True)
class Weighting:
    """An attention's weights of values, besides the softmax.

    Attributes:
        scale: of products of queries and keys; None for 1 / sqrt(D).
        window: None for all tokens up to a token itself.
        softcap: the bound c of scores that are c * tanh(score / c); None without one.
        sinks: one more score of each head, whose weight no value has (gpt-oss), (H,) of float32; None without them.
    """

    scale: float | None = None
    window: Window | None = None
    softcap: float | None = None
    sinks: Tensor | None = field(default=None, compare=False)

    def factor(self, dim: int) -> float:
        """The scale for heads of so many features."""
        if self.scale is None:
            return float(dim**-0.5)
        return self.scale


class Runs(NamedTuple):
    """Places of a cache that one token of each of some texts reads.

    Attributes:
        runs: first place and number of places of each run, (all runs, 2), int64.
        ends: how many runs there are up to the end of each text, (texts,), int64.
    """

    runs: Tensor
    ends: Tensor


class TextKeys(NamedTuple):
    """Places of a cache that consecutive tokens of one text read.

    Attributes:
        runs: first place and number of places of each run, (runs, 2), int64.
        first_key: position of the first key in them.
        start: position of the first of the tokens.
        window: how many keys a token looks at, itself the last; None for all up to itself.
    """

    runs: Tensor
    first_key: int
    start: int
    window: int | None


class PackedExperts(NamedTuple):
    """Experts of a mixture with numbers from `first` on, as the kernels read them.

    Attributes:
        table: of each, the addresses of its gates and values side by side as a weight in panels, of their bias, of the
            weight in panels that writes to the stream, and of its bias, (experts, 4), int64; 0 for no bias.
        kept: the tensors at these addresses.
        neurons: of each.
        activation: of gates, one of GATED.
        clamped: alpha and limit of gates that are clamped (gpt-oss), in place of an activation.
    """

    first: int
    table: Tensor
    kept: tuple[Tensor, ...]
    neurons: int
    activation: str
    clamped: tuple[float, float] | None = None


class Kernels:
    """All functions want float32 tensors on the CPU whose last dimension lies side by side."""

    def __init__(self, library: CDLL) -> None:
        self._functions = {name: getattr(library, name) for name in RECORDABLE | OTHERS}
        for name, arguments in (RECORDABLE | OTHERS).items():
            self._functions[name].argtypes = [KINDS[kind] for kind in arguments]
            self._functions[name].restype = None
        self._recorded = {
            name: cast(getattr(library, f"recorded_{name}"), c_void_p).value or 0 for name in RECORDABLE
        }

    def call(self, name: str, *arguments: Tensor | float | None) -> None:
        """Call a function; tensors stand for the addresses of their numbers."""
        numbers = [one.data_ptr() if isinstance(one, Tensor) else one for one in arguments]
        self._functions[name](*numbers)
        if (notes := NOTES.get()) is not None:
            notes.note(name, *numbers)

    def table(self, calls: Sequence[Call]) -> Tensor:
        """The calls as C++ goes through them, (calls, 1 + ARGUMENTS), int64."""
        lines = list[list[int]]()
        for name, arguments in calls:
            words = [_word(kind, one) for kind, one in zip(RECORDABLE[name], arguments, strict=True)]
            lines.append([self._recorded[name], *words, *[0] * (ARGUMENTS - len(words))])
        return torch.tensor(lines, dtype=torch.int64).view(-1, 1 + ARGUMENTS)

    def use_threads(self, threads: int) -> None:
        self.call("set_threads", threads)

    def product(self, x: Tensor, panels: Tensor, outputs: int, bias: Tensor | None) -> Tensor:
        """Tokens, (T, inputs), times a weight that lies in panels: (T, outputs).

        Args:
            panels: of 64 outputs each, (inputs, 64), one after the other; the last has those that are left, up to a
                multiple of 16.
            bias: (outputs,), of one piece.
        """
        tokens, inputs = x.shape
        y = x.new_empty(tokens, outputs)
        self.call("product", x, tokens, x.stride(0), panels, bias, inputs, outputs, y)
        return y

    def rms_norm(self, x: Tensor, gain: Tensor, epsilon: float) -> Tensor:
        """RMS norm of a stream, (T, h)."""
        x = x.contiguous()
        y = torch.empty_like(x)
        self.call("rms_norm", x, gain, epsilon, *x.shape, y)
        return y

    def place_(
        self,
        x: Tensor,
        gain: Tensor | None,
        epsilon: float,
        angles: tuple[Tensor, Tensor] | None,
        squares: Tensor | None = None,
        queries: int = 0,
    ) -> None:
        """Queries or keys, (T, heads, D), normed by head and turned, in place, as far as there is such.

        Args:
            gain: (heads, D), of one piece.
            angles: cosine and signed sine, (T, 1, up to D) each.
            squares: mean squares of all queries and of all keys, (T, 2) of one piece, in place of those of each head.
            queries: how many heads are queries', in front of those of keys.
        """
        cosine, sine = (
            (None, None) if angles is None else (angles[0].contiguous(), angles[1].contiguous())
        )
        width = 0
        if cosine is not None:
            width = cosine.shape[-1]
        tokens, heads, dim = x.shape
        self.call(
            "place",
            x,
            tokens,
            x.stride(0),
            heads,
            dim,
            gain,
            epsilon,
            cosine,
            sine,
            width,
            squares,
            queries,
        )

    def mean_squares(self, x: Tensor, first: int, second: int) -> Tensor:
        """Mean squares of so many numbers of each token, (T, any), and of the ones behind them: (T, 2)."""
        y = x.new_empty(len(x), 2)
        self.call("mean_squares", x, len(x), x.stride(0), first, second, y)
        return y

    def gate_of(self, activation: str) -> Callable[[Tensor], Tensor] | None:
        """A function to activated gates times values, (T, width), of both, (T, 2 * width); None for no such kernel."""
        if activation not in GATED:
            return None
        name = GATED[activation]

        def gate(wide: Tensor) -> Tensor:
            wide = wide.contiguous()
            tokens = wide.shape[0]
            width = wide.shape[-1] // 2
            y = wide.new_empty(tokens, width)
            self.call(name, wide, tokens, width, y)
            return y

        return gate

    def route(self, logits: Tensor, routing: Routing, correction: Tensor | None) -> Routed:
        """Route as `surgeon.models.routing.route`, to experts as int32; logits are (T, E) of one piece."""
        tokens, experts = logits.shape
        chosen = routing.count_chosen(experts)
        numbers = logits.new_empty(tokens, chosen).view(torch.int32)
        weights = logits.new_empty(tokens, chosen)
        self.call(
            "route",
            logits,
            tokens,
            experts,
            correction,
            chosen,
            routing.scores == "sigmoid",
            routing.divides,
            routing.scale,
            routing.groups,
            routing.top_groups,
            routing.group_best,
            numbers,
            weights,
        )
        return Routed(numbers, weights)

    def mixture(self, x: Tensor, routed: Routed, experts: PackedExperts) -> Tensor:
        """The weighted sum of what some experts make of tokens, (T, h); 0 of tokens that are sent to none of them.

        Args:
            routed: experts as int32.
        """
        tokens, hidden = x.shape
        y = x.new_empty(tokens, hidden)
        alpha, limit = experts.clamped or (0.0, 0.0)
        if experts.clamped:
            activation = 2
        else:
            activation = int(GATED[experts.activation] != "gated_silu")
        self.call(
            "mixture",
            x,
            tokens,
            x.stride(0),
            routed.experts,
            routed.weights,
            routed.experts.shape[1],
            experts.first,
            len(experts.table),
            experts.table,
            hidden,
            experts.neurons,
            activation,
            alpha,
            limit,
            y,
        )
        return y

    def softcap_(self, x: Tensor, bound: float) -> None:
        """Press numbers, (T, any) of one piece, between -bound and bound in place: bound * tanh(x / bound)."""
        self.call("softcap", x, bound, *x.shape)

    def rows(self, table: Tensor, numbers: Tensor, first: int = 0) -> Tensor:
        """Some rows of a table, (rows, width) of one piece: (numbers, width).

        Args:
            numbers: of the rows, int64; for those that none has there are zeros.
            first: the number of the first row.
        """
        numbers = numbers.contiguous()
        count = numbers.shape[0]
        (rows, width) = table.shape
        y = table.new_empty(count, width)
        self.call("take_rows", table, first, rows, width, numbers, count, y)
        return y

    def packed_rows(
        self, panels: Tensor, shape: tuple[int, int], numbers: Tensor, first: int = 0
    ) -> Tensor:
        """Rows of a table, (rows, width), that lies in panels as a weight with so many outputs and inputs does."""
        numbers = numbers.contiguous()
        count = numbers.shape[0]
        (rows, width) = shape
        y = panels.new_empty(count, width)
        self.call("take_packed_rows", panels, first, rows, width, numbers, count, y)
        return y

    def highest(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The highest number of each row, (T,), of (T, any) of one piece, and its place; NaN if there is any."""
        best = x.new_empty(len(x))
        places = x.new_empty(len(x), dtype=torch.int64)
        self.call("highest", x, *x.shape, best, places)
        return best, places

    def keep(self, kept: Tensor, places: Tensor, pair: Tensor) -> None:
        """Put keys and values, (T, 2 * K, D), into places (T,) of an attention's cache, (2 * K, places, D).

        Those whose place is below 0 are left out.
        """
        tokens, heads, dim = kept.shape
        self.call("keep", kept, tokens, kept.stride(0), heads, dim, places, pair, pair.stride(0))

    def attend(self, queries: Tensor, pair: Tensor, read: Runs, scoring: Weighting) -> Tensor:
        """Attended values, (texts, H * D), of one token of each, (texts, H, D), over a cache, (2 * K, places, D)."""
        texts, heads, dim = queries.shape
        y = queries.new_empty(texts, heads * dim)
        self.call(
            "attend",
            queries,
            queries.stride(0),
            texts,
            heads,
            len(pair) // 2,
            dim,
            pair,
            pair.stride(0),
            read.runs,
            read.ends,
            scoring.factor(dim),
            scoring.softcap or 0.0,
            scoring.sinks,
            y,
        )
        return y

    def attend_text(self, queries: Tensor, pair: Tensor, text: TextKeys, scoring: Weighting) -> Tensor:
        """Attended values, (T, H * D), of consecutive tokens of a text, (T, H, D), over a cache, (2 * K, places, D)."""
        tokens, heads, dim = queries.shape
        y = queries.new_empty(tokens, heads * dim)
        self.call(
            "attend_text",
            queries,
            queries.stride(0),
            tokens,
            heads,
            len(pair) // 2,
            dim,
            pair,
            pair.stride(0),
            text.runs,
            len(text.runs),
            text.first_key,
            text.start,
            text.window or 0,
            scoring.factor(dim),
            scoring.softcap or 0.0,
            scoring.sinks,
            y,
        )
        return y
