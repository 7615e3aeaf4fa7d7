"""Decoding on one GPU: how near it comes to the memory's bandwidth, and whether all ways of decoding agree.

    python scripts/gpu/decode.py [-o TABLE.md] [--batch 1 8] [--prompt 64] [--new 128] [--rounds 5] [--small]

Needs nothing but Python, torch, transformers and safetensors, and about 15 GB of disk for random models. It measures
the memory's bandwidth with large copies and sums, then decodes with a random Llama of 3 billion parameters (the shape
of Llama 3.2 3B) in bfloat16: in passes recorded as CUDA graphs and in passes of any shape, on one rank in this process.
A share of the bandwidth is what a pass has to read at least, weights and keys and values, by its time and by the
bandwidth. Then all pairs of layers become one layer twice as wide each, as `surgeon export` fuses them (random weights
again), and the same pairs run side by side as a program. At last, in float32, recorded passes, passes of any shape and
two ranks that share the GPU over gloo have to give the same tokens; if they do not, the exit status is 1.

--small takes a tiny model on the CPU, where passes have the same fixed shapes but are not recorded: its figures mean
nothing, and show that the script works.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # surgeon need not be installed

import torch
from transformers import AutoModelForCausalLM, LlamaConfig
from transformers.utils import logging

from surgeon.gpus import avoid_cudnn_attention
from surgeon.language.program import Program, Step
from surgeon.processes.files import write_text
from surgeon.provenance import command_line, versions
from surgeon.runtime.batching.request import Request, Sampling
from surgeon.runtime.batching.scheduler import Limits
from surgeon.runtime.batching.sequence import Row, Wanted
from surgeon.runtime.batching.windows import PASS_TOKENS, blocks_for
from surgeon.runtime.comm.collectives import Alone
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.model.layers import Attention
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.specification import Decoding, Plan
from surgeon.runtime.worker.options import RankOptions
from surgeon.runtime.worker.ranks import Ranks
from surgeon.runtime.worker.worker import complete, load

TARGET = 0.75  # of the measured bandwidth, at batch 1
BANDWIDTH_BYTES = 2 << 30  # of one tensor; far more than any cache holds
CHECKED_TEXTS, CHECKED_TOKENS = 3, 32
HEAD = "| measurement | batch | tokens/s | ms per pass | GB/s | share | result |\n|:--|--:|--:|--:|--:|--:|:--|"


@dataclass(frozen=True)
class Shape:
    """A Llama with tied embeddings."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int

    def fused(self) -> Shape:
        """Every two layers as one twice as wide."""
        return replace(
            self,
            layers=self.layers // 2,
            heads=2 * self.heads,
            kv_heads=2 * self.kv_heads,
            intermediate=2 * self.intermediate,
        )


LARGE = Shape(3072, 8192, 28, 24, 8, 128, 128256)
SMALL = Shape(64, 160, 4, 4, 2, 16, 512)


@dataclass(frozen=True)
class Load:
    """Texts, the tokens of each prompt, and how many are added to each."""

    batch: int
    prompt: int
    new: int

    @property
    def blocks(self) -> int:
        """Of the cache, for each text."""
        return blocks_for(self.prompt + self.new)

    def prompts(self, vocabulary: int) -> list[list[int]]:
        """Random token ids, the same every time."""
        generator = torch.Generator().manual_seed(0)
        found: list[list[int]] = torch.randint(vocabulary, (self.batch, self.prompt), generator=generator).tolist()
        return found


@dataclass(frozen=True)
class Decoded:
    """Seconds of one decode pass, the median over rounds, and the bytes that one reads at least."""

    batch: int
    seconds: float
    bytes: int

    @property
    def rate(self) -> float:
        """Bytes per second."""
        return self.bytes / self.seconds


@dataclass(frozen=True)
class Setup:
    """What the options amount to."""

    device: str
    shape: Shape
    loads: list[Load]
    rounds: int

    @property
    def fixed(self) -> Decoding:
        """The decoding in passes of fixed shapes."""
        return "auto" if self.device == "cuda" else "static"


def config_of(shape: Shape) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )


def make_model(folder: Path, shape: Shape, device: str) -> Path:
    """Write a random checkpoint in bfloat16; made on the device, which is fast on a GPU."""
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config_of(shape), dtype=torch.bfloat16)
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
    folder: Path, setup: Setup, decoding: Decoding, program: Program | None = None, dtype: str = "auto"
) -> RankEngine:
    """One rank with all of a model."""
    most = max(texts.prompt + texts.new for texts in setup.loads)
    text = None if program is None else str(program)
    plan = make_plan(folder, 1, most, text, setup.device, dtype=dtype, decoding=decoding)
    return RankEngine(plan, Alone(), torch.device(setup.device))


def continued(engine: RankEngine, texts: Load) -> tuple[list[list[int]], list[float]]:
    """New tokens of every text, and the seconds of every decode pass."""
    prompts = texts.prompts(engine.plan.vocabulary)
    cache = engine.reusable_cache(texts.batch * texts.blocks)
    rows = [
        Row(0, prompt, ([(text * texts.blocks, texts.blocks)],), Wanted.BEST) for text, prompt in enumerate(prompts)
    ]
    together = max(1, PASS_TOKENS[engine.device.type] // texts.prompt)  # prompts in one pass, as ranks take them
    passes = (rows[first : first + together] for first in range(0, texts.batch, together))
    newest = [token for few in passes for token in engine.step(few, cache).best]
    found, seconds = [newest], []
    for start in range(texts.prompt, texts.prompt + texts.new - 1):
        rows = [row._replace(start=start, tokens=[token]) for row, token in zip(rows, newest, strict=True)]
        began = time.perf_counter()
        newest = engine.step(rows, cache).best  # tokens on the host: the device is done
        seconds.append(time.perf_counter() - began)
        found.append(newest)
    return [list(text) for text in zip(*found, strict=True)], seconds


def decode(engine: RankEngine, texts: Load, rounds: int) -> Decoded:
    """The time of a decode pass."""
    continued(engine, texts)  # records the passes
    times = [median(continued(engine, texts)[1]) for _ in range(rounds)]
    return Decoded(texts.batch, median(times), bytes_read(engine, texts))


def bytes_read(engine: RankEngine, texts: Load) -> int:
    """Weights, head, and the keys and values of all texts halfway."""
    matrices = [engine.model.vocabulary.head.weight]
    token_bytes = 0
    for made in engine.model.program.sublayers.values():
        if isinstance(made, Attention):
            matrices += [made.qkv.product.weight, made.o.product.weight]
            token_bytes += 2 * made.kv_heads * made.head_dim * engine.plan.dtype_bytes
        else:
            matrices += [made.up.product.weight, made.down.product.weight]
    return sum(matrix.nbytes for matrix in matrices) + texts.batch * (texts.prompt + texts.new // 2) * token_bytes


def free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def row(name: str, found: Decoded, memory: float, result: str = "") -> str:
    cells = [
        name,
        str(found.batch),
        f"{found.batch / found.seconds:.1f}",
        f"{1e3 * found.seconds:.2f}",
        f"{found.rate / 1e9:.0f}",
        f"{found.rate / memory:.0%}",
        result,
    ]
    return "| " + " | ".join(cells) + " |"


def verdict(fulfilled: bool, words: str) -> str:
    return f"{words}: {'yes' if fulfilled else 'NO'}"


def decode_rows(folder: Path, setup: Setup, memory: float) -> Iterator[str]:
    """The model as it is, in both ways of decoding."""
    modes: tuple[Decoding, ...] = (setup.fixed, "dynamic")
    for decoding in modes:
        engine = open_engine(folder, setup, decoding)
        for texts in setup.loads:
            found = decode(engine, texts, setup.rounds)
            asked = decoding == setup.fixed and texts.batch == 1
            result = verdict(found.rate / memory >= TARGET, f"at least {TARGET:.0%}") if asked else ""
            yield row(f"{decoding} passes", found, memory, result)
        del engine
        free(setup.device)


def pair_rows(folder: Path, fused_folder: Path, setup: Setup, memory: float) -> Iterator[str]:
    """All layers in pairs: one after the other, fused, and side by side; in turn, round by round."""
    texts = setup.loads[0]
    pairs = Program(tuple(step for layer in range(0, setup.shape.layers, 2) for step in pair(layer)))
    engines = {
        "layers in sequence": open_engine(folder, setup, setup.fixed),
        "fused pairs": open_engine(fused_folder, setup, setup.fixed),
        "pairs side by side": open_engine(folder, setup, setup.fixed, pairs),
    }
    rounds = [{name: decode(engine, texts, 1) for name, engine in engines.items()} for _ in range(setup.rounds)]
    sequence = next(iter(engines))
    for name in engines:
        found = replace(rounds[0][name], seconds=median(one[name].seconds for one in rounds))
        ratio = median(one[sequence].seconds / one[name].seconds for one in rounds)
        result = "" if name == sequence else f"{ratio:.2f} times {sequence}"
        yield row(name, found, memory, verdict(ratio >= 1, result) if name == "fused pairs" else result)
    engines.clear()
    free(setup.device)


def pair(layer: int) -> list[Step]:
    steps = Program.parse(f"[A{layer} A{layer + 1}] [F{layer} F{layer + 1}]").nodes
    return [step for step in steps if isinstance(step, Step)]


def agreement(folder: Path, setup: Setup) -> dict[str, bool]:
    """Whether each other way of decoding gives the tokens of passes of any shape on one rank, in float32."""
    texts = Load(CHECKED_TEXTS, setup.loads[0].prompt, min(CHECKED_TOKENS, setup.loads[0].new))
    found = {}
    modes: tuple[Decoding, ...] = ("dynamic", "static", setup.fixed)
    for decoding in modes:
        engine = open_engine(folder, setup, decoding, dtype="float32")
        found[f"{decoding} passes"] = continued(engine, texts)[0]
        del engine
        free(setup.device)
    found["two ranks over gloo"] = on_two_ranks(folder, setup.device, texts)
    expected = found.pop("dynamic passes")
    return {name: tokens == expected for name, tokens in found.items()}


def on_two_ranks(folder: Path, device: str, texts: Load) -> list[list[int]]:
    """New tokens of every text, from two processes that share the device."""
    with Ranks(RankOptions(2, device=device, collectives="gloo")) as ranks:
        return continued_by(
            ranks, make_plan(folder, 2, texts.prompt + texts.new, device=device, dtype="float32"), texts
        )


def continued_by(ranks: Ranks, plan: Plan, texts: Load) -> list[list[int]]:
    """New tokens of every text, from ranks that load the plan."""
    sampling = Sampling(max_new_tokens=texts.new, ignore_end=True)
    requests = [Request(number, tuple(text), sampling) for number, text in enumerate(texts.prompts(plan.vocabulary))]
    found: list[list[int]] = [[] for _ in requests]
    ranks.call(load, plan)
    limits = Limits(texts.batch, plan.max_tokens, pass_tokens=texts.batch * texts.prompt)
    for output in ranks.call(complete, requests, texts.batch * (texts.blocks + 1), limits)[0][0]:
        found[output.request].append(output.token)
    return found


def lines(setup: Setup, folder: Path) -> Iterator[str]:
    """The table, line by line."""
    say("measuring the memory")
    memory = bandwidth(setup.device, BANDWIDTH_BYTES if setup.device == "cuda" else BANDWIDTH_BYTES >> 4)
    name = torch.cuda.get_device_name() if setup.device == "cuda" else "CPU"
    told = ", ".join(f"{package} {version}" for package, version in versions().items())
    load_words = f"prompt {setup.loads[0].prompt}, {setup.loads[0].new} new tokens, median of {setup.rounds} rounds"
    yield f"{name}, {memory / 1e9:.0f} GB/s measured; {told}; {load_words}; `{command_line()}`\n"
    yield HEAD
    say("writing random models")
    dense = make_model(folder / "dense", setup.shape, setup.device)
    fused = make_model(folder / "fused", setup.shape.fused(), setup.device)
    free(setup.device)
    say("decoding")
    yield from decode_rows(dense, setup, memory)
    say("pairs of layers")
    yield from pair_rows(dense, fused, setup, memory)
    shutil.rmtree(fused)
    say("comparing tokens")
    for way, same in agreement(dense, setup).items():
        yield f"| {way}, float32 | {CHECKED_TEXTS} | | | | | {verdict(same, 'tokens of dynamic passes')} |"


def say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)


def parse(arguments: Sequence[str] | None) -> tuple[Setup, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="a tiny model on the CPU")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to make the models; they are removed at the end")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the table here too")
    options = parser.parse_args(arguments)
    for name, least in (("prompt", 1), ("new", 2), ("rounds", 1)):
        if getattr(options, name) < least:
            parser.error(f"--{name} must be at least {least}, not {getattr(options, name)}")
    if min(options.batch) < 1:
        parser.error(f"--batch must be at least 1, not {min(options.batch)}")
    if not options.small and not torch.cuda.is_available():
        parser.error("there is no GPU that torch can use; --small runs a tiny model on the CPU")
    loads = [Load(batch, options.prompt, options.new) for batch in options.batch]
    device, shape = ("cpu", SMALL) if options.small else ("cuda", LARGE)
    return Setup(device, shape, loads, options.rounds), options


def main(arguments: Sequence[str] | None = None) -> int:
    setup, options = parse(arguments)
    avoid_cudnn_attention()  # as ranks do: engines run in this process
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(dir=options.folder) as temporary:
        table = []
        for line in lines(setup, Path(temporary)):
            table.append(line)
            print(line, flush=True)
    if options.output:
        write_text(options.output, "\n".join(table) + "\n")
    return int(any("tokens of dynamic passes: NO" in line for line in table))


if __name__ == "__main__":
    sys.exit(main())
