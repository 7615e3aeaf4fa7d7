"""What scripts/gpu/check compares in 16 bits: numbers of GPUs in bfloat16 and float16 beside a CPU's in float32.

Both sides have the same inputs, rounded to 16 bits. Shapes: T tokens, B texts, H heads and K KV heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

import surgeon
from scripts.gpu.sides import Judge, Setup, Side, judge_error
from surgeon.machine import avoid_cudnn_attention
from surgeon.runtime.batching.blocks import BLOCK_TOKENS
from surgeon.runtime.batching.request import Row, Wanted
from surgeon.runtime.comm.collectives import Alone
from surgeon.runtime.kernels.triton import Placing, TextBlocks
from surgeon.runtime.kernels.triton.functions import TritonKernels
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.plan.checks import make_plan

# Relative errors up to these are let pass: of one kernel, which rounds its result, and of a model of two layers.
KERNEL_ERRORS = {"bfloat16": 8e-3, "float16": 1e-3}
MODEL_ERRORS = {"bfloat16": 5e-2, "float16": 7e-3}
LENGTHS = (1, 7, 64, 129)  # of prompts; every new one is a new shape to attention
KV_HEADS = 2
GROUP = 4
DIM = 128
TEXTS = (5, 70, 333)  # tokens in the cache of each text that attends
PROGRAMS = 24  # that attention is divided into: four for each text and KV head
PROMPTS, NEW = (21, 7), 6  # of texts whose next tokens are given


class Drawn:
    """Random tensors of one dtype, the same on both sides; kernels get them as they are, PyTorch in float32."""

    def __init__(self, dtype: str, device: str, kernels: TritonKernels | None) -> None:
        self.dtype = getattr(torch, dtype)
        self.device = device
        self.kernels = kernels
        self.generator = torch.Generator().manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        made = torch.randn(*shape, generator=self.generator).to(self.dtype)
        if self.kernels is None:
            return made.float()
        return made.to(self.device)

    def order(self, count: int) -> Tensor:
        """Numbers below `count`, shuffled."""
        return torch.randperm(count, generator=self.generator).to(self.device)


def attend(
    drawn: Drawn, window: int | None = None, softcap: float | None = None, sinks: bool = False
) -> Tensor:
    """Of the newest token of each text."""
    blocks = -(-max(TEXTS) // BLOCK_TOKENS)
    tables = drawn.order(len(TEXTS) * blocks).view(len(TEXTS), blocks)
    queries = drawn(len(TEXTS), KV_HEADS * GROUP, DIM)
    pair = drawn(2 * KV_HEADS, tables.numel() * BLOCK_TOKENS, DIM)
    sink = drawn(KV_HEADS * GROUP).float() if sinks else None
    if drawn.kernels is not None:
        newest = torch.tensor(TEXTS, device=drawn.device) - 1
        arrived = torch.zeros(len(TEXTS) * KV_HEADS, dtype=torch.int32, device=drawn.device)
        texts = TextBlocks(tables, newest, arrived)
        seen = None if window is None else (window, False)
        return drawn.kernels.attend(queries, pair, texts, BLOCK_TOKENS, None, seen, softcap, sink)
    found = []
    for table, tokens, query in zip(tables, TEXTS, queries, strict=True):
        at = torch.arange(0 if window is None else max(0, tokens - window), tokens)
        keys, values = pair[:, table[at // BLOCK_TOKENS] * BLOCK_TOKENS + at % BLOCK_TOKENS].chunk(2)
        scores = query.view(KV_HEADS, GROUP, DIM) @ keys.mT * DIM**-0.5
        if softcap is not None:
            scores = softcap * (scores / softcap).tanh()
        if sink is not None:  # one more score, of nothing
            scores = torch.cat([scores, sink.view(KV_HEADS, GROUP, 1)], -1)
        found.append((scores.softmax(-1)[..., : len(at)] @ values).flatten())
    return torch.stack(found)


def place(drawn: Drawn) -> Tensor:
    """Queries, keys and values of three tokens, as they are compared and kept."""
    heads = KV_HEADS * GROUP
    tokens = 3
    qkv = drawn(tokens, heads + 2 * KV_HEADS, DIM)
    gain = drawn(heads + KV_HEADS, DIM)
    cosine = drawn(tokens, 1, DIM)
    sine = drawn(tokens, 1, DIM)
    if drawn.kernels is not None:
        pair = drawn(2 * KV_HEADS, 11, DIM)
        places = torch.tensor([7, 0, 4], device=drawn.device)
        queries = drawn.kernels.place(qkv, heads, Placing(gain, 1e-6, (cosine, sine)), places, pair)
        return torch.cat([queries, pair[:, places].transpose(0, 1)], 1)
    compared = F.rms_norm(qkv[:, : heads + KV_HEADS], (DIM,), None, 1e-6) * gain
    turned = compared * cosine + compared.roll(DIM // 2, -1) * sine
    return torch.cat([turned, qkv[:, heads + KV_HEADS :]], 1)


def norm(drawn: Drawn) -> Tensor:
    """Of a sum, RMS."""
    width = 4096
    x = drawn(3, width)
    added = drawn(3, width)
    gain = drawn(width)
    if drawn.kernels is not None:
        return drawn.kernels.norm(x, gain, None, 1e-5, centred=False, added=added)[1]
    return F.rms_norm((x + added).to(drawn.dtype).float(), (width,), gain, 1e-5)


def gate(drawn: Drawn) -> Tensor:
    """SiLU of gates times values."""
    wide = drawn(3, 2 * 5000)
    if drawn.kernels is not None:
        made = drawn.kernels.gate_of("silu")
        assert made is not None
        return made(wide)
    gates, values = wide.chunk(2, -1)
    return F.silu(gates) * values


def product(drawn: Drawn) -> Tensor:
    """A matrix times two tokens."""
    x = drawn(2, 3000)
    weight = drawn(1001, 3000)
    bias = drawn(1001)
    if drawn.kernels is None:
        return F.linear(x, weight, bias)
    return drawn.kernels.product(x, weight, bias)


def highest(drawn: Drawn) -> Tensor:
    """Of a vocabulary, many of whose numbers are equal in 16 bits, and its place."""
    logits = drawn(2, 32001)
    best, places = logits.max(-1) if drawn.kernels is None else drawn.kernels.highest(logits)
    return torch.stack([best.float(), places.float()])


KERNELS: dict[str, Callable[[Drawn], Tensor]] = {
    "attend": attend,
    "attend, window": lambda drawn: attend(drawn, window=100),
    "attend, bound": lambda drawn: attend(drawn, softcap=2.0),
    "attend, sinks": lambda drawn: attend(drawn, sinks=True),
    "place": place,
    "norm": norm,
    "gate": gate,
    "product": product,
    "highest": highest,
}


def kernels_in_16_bits(setup: Setup, side: Side) -> Iterator[tuple[str, Any]]:
    """Each kernel of ours alone; on the CPU the same by PyTorch."""
    kernels = None
    if side == "found":
        kernels = TritonKernels()
        kernels.programs = PROGRAMS
    for dtype in KERNEL_ERRORS:
        for name, compute in KERNELS.items():
            yield f"{name} in {dtype}", compute(Drawn(dtype, setup.on(side), kernels)).float().tolist()


def attention_in_16_bits(setup: Setup, side: Side) -> Iterator[tuple[str, Any]]:
    """PyTorch's attention: the wide model's logits behind prompts of several lengths, padded to one length, too."""
    device = setup.on(side)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = surgeon.load(setup.wide, dtype=dtype, device_map=None if device == "cpu" else device)
    ids = token_ids(model, 2, max(LENGTHS))
    found = [logits_of(model, ids[:, :length])[:, -1] for length in LENGTHS]
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    found.append(logits_of(model, ids, attention_mask=mask.to(model.device))[:, -1])
    yield "attention in bfloat16", torch.stack(found).tolist()


def passes_in_16_bits(setup: Setup, side: Side) -> Iterator[tuple[str, Any]]:
    """The wide model's logits of given tokens behind a prompt: by transformers at once, by the runtime one by one."""
    avoid_cudnn_attention()  # as ranks do
    model = surgeon.load(setup.wide, dtype=torch.float32)
    ids = token_ids(model, len(PROMPTS), max(PROMPTS) + NEW)
    for dtype in MODEL_ERRORS:
        if side == "expected":
            behind = [
                logits_of(model, ids[[text], : prompt + NEW])[0, prompt:]
                for text, prompt in enumerate(PROMPTS)
            ]
            yield f"passes in {dtype}", torch.stack(behind, 1).tolist()
        else:
            yield f"passes in {dtype}", _decoded(setup, ids.tolist(), dtype).tolist()


def _decoded(setup: Setup, ids: list[list[int]], dtype: str) -> Tensor:
    """Logits of passes that add a given token to each text, (NEW, texts, vocabulary)."""
    plan = make_plan(
        setup.wide, 1, max(PROMPTS) + NEW, None, setup.device, dtype=dtype, decoding=setup.ways[-1]
    )
    engine = RankEngine(plan, Alone(), torch.device(setup.device))
    blocks = -(-(max(PROMPTS) + NEW) // BLOCK_TOKENS)
    cache = engine.reusable_cache(blocks * len(PROMPTS))
    found = []
    tables = [([(text * blocks, blocks)],) for text in range(len(PROMPTS))]
    prompts = [
        Row(0, ids[text][:prompt], tables[text], Wanted.BEST) for text, prompt in enumerate(PROMPTS)
    ]
    engine.step(prompts, cache)
    for new in range(NEW):
        rows = [
            Row(prompt + new, [ids[text][prompt + new]], tables[text], Wanted.LOGITS)
            for text, prompt in enumerate(PROMPTS)
        ]
        logits = engine.step(rows, cache).logits
        assert logits is not None
        found.append(logits.float().cpu().clone())
    return torch.stack(found)


def rows_in_16_bits() -> dict[str, dict[str, Judge]]:
    """The rows of these three, and how each is judged."""
    return {
        "kernels": {
            f"{name} in {dtype}": judge_error(most)
            for dtype, most in KERNEL_ERRORS.items()
            for name in KERNELS
        },
        "attention": {"attention in bfloat16": judge_error(MODEL_ERRORS["bfloat16"])},
        "passes": {f"passes in {dtype}": judge_error(most) for dtype, most in MODEL_ERRORS.items()},
    }


@torch.no_grad()
def logits_of(model: PreTrainedModel, ids: Tensor, **more: Any) -> Tensor:
    """Of all tokens, on the CPU in float32."""
    found: Tensor = model(input_ids=ids, use_cache=False, **more).logits
    return found.float().cpu()


def token_ids(model: PreTrainedModel, texts: int, tokens: int) -> Tensor:
    """Random token ids where the model takes them, the same on both sides."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(model.config.vocab_size, (texts, tokens), generator=generator).to(model.device)
