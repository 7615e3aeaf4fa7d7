"""What scripts/gpu/check measures on one GPU: memory and speed of decoding, beside transformers and vLLM.

A random Llama in bfloat16 continues one text, then many behind long prompts. Each measurement yields rows as JSON has
them: how many texts, the seconds of a pass that adds a token to each, and of surgeon's own the bytes that such a pass
has to read, the most that was allocated, and what the memory plan says.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, CompileConfig, LlamaConfig, StoppingCriteria

from scripts.gpu.decode import (
    BANDWIDTH_BYTES,
    LARGE,
    MIDDLE,
    SMALL,
    Load,
    bandwidth,
    bytes_read,
    free,
    fused,
    make_model,
    open_engine,
    pass_seconds,
    synchronise,
)
from scripts.gpu.sides import Setup
from scripts.vllm.engine import CELLS, decode_rates
from surgeon.language.operations import pair
from surgeon.language.program import Program
from surgeon.machine import avoid_cudnn_attention
from surgeon.runtime.batching.windows import blocks_for
from surgeon.runtime.plan.memory import footprint
from surgeon.runtime.plan.specification import Decoding, Plan

MEMORY = "memory bandwidth"
# Of free memory that the larger model, its cache and another library's buffers want.
LARGE_BYTES = 24 << 30
LOADS = {"cuda": (Load(1, 64, 64), Load(32, 1000, 32)), "cpu": (Load(1, 20, 6), Load(2, 40, 6))}
ROUNDS = {"cuda": 3, "cpu": 1}
VLLM_SECONDS = 170.0  # less than what a row may take, so that no process of vLLM's stays behind

Rows = Iterator[tuple[str, Any]]


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
    setup: Setup, who: str, folder: Path, decoding: Decoding, program: Program | None = None
) -> Rows:
    """One rank in this process."""
    avoid_cudnn_attention()  # as ranks do
    on_gpu = setup.device == "cuda"
    for load in LOADS[setup.device]:
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        engine = open_engine(folder, load, setup.device, decoding, program)
        found = {"batch": load.batch, "seconds": pass_seconds(engine, load, ROUNDS[setup.device])}
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
    """Passes that are recorded where they can be."""
    return decoded(setup, "surgeon", model_of(setup), setup.ways[-1])


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


# By name, with whom it has a row of each load for.
SPEEDS: dict[str, tuple[Callable[[Setup], Rows], Sequence[str]]] = {
    "bandwidth": (measured_bandwidth, ()),
    "surgeon": (by_surgeon, ("surgeon",)),
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
