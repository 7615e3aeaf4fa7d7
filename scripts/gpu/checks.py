"""What scripts/gpu/check compares: each check computes on the CPU what is expected, and on GPUs what is found."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import dispatch_model
from transformers import PreTrainedModel

import surgeon
from scripts.commands import changed_environment
from scripts.gpu.sides import (
    Check,
    Numbers,
    Setup,
    Side,
    judge_bench,
    judge_error,
    judge_numbers,
    judge_overlap,
    judge_product,
    judge_switch,
    judge_tokens,
)
from scripts.gpu.sixteen_bits import (
    attention_in_16_bits,
    kernels_in_16_bits,
    logits_of,
    passes_in_16_bits,
    rows_in_16_bits,
    token_ids,
)
from scripts.gpu.speeds import Load, continued, llama, make_model, open_engine
from surgeon.benchmarks.measure import Needs, RankBench, bench_table, decode_together
from surgeon.commands.app import main as surgeon_command
from surgeon.cost.deployment import Workload
from surgeon.language.operations.variants import variant
from surgeon.language.program import Program
from surgeon.machine import avoid_cudnn_attention
from surgeon.named import demo_model
from surgeon.runtime.batching.request import Sampling
from surgeon.runtime.comm.collectives import Counts
from surgeon.runtime.comm.shared_memory import OVERLAPPING, BySize, side_stream, ways_through_memory
from surgeon.runtime.kernels.build import SWITCH
from surgeon.runtime.kernels.recording import CudaRecorder
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.worker.rank import NCCL_SHARES, Rank, RankOptions
from surgeon.runtime.worker.ranks import Ranks
from surgeon.runtime.worker.worker import load
from tests.tiny_models import save_checkpoint

EXACT = 1e-4  # relative; float32 on both sides
TRAINED = 1e-3  # after steps of AdamW, which makes steps of how a gradient near 0 was rounded
HALF = 5e-2  # 16-bit numbers beside float32; half of that is usual
CHECKED = "checked"  # a plan's name on ranks
LINEAR = "qwen3_next"  # linear attentions, which transformers computes alone
FAMILIES = "mixtral", "gpt_oss", "deepseek_v3", "llama4_text", LINEAR
PAIR = "A0 F0 [A1 A2] [F1 F2] A3 F3"
MIDDLE = range(2, 14)  # layers of the demo model that programs change
MODELS = "models"  # what the first process makes for all others
TEXTS = {"cuda": Load(batch=3, prompt=21, new=24), "cpu": Load(batch=3, prompt=21, new=6)}


def programs() -> dict[str, str]:
    """The kinds of programs that are compared everywhere, on the demo model."""
    return {name: named(name) for name in ("dense", "lp", "ladder")} | {
        "low rank": edited("A{0}@q32,k16,v16,o32 F{0}@gate48,up48,down48")
    }


def named(name: str) -> str:
    """A variant of the demo model."""
    return str(variant(name, Program.dense(16), MIDDLE, 2))


def edited(form: str) -> str:
    """The demo model with other layers in the middle."""
    return " ".join((form if k in MIDDLE else "A{0} F{0}").format(k) for k in range(16))


def derived() -> dict[str, str]:
    """Programs whose sublayers have weights that no layer has."""
    return {
        "averages": "A0 F0 A1 F1 A2 F2 A3~A12 F3~F12 A13 F13 A14 F14 A15 F15",
        "tracks": named("tracks:4"),
    }


def forms() -> dict[str, str]:
    """Every form of a step or a sublayer."""
    repeated = [*range(7), *range(4, 16)]
    return (
        programs()
        | derived()
        | {
            "lp ladder": named("ladder-over-lp"),
            "side by side": edited("[A{0} F{0}]"),
            "width": edited("A{0}#1 F{0}#96"),
            "repeat": " ".join(f"A{k} F{k}" for k in repeated),
        }
    )


def make_models(setup: Setup) -> None:
    """Write the models that both sides read."""
    surgeon.load(demo_model()).save_pretrained(setup.demo)
    for path in demo_model().glob("tokenizer*"):
        (setup.demo / path.name).write_bytes(path.read_bytes())
    config = llama(512, 1024, 2, 8, 4, 128, 512)
    config.initializer_range = 0.05
    make_model(setup.wide, config, "cpu")
    for name in FAMILIES:
        save_checkpoint(setup.demo.with_name(name), name)


def basics(setup: Setup, side: Side) -> Iterator[tuple[str, Any]]:
    """What PyTorch does by itself, where others have been wrong."""
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(512, 512, generator=generator) for _ in range(2))
    product = (left.to(setup.on(side)) @ right.to(setup.on(side))).double().cpu()
    exact = left.double() @ right.double()
    yield "float32 products", {"error": float((product - exact).norm() / exact.norm())}
    torch.backends.cuda.enable_cudnn_sdp(True)  # as it is where nobody asks
    surgeon.load(setup.demo)
    yield "cuDNN attention", torch.backends.cuda.cudnn_sdp_enabled()


def subjects(setup: Setup) -> dict[str, tuple[Path, str]]:
    """Models and programs of the rows that one device computes: forms on the demo, and pairs of other families."""
    folder = setup.demo
    found = {name: (folder, program) for name, program in forms().items()}
    return found | {name: (folder.with_name(name), PAIR) for name in FAMILIES}


def run_edited(setup: Setup, side: Side) -> Iterator[tuple[str, Any]]:
    """Edited models inside transformers: logits, and the tokens of `generate`."""
    device = setup.on(side)
    for name, (folder, program) in subjects(setup).items():
        model = surgeon.load(folder, device_map=None if device == "cpu" else device)
        surgeon.edit(model, program)
        yield f"{name}: logits", logits_of(model, token_ids(model, 2, 40))[:, ::13].tolist()
        yield f"{name}: tokens", _greedy(model, TEXTS[setup.device])


def spread(setup: Setup, side: Side) -> Iterator[tuple[str, Any]]:
    """A model whose layers lie on two devices, by accelerate's hooks; the second one is main memory or the disk."""
    model = surgeon.load(setup.demo)
    ids = token_ids(model, 2, 40)
    if side == "found":
        first = "cpu"
        second = "disk"
        if setup.device == "cuda":
            first = "cuda:0"
            second = "cuda:1" if setup.gpus > 1 else "cpu"
        places = {f"model.layers.{k}": second if k in range(2, 9) else first for k in range(16)}
        places |= dict.fromkeys(
            ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), first
        )
        dispatch_model(model, places, main_device=first, offload_dir=Path(setup.folder) / "offloaded")
    for name, program in ({"low rank": programs()["low rank"]} | derived()).items():
        yield f"{name} on two devices", logits_of(surgeon.edit(model, program), ids)[:, ::13].tolist()


def decoded(setup: Setup, side: Side) -> Iterator[tuple[str, Any]]:
    """The runtime's own passes on one rank; expected are the tokens of transformers."""
    if side == "expected":
        return
    avoid_cudnn_attention()  # as ranks do
    texts = TEXTS[setup.device]
    for name, (folder, program) in subjects(setup).items():
        for way in setup.ways if name != LINEAR else ():
            engine = open_engine(folder, texts, setup.device, way, Program.parse(program))
            continued(engine, texts)  # records passes
            tokens, seconds = continued(engine, texts)
            yield (
                f"{name}: {way} passes",
                {"tokens": tokens, "ms": 1e3 * sorted(seconds)[len(seconds) // 2]},
            )
            del engine


def without_kernels(setup: Setup, side: Side) -> Iterator[tuple[str, Any]]:
    """One rank and two by PyTorch's operations, in processes that are told to have no kernels of ours."""
    if side == "expected":
        return
    with changed_environment(**{SWITCH: "off"}):
        with Ranks(RankOptions(1, setup.device, "gloo")) as rank:
            for name, program in programs().items():
                for way in setup.ways:
                    yield (
                        f"{name}: {way}, no kernels",
                        {"tokens": _on(rank, setup, program, 1, decoding=way)},
                    )
        yield from on_ranks(setup, side, programs, ", no kernels")


def on_ranks(
    setup: Setup, side: Side, compared: Callable[[], dict[str, str]] = forms, ending: str = ""
) -> Iterator[tuple[str, Any]]:
    """Two ranks."""
    if side == "expected":
        return
    for how in setup.collectives:
        with _two_ranks(setup, how) as ranks:
            for name, program in compared().items():
                tokens = _on(ranks, setup, program, 2, low_rank="gather")
                yield f"{name}: {how}{ending}", {"tokens": tokens}


def summed(setup: Setup, side: Side) -> Iterator[tuple[str, Any]]:
    """Sums of two ranks through the memory of one GPU, by each operation that two ranks have."""
    if side == "found":
        with _two_ranks(setup, "memory") as ranks:
            yield from ranks.call(sum_each_way)[0].items()


def sum_each_way(rank: Rank) -> dict[str, Numbers]:
    """Errors of two sums at a time, one of them beside the current stream, recorded as a CUDA graph."""
    inner = rank.collectives.inner
    numbers = torch.arange(8192.0, device=rank.device).view(2, -1)
    given = torch.zeros_like(numbers)

    def compute(sums: BySize) -> torch.Tensor:
        late, soon = given.clone()
        wait = sums.all_reduce(late, Counts())
        return sums.all_reduce(soon, Counts(), at_once=True)() + wait()

    found = {}
    for way in ways_through_memory(inner, rank.device):
        sums = BySize(inner, [way], side_stream(rank.device))
        replay = CudaRecorder(rank.device)(partial(compute, sums))
        given.copy_(numbers * (1 + rank.rank))
        found[f"sum, {way.name}"] = {"error": float((replay() - 3 * numbers.sum(0)).abs().max())}
    return found


# One GPU between ranks: NCCL's kernels take few processors, so that both ranks' make progress.
SHARED = {
    "nccl": {NCCL_SHARES: "1", "NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "2"},
    "memory": {OVERLAPPING: "1"},
    "gloo": {},
}


@contextmanager
def _two_ranks(setup: Setup, how: str) -> Iterator[Ranks]:
    """Over NCCL with a GPU each, or with one between them where there is one, or over gloo or the memory of one."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(setup.gpus))))
    if how == "gloo":
        shown = shown.split(",")[0]
    with (
        changed_environment(CUDA_VISIBLE_DEVICES=shown, **(SHARED[how] if setup.gpus == 1 else {})),
        Ranks(RankOptions(2, setup.device, how.replace("memory", "gloo"))) as ranks,
    ):
        yield ranks


def _on(ranks: Ranks, setup: Setup, program: str, count: int, **more: Any) -> list[list[int]]:
    """New tokens of every text, from ranks."""
    texts = TEXTS[setup.device]
    plan = make_plan(setup.demo, count, texts.prompt + texts.new, program, setup.device, **more)
    ranks.call(load, plan, CHECKED)
    sampling = Sampling(max_new_tokens=texts.new, ignore_end=True)
    return decode_together(ranks, CHECKED, texts.prompts(plan.vocabulary), sampling).tokens


def benched(setup: Setup, side: Side) -> Iterator[tuple[str, Any]]:
    """What `surgeon bench` measures on two ranks: speed, and what a pass sends, which is the same everywhere."""
    device = setup.on(side)
    texts = Workload(1, 32, 8)
    needs = Needs(2, texts.length, device, {"low_rank": "gather"})
    plans = {name: needs.plan(setup.demo, program) for name, program in programs().items()}
    how = "gloo" if device == "cpu" else setup.collectives[0]
    with _two_ranks(replace(setup, device=device), how) as ranks:
        table = bench_table(RankBench.load(ranks, plans).measure([texts], 2, lambda _: None))
    for _, row in table.iterrows():
        sent = {key: int(row[f"decode_{key}"]) for key in ("all_reduces", "all_gathers", "bytes")}
        yield f"{row['program']}: bench", sent | {"rate": float(row["tokens_per_second"])}
        yield f"{row['program']}: overlap", row["decode_hidden_ms"]


def generated(setup: Setup, side: Side) -> Iterator[tuple[str, Any]]:
    """The command that continues texts."""
    prompts = ("--prompt", "def main(", "--prompt", "import os\n\nclass Path")
    said = _command(
        "generate", setup.demo, *prompts, "--max-new-tokens", 16, "--json", "--device", setup.on(side)
    )
    yield "generate", {"tokens": [json.loads(line)["tokens"] for line in said.splitlines()]}


def scanned(setup: Setup, side: Side) -> Iterator[tuple[str, Any]]:
    """The command that draws heatmaps."""
    folder = Path(setup.folder) / f"scan-{side}"
    maps = ("--operation", "merge", "--operation", "2-parallel", "--layers", "3:6")
    _command(
        "scan", setup.demo, "--data", "demo", "--tokens", 1024, "--window", 128, *maps, "-o", folder
    )
    cells = csv.DictReader((folder / "cells.csv").open())
    yield (
        "scan",
        {
            " ".join(cell[key] for key in ("operation", "first", "last")): float(cell["perplexity"])
            for cell in cells
        },
    )


def evaluated(setup: Setup, side: Side) -> Iterator[tuple[str, Any]]:
    """The command that measures a model: one with factors that it keeps in files, and the demo model in 16 bits."""
    for name, model, more in (
        ("eval, factors of files", setup.demo, ("--program", programs()["low rank"])),
        ("eval, 16 bits", "demo", ()),
    ):
        folder = Path(setup.folder) / f"{name}-{side}"
        text = "--data", "demo", "--tokens", 1024, "--window", 128
        _command("eval", model, *more, *text, "--device", setup.on(side), "-o", folder)
        yield name, {"perplexity": float(json.loads((folder / "text.json").read_text())["perplexity"])}


def healed(setup: Setup, side: Side) -> Iterator[tuple[str, Any]]:
    """Two steps of the command that trains an edited model back."""
    folder = Path(setup.folder) / f"healed-{side}"
    text = ("--data", "demo:train", "--eval-data", "demo", "--eval-tokens", 512, "--window", 64)
    steps = ("--steps", 2, "--batch", 4, "--evaluate-every", 1, "--train", "all", "--distill", "logits")
    program = ("--program", programs()["lp"])
    _command("heal", setup.demo, *program, *text, *steps, "--device", setup.on(side), "-o", folder)
    rows = csv.DictReader((folder.with_name(f"{folder.name}.run") / "held_out.csv").open())
    yield "heal, two steps", {f"step {row['step']}": float(row["perplexity"]) for row in rows}


def checks(setup: Setup) -> dict[str, Check]:
    """All of them by their names, the cheapest first."""
    kinds = programs()
    more = subjects(setup)
    same = judge_error(EXACT)
    both = {
        f"{name}: {what}": judge
        for name in more
        for what, judge in (("logits", same), ("tokens", judge_tokens))
    }
    ways = {
        f"{name}: {way} passes": f"{name}: tokens"
        for name in more
        for way in setup.ways
        if name != LINEAR
    }
    plain = {
        f"{name}: {way}, no kernels": f"{name}: tokens"
        for name in kinds
        for way in (*setup.ways, *setup.collectives)
    }
    ranks = {f"{name}: {how}": f"{name}: tokens" for how in setup.collectives for name in forms()}
    sums = ("sum, one shot", "sum, two shots") if "memory" in setup.collectives else ()
    overlap = {"ladder: overlap": judge_overlap} if setup.device == "cuda" else {}
    halves = rows_in_16_bits()
    return {
        "basics": Check(basics, {"float32 products": judge_product, "cuDNN attention": judge_switch}),
        "kernels": Check(kernels_in_16_bits, halves["kernels"]),
        "attention": Check(attention_in_16_bits, halves["attention"]),
        "passes": Check(passes_in_16_bits, halves["passes"]),
        "edited": Check(run_edited, both),
        "spread": Check(spread, {f"{name} on two devices": same for name in ("low rank", *derived())}),
        "decoded": Check(decoded, dict.fromkeys(ways, judge_tokens), ways),
        "no-kernels": Check(without_kernels, dict.fromkeys(plain, judge_tokens), plain),
        "sums": Check(
            summed, dict.fromkeys(sums, judge_product), dict.fromkeys(sums, "float32 products")
        ),
        "ranks": Check(on_ranks, dict.fromkeys(ranks, judge_tokens), ranks),
        "bench": Check(benched, {f"{name}: bench": judge_bench for name in kinds} | overlap),
        "generate": Check(generated, {"generate": judge_tokens}),
        "scan": Check(scanned, {"scan": judge_numbers(EXACT)}),
        "eval": Check(
            evaluated,
            {"eval, factors of files": judge_numbers(EXACT), "eval, 16 bits": judge_numbers(HALF)},
        ),
        "heal": Check(healed, {"heal, two steps": judge_numbers(TRAINED)}),
    }


@torch.no_grad()
def _greedy(model: PreTrainedModel, texts: Load) -> dict[str, Any]:
    """The most likely next tokens of each text, and how far the second best was behind each, next to the best."""
    ids = torch.tensor(texts.prompts(model.config.vocab_size), device=model.device)
    found: Any = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=texts.new,
        eos_token_id=None,
        pad_token_id=0,
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.stack(found.logits, 1).float().topk(2).values
    gaps = (best[..., 0] - best[..., 1]) / best[..., 0].abs()
    return {"tokens": found.sequences[:, texts.prompt :].tolist(), "gaps": gaps.tolist()}


def _command(*arguments: object) -> str:
    """What a command of surgeon's writes to standard output."""
    said = io.StringIO()
    with redirect_stdout(said):
        code = surgeon_command(list(map(str, arguments)))
    if code:
        raise RuntimeError(
            f"surgeon {arguments[0]} ended with {code}: {said.getvalue().strip()} (see the log)"
        )
    return said.getvalue()
