"""Decoding for scripts/gpu/check: random models, the memory's bandwidth, and passes on one rank in this process."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from surgeon.benchmarks.drafting import decode_together
from surgeon.language.program import Program
from surgeon.runtime.batching.request import Sampling
from surgeon.runtime.batching.sequence import Row, Wanted
from surgeon.runtime.batching.windows import PASS_TOKENS, blocks_for
from surgeon.runtime.comm.collectives import Alone
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.model.layers import Attention
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.specification import Decoding, Plan
from surgeon.runtime.worker.ranks import Ranks
from surgeon.runtime.worker.worker import load

CHECKED = "checked"  # a plan's name on ranks
BANDWIDTH_BYTES = 2 << 30  # of one tensor; far more than any cache holds


def llama(
    hidden: int, neurons: int, layers: int, heads: int, kv_heads: int, head_dim: int, vocabulary: int
) -> LlamaConfig:
    """A Llama with tied embeddings."""
    return LlamaConfig(
        hidden_size=hidden,
        intermediate_size=neurons,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocabulary,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )


def fused(config: LlamaConfig) -> LlamaConfig:
    """Every two layers as one twice as wide, as `surgeon export` fuses pairs."""
    return llama(
        config.hidden_size,
        2 * config.intermediate_size,
        config.num_hidden_layers // 2,
        2 * config.num_attention_heads,
        2 * config.num_key_value_heads,
        config.head_dim,
        config.vocab_size,
    )


LARGE = llama(3072, 8192, 28, 24, 8, 128, 128256)  # the shape of Llama 3.2 3B
MIDDLE = llama(2048, 8192, 16, 32, 8, 64, 128256)  # of Llama 3.2 1B
SMALL = llama(64, 160, 4, 4, 2, 16, 512)


@dataclass(frozen=True)
class Load:
    """Texts, the tokens of each prompt, and how many are added to each."""

    batch: int
    prompt: int
    new: int

    @property
    def tokens(self) -> int:
        return self.prompt + self.new

    @property
    def blocks(self) -> int:
        """Of the cache, for each text."""
        return blocks_for(self.tokens)

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """Random token ids, the same every time."""
        generator = torch.Generator().manual_seed(0)
        found: list[list[int]] = torch.randint(
            vocabulary, (self.batch, self.prompt), generator=generator
        ).tolist()
        return found


def make_model(folder: Path, config: LlamaConfig, device: str) -> Path:
    """Write a random checkpoint in bfloat16; made on the device, which is fast on a GPU."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def synchronise(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def bandwidth(device: str, size: int) -> float:
    """Bytes per second of the faster of two: a copy, which reads and writes, and a sum, which reads."""
    source = torch.ones(size // 4, device=device)
    target = torch.empty_like(source)
    return max(
        2 * source.nbytes / shortest(lambda: target.copy_(source), device),
        source.nbytes / shortest(source.sum, device),
    )


def shortest(operation: Callable[[], object], device: str, rounds: int = 10, calls: int = 5) -> float:
    """Seconds of an operation in the best of some rounds."""
    found = []
    operation()
    for _ in range(rounds):
        synchronise(device)
        began = time.perf_counter()
        for _ in range(calls):
            operation()
        synchronise(device)
        found.append((time.perf_counter() - began) / calls)
    return min(found)


def open_engine(
    folder: Path, load: Load, device: str, decoding: Decoding, program: Program | None = None
) -> RankEngine:
    """One rank with all of a model."""
    text = None if program is None else str(program)
    plan = make_plan(folder, 1, load.tokens, text, device, decoding=decoding)
    return RankEngine(plan, Alone(), torch.device(device))


def continued(engine: RankEngine, texts: Load) -> tuple[list[list[int]], list[float]]:
    """New tokens of every text, and the seconds of every decode pass."""
    prompts = texts.prompts(engine.plan.vocabulary)
    cache = engine.reusable_cache(texts.batch * texts.blocks)
    rows = [
        Row(0, prompt, ([(text * texts.blocks, texts.blocks)],), Wanted.BEST)
        for text, prompt in enumerate(prompts)
    ]
    # Prompts in one pass, as ranks take them.
    together = max(1, PASS_TOKENS[engine.device.type] // texts.prompt)
    passes = (rows[first : first + together] for first in range(0, texts.batch, together))
    newest = [token for few in passes for token in engine.step(few, cache).best]
    found = [newest]
    seconds = []
    for start in range(texts.prompt, texts.tokens - 1):
        rows = [
            row._replace(start=start, tokens=[token]) for row, token in zip(rows, newest, strict=True)
        ]
        began = time.perf_counter()
        newest = engine.step(rows, cache).best  # tokens on the host: the device is done
        seconds.append(time.perf_counter() - began)
        found.append(newest)
    return [list(text) for text in zip(*found, strict=True)], seconds


def pass_seconds(engine: RankEngine, texts: Load, rounds: int) -> float:
    """Seconds of a decode pass, the median over rounds."""
    continued(engine, texts)  # records the passes
    return median(median(continued(engine, texts)[1]) for _ in range(rounds))


def bytes_read(engine: RankEngine, texts: Load) -> int:
    """The least that a decode pass reads: weights, head, and the keys and values of all texts halfway."""
    matrices = [engine.model.vocabulary.head.weight]
    token_bytes = 0
    for made in engine.model.program.sublayers.values():
        if isinstance(made, Attention):
            matrices += [made.qkv.product.weight, made.o.product.weight]
            token_bytes += 2 * made.kv_heads * made.head_dim * engine.plan.dtype_bytes
        else:
            matrices += [made.up.product.weight, made.down.product.weight]
    return (
        sum(matrix.nbytes for matrix in matrices)
        + texts.batch * (texts.prompt + texts.new // 2) * token_bytes
    )


def free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def continued_by(ranks: Ranks, plan: Plan, texts: Load) -> list[list[int]]:
    """New tokens of every text, from ranks that load the plan."""
    ranks.call(load, plan, CHECKED)
    sampling = Sampling(max_new_tokens=texts.new, ignore_end=True)
    return decode_together(ranks, CHECKED, texts.prompts(plan.vocabulary), sampling).tokens
