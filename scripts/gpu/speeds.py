"""What scripts/gpu/check measures on one GPU: memory and speed of decoding, beside transformers and vLLM.

A random Llama in bfloat16 continues one text, then many behind long prompts. Each measurement yields rows as JSON has
them: how many texts, the seconds of a pass that adds a token to each, and of surgeon's own the bytes that such a pass
has to read, the most that was allocated, and what the memory plan says.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, CompileConfig, LlamaConfig, StoppingCriteria

from scripts.gpu.sides import Setup
from scripts.vllm.engine import CELLS, decode_rates
from surgeon.language.operations import pair
from surgeon.language.program import Program
from surgeon.machine import avoid_cudnn_attention
from surgeon.runtime.batching.blocks import PASS_TOKENS, blocks_for
from surgeon.runtime.batching.request import Row, Wanted
from surgeon.runtime.comm.collectives import Alone
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.model.layers import Attention
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.memory import footprint
from surgeon.runtime.plan.specification import Decoding, Plan

BANDWIDTH_BYTES = 2 << 30  # of one tensor; far more than any cache holds
MEMORY = "memory bandwidth"
# The larger model, its cache and another library's buffers want so much free memory.
LARGE_BYTES = 24 << 30
ROUNDS = {"cuda": 3, "cpu": 1}
VLLM_SECONDS = 170.0  # less than what a row may take, so that no process of vLLM's stays behind
Rows = Iterator[tuple[str, Any]]


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


def continued(engine: RankEngine, texts: Load, at_once: int = 1) -> tuple[list[list[int]], list[float]]:
    """New tokens of every text, and the seconds of decode passes, of which so many are computed at once."""
    prompts = texts.prompts(engine.plan.vocabulary)
    cache = engine.reusable_cache(texts.batch * texts.blocks)
    rows = [
        Row(0, prompt, ([(text * texts.blocks, texts.blocks)],), Wanted.BEST)
        for text, prompt in enumerate(prompts)
    ]
    # As many prompts go through in one pass as ranks take.
    together = max(1, PASS_TOKENS[engine.device.type] // texts.prompt)
    passes = (rows[first : first + together] for first in range(0, texts.batch, together))
    newest = [token for few in passes for token in engine.step(few, cache).best]
    found = [newest]
    seconds = []
    for start in range(texts.prompt, texts.tokens - 1, at_once):
        passes_left = min(at_once, texts.tokens - 1 - start)
        rows = [
            row._replace(start=start, tokens=[token]) for row, token in zip(rows, newest, strict=True)
        ]
        began = time.perf_counter()
        found += engine.several(rows, passes_left, cache)  # tokens on the host: the device is done
        seconds.append((time.perf_counter() - began) / passes_left)
        newest = found[-1]
    return [list(text) for text in zip(*found, strict=True)], seconds


def pass_seconds(engine: RankEngine, texts: Load, rounds: int, at_once: int = 1) -> float:
    """Seconds of a decode pass, the median over rounds."""
    continued(engine, texts, at_once)  # records the passes
    return median(median(continued(engine, texts, at_once)[1]) for _ in range(rounds))


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


FOUR = "four passes at once"
LOADS = {"cuda": (Load(1, 64, 64), Load(32, 1000, 32)), "cpu": (Load(1, 20, 6), Load(2, 40, 6))}


def config_of(device: str) -> LlamaConfig:
    """The model that there is room for."""
    if device == "cpu":
        return SMALL
    if torch.cuda.mem_get_info()[0] >= LARGE_BYTES:
        return LARGE
    return MIDDLE


def model_of(setup: Setup, in_pairs: bool = False) -> Path:
    """The random model, or one with its layers fused in pairs, made by whichever process needs it first."""
    made = Path(setup.folder) / ("speed-model-fused" if in_pairs else "speed-model")
    if not made.exists():
        config = config_of(setup.device)
        make_model(
            made.with_suffix(".part"), fused(config) if in_pairs else config, setup.device
        ).rename(made)
        free(setup.device)
    return made


def measured_bandwidth(setup: Setup) -> Rows:
    size = BANDWIDTH_BYTES if setup.device == "cuda" else BANDWIDTH_BYTES >> 6
    yield MEMORY, {"rate": bandwidth(setup.device, size)}
    free(setup.device)


def decoded(
    setup: Setup,
    who: str,
    folder: Path,
    decoding: Decoding,
    program: Program | None = None,
    at_once: int = 1,
) -> Rows:
    """One rank in this process."""
    avoid_cudnn_attention()  # as ranks do
    on_gpu = setup.device == "cuda"
    for load in LOADS[setup.device]:
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        engine = open_engine(folder, load, setup.device, decoding, program)
        seconds = pass_seconds(engine, load, ROUNDS[setup.device], at_once)
        found = {"batch": load.batch, "seconds": seconds}
        found |= {
            "bytes": bytes_read(engine, load),
            "planned": planned_bytes(engine.plan, setup.device, load),
        }
        if on_gpu:
            found["peak"] = torch.cuda.max_memory_allocated()
        yield row_name(who, load), found
        del engine
        free(setup.device)


def by_surgeon(setup: Setup) -> Rows:
    """Passes that are recorded where they can be, one by one and four at once."""
    yield from decoded(setup, "surgeon", model_of(setup), setup.ways[-1])
    yield from decoded(setup, FOUR, model_of(setup), setup.ways[-1], at_once=4)


def in_any_shape(setup: Setup) -> Rows:
    """Passes that are not recorded."""
    return decoded(setup, "dynamic passes", model_of(setup), "dynamic")


def by_pairs(setup: Setup) -> Rows:
    """All layers in pairs: fused into layers of twice the width, and side by side."""
    yield from decoded(setup, "fused pairs", model_of(setup, in_pairs=True), setup.ways[-1])
    layers = config_of(setup.device).num_hidden_layers
    program = pair(Program.dense(layers), range(layers))
    yield from decoded(setup, "pairs side by side", model_of(setup), setup.ways[-1], program)


def planned_bytes(plan: Plan, device: str, load: Load) -> int:
    """Weights, the cache of a load, and what it takes to read it, as the memory plan counts them on one rank."""
    sizes = footprint(plan)
    texts, blocks = plan.read_at_once(device, load.batch)
    read = sizes.buffers[0] + (sizes.copies[0] if plan.gathers(device) else 0)
    cache = load.batch * blocks_for(load.prompt + load.new)
    return sizes.weights[0] + cache * sizes.block[0] + texts * min(blocks, cache) * read


class Clock(StoppingCriteria):
    """Notes when each new token is there, and stops nothing."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.times: list[float] = []

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: Any) -> Tensor:  # noqa: ARG002
        synchronise(self.device)
        self.times.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)  # type: ignore[return-value]


def by_transformers(setup: Setup, compiled: bool = False) -> Rows:
    """`generate` with a static cache, as it is or compiled as gpt-fast compiles: passes as CUDA graphs."""
    avoid_cudnn_attention()
    model = AutoModelForCausalLM.from_pretrained(model_of(setup), dtype="auto", device_map=setup.device)
    model.generation_config.eos_token_id = None  # no text ends early
    # To try the script no compiler is needed.
    backend = "inductor" if setup.device == "cuda" else "eager"
    config = CompileConfig(backend=backend, mode="reduce-overhead")
    config._compile_all_devices = True  # type: ignore[assignment]
    way: dict[str, Any] = {"compile_config": config} if compiled else {"disable_compile": True}
    for load in LOADS[setup.device]:
        ids = torch.tensor(load.prompts(model.config.vocab_size), device=model.device)

        def seconds(ids: Tensor = ids, new: int = load.new) -> float:
            clock = Clock(setup.device)
            model.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                pad_token_id=0,
                do_sample=False,
                max_new_tokens=new,
                cache_implementation="static",
                stopping_criteria=[clock],
                **way,
            )
            return median(later - earlier for earlier, later in pairwise(clock.times))

        seconds()  # compiles and records
        found = median(seconds() for _ in range(ROUNDS[setup.device]))
        who = "transformers, compiled" if compiled else "transformers"
        yield row_name(who, load), {"batch": load.batch, "seconds": found}


def by_compiled_transformers(setup: Setup) -> Rows:
    return by_transformers(setup, compiled=True)


def by_vllm(setup: Setup) -> Rows:
    """vLLM, if this Python has it."""
    if find_spec("vllm") is None:
        raise ModuleNotFoundError("vLLM is not installed")
    for load in LOADS[setup.device]:
        sizes = map(str, (1, load.tokens, load.batch))
        command = [sys.executable, str(CELLS), str(model_of(setup)), *sizes, "--dtype", "bfloat16"]
        rates = decode_rates(command, load.prompt, load.new, [load.batch], timeout=VLLM_SECONDS)
        yield row_name("vLLM", load), {"batch": load.batch, "seconds": load.batch / rates[load.batch]}


def row_name(who: str, load: Load) -> str:
    return f"{who}, {load.batch} x {load.prompt}"


# Each measurement has a row of every load for those who are named behind it.
SPEEDS: dict[str, tuple[Callable[[Setup], Rows], Sequence[str]]] = {
    "bandwidth": (measured_bandwidth, ()),
    "surgeon": (by_surgeon, ("surgeon", FOUR)),
    "dynamic": (in_any_shape, ("dynamic passes",)),
    "pairs": (by_pairs, ("fused pairs", "pairs side by side")),
    "transformers": (by_transformers, ("transformers",)),
    "compiled": (by_compiled_transformers, ("transformers, compiled",)),
    "vllm": (by_vllm, ("vLLM",)),
}


def speed_rows(name: str, device: str) -> list[str]:
    """The rows that a measurement has."""
    if name == "bandwidth":
        return [MEMORY]
    return [row_name(who, load) for who in SPEEDS[name][1] for load in LOADS[device]]
