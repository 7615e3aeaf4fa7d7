"""What scripts/gpu/check compares: each check computes on the CPU what is expected, and on GPUs what is found."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import dispatch_model
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

import surgeon
from scripts.gpu.decode import Load, continued, continued_by, open_engine
from scripts.gpu.decode import Setup as DecodeSetup
from scripts.gpu.judges import (
    Judge,
    judge_bench,
    judge_error,
    judge_numbers,
    judge_product,
    judge_switch,
    judge_tokens,
)
from surgeon.benchmarks.measure import RankBench
from surgeon.benchmarks.plans import Needs
from surgeon.benchmarks.tables import bench_table
from surgeon.cli.app import main as surgeon_command
from surgeon.cost.workload import Workload
from surgeon.demo import demo_model
from surgeon.gpus import avoid_cudnn_attention
from surgeon.language.operations.variants import variant
from surgeon.language.program import Program
from surgeon.runtime.kernels.build import SWITCH
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.specification import Decoding
from surgeon.runtime.worker.options import RankOptions
from surgeon.runtime.worker.ranks import Ranks

Side = Literal["expected", "found", "speed"]

EXACT = 1e-4  # relative; float32 on both sides
TRAINED = 1e-3  # after steps of AdamW, which makes steps of how a gradient near 0 was rounded
HALF = 5e-2  # 16-bit numbers beside float32; half of that is usual
MODELS = "models"  # what the first process makes for all others
TEXTS = Load(batch=3, prompt=21, new=24)
LENGTHS = (1, 7, 64, 129)  # of prompts; every new one is a new shape to attention


@dataclass(frozen=True)
class Setup:
    """What the processes of a run are told.

    Attributes:
        device: what is found is found on: "cuda" or, to try the script, "cpu".
        gpus: how many there are.
        folder: for models and results.
    """

    device: str
    gpus: int
    folder: str

    @property
    def demo(self) -> Path:
        """The demo model in float32, which GPUs compute in then, too."""
        return Path(self.folder) / "demo"

    @property
    def wide(self) -> Path:
        """A random one in bfloat16, with heads of 128 and fewer than 8 KV heads."""
        return Path(self.folder) / "wide"

    def on(self, side: Side) -> str:
        """Where one side computes."""
        return "cpu" if side == "expected" else self.device

    @property
    def ways(self) -> tuple[Decoding, ...]:
        """How passes that add a token are computed."""
        return ("dynamic", "static", "captured") if self.device == "cuda" else ("dynamic", "static")

    @property
    def collectives(self) -> tuple[str, ...]:
        """How two ranks talk: over NCCL where each has a GPU of its own, and over gloo on one GPU."""
        return ("nccl", "gloo") if self.gpus > 1 else ("gloo",)


@dataclass(frozen=True)
class Check:
    """Something that is computed on both sides.

    Attributes:
        compute: yields the names of rows of the table with values as JSON has them.
        rows: how each is judged.
        against: what is expected of a row, where that is another row of another check.
    """

    compute: Callable[[Setup, Side], Iterator[tuple[str, Any]]]
    rows: Mapping[str, Judge]
    against: Mapping[str, str] = field(default_factory=dict)

    def key(self, row: str) -> str:
        """The row that has what is expected of a row."""
        return self.against.get(row, row)


def programs() -> dict[str, str]:
    """The kinds of programs that are compared everywhere, on the demo model."""
    dense, middle = Program.dense(16), range(2, 14)
    ranks = "A{0}@q32,k16,v16,o32 F{0}@gate48,up48,down48"
    whole = "A{0} F{0}"
    return {
        "dense": str(dense),
        "lp": str(variant("lp", dense, middle, 1)),
        "ladder": str(variant("ladder", dense, middle, 1)),
        "low rank": " ".join((ranks if k in middle else whole).format(k) for k in range(16)),
    }


def derived() -> dict[str, str]:
    """Programs whose sublayers have weights that no layer has."""
    kept = "A0 F0 A1 F1 A2 F2"
    return {
        "averages": f"{kept} A3~A12 F3~F12 A13 F13 A14 F14 A15 F15",
        "slices": f"{kept} {{A3/2:0 F3/2:0 A12/2:0 F12/2:0 | A3/2:1 F3/2:1 A12/2:1 F12/2:1}} A15 F15",
    }


def forms() -> dict[str, str]:
    """Every form of a step or a sublayer."""

    def edited(form: str) -> str:
        return " ".join((form if k in range(2, 14) else "A{0} F{0}").format(k) for k in range(16))

    repeated = [*range(7), *range(4, 16)]
    return (
        programs()
        | derived()
        | {
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
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=128,
        initializer_range=0.05,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(setup.wide)


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


def attention(setup: Setup, side: Side) -> Iterator[tuple[str, Any]]:
    """The wide model's logits behind prompts of several lengths, padded to one length, too."""
    device = setup.on(side)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = surgeon.load(setup.wide, dtype=dtype, device_map=None if device == "cpu" else device)
    ids = _ids(model, 2, max(LENGTHS))
    found = [_logits(model, ids[:, :length])[:, -1] for length in LENGTHS]
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    found.append(_logits(model, ids, attention_mask=mask.to(model.device))[:, -1])
    yield "attention in 16 bits", torch.stack(found).tolist()


def edited(setup: Setup, side: Side) -> Iterator[tuple[str, Any]]:
    """Edited models inside transformers: logits, and the tokens of `generate`."""
    device = setup.on(side)
    model = surgeon.load(setup.demo, device_map=None if device == "cpu" else device)
    for name, program in forms().items():
        surgeon.edit(model, program)
        yield f"{name}: logits", _logits(model, _ids(model, 2, 40))[:, ::13].tolist()
        yield f"{name}: tokens", _greedy(model)


def spread(setup: Setup, side: Side) -> Iterator[tuple[str, Any]]:
    """A model whose layers lie on two devices, by accelerate's hooks; the second one is main memory or the disk."""
    model = surgeon.load(setup.demo)
    ids = _ids(model, 2, 40)
    if side == "found":
        first, second = ("cuda:0", "cuda:1" if setup.gpus > 1 else "cpu") if setup.device == "cuda" else ("cpu", "disk")
        places = {f"model.layers.{k}": second if k in range(2, 9) else first for k in range(16)}
        places |= dict.fromkeys(("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head"), first)
        dispatch_model(model, places, main_device=first, offload_dir=Path(setup.folder) / "offloaded")
    for name, program in ({"low rank": programs()["low rank"]} | derived()).items():
        yield f"{name} on two devices", _logits(surgeon.edit(model, program), ids)[:, ::13].tolist()


def decoded(setup: Setup, side: Side) -> Iterator[tuple[str, Any]]:
    """The runtime's own passes on one rank; expected are the tokens of transformers."""
    if side == "expected":
        return
    avoid_cudnn_attention()  # as ranks do
    decoding = DecodeSetup(setup.device, None, [TEXTS], 1)
    for name, program in forms().items():
        for way in setup.ways:
            engine = open_engine(setup.demo, decoding, way, Program.parse(program))
            tokens, seconds = continued(engine, TEXTS)
            tokens, seconds = continued(engine, TEXTS)  # by now passes are recorded
            yield f"{name}: {way} passes", {"tokens": tokens, "ms": 1e3 * sorted(seconds)[len(seconds) // 2]}
            del engine


def without_kernels(setup: Setup, side: Side) -> Iterator[tuple[str, Any]]:
    """The same by PyTorch's operations, in a process that is told to have no kernels of ours."""
    if side == "expected":
        return
    with _environment(SWITCH, "off"), Ranks(RankOptions(1, setup.device, "gloo")) as ranks:
        for name, program in programs().items():
            for way in setup.ways:
                yield f"{name}: {way}, no kernels", {"tokens": _on(ranks, setup, program, 1, decoding=way)}


def on_ranks(setup: Setup, side: Side) -> Iterator[tuple[str, Any]]:
    """Two ranks: over NCCL with a GPU each, and over gloo with one between them."""
    if side == "expected":
        return
    for how in setup.collectives:
        shown = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(setup.gpus))))
        with (
            _environment("CUDA_VISIBLE_DEVICES", shown.split(",")[0] if how == "gloo" else shown),
            Ranks(RankOptions(2, setup.device, how)) as ranks,
        ):
            for name, program in forms().items():
                yield f"{name}: {how}", {"tokens": _on(ranks, setup, program, 2, low_rank="gather")}


def _on(ranks: Ranks, setup: Setup, program: str, count: int, **more: Any) -> list[list[int]]:
    """New tokens of every text, from ranks."""
    plan = make_plan(setup.demo, count, TEXTS.prompt + TEXTS.new, program, setup.device, **more)
    return continued_by(ranks, plan, TEXTS)


@contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Processes that are started here have a variable in their environment."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


def benched(setup: Setup, side: Side) -> Iterator[tuple[str, Any]]:
    """What `surgeon bench` measures on two ranks: speed, and what a pass sends, which is the same everywhere."""
    device, load = setup.on(side), Workload(1, 32, 8)
    needs = Needs(2, load.prompt + load.new, device, low_rank="gather")
    plans = {name: needs.plan(setup.demo, program) for name, program in programs().items()}
    with Ranks(RankOptions(2, device, "gloo" if device == "cpu" else setup.collectives[0])) as ranks:
        table = bench_table(RankBench.load(ranks, plans).measure([load], 2, lambda _: None))
    for _, row in table.iterrows():
        sent = {key: int(row[f"decode_{key}"]) for key in ("all_reduces", "all_gathers", "bytes")}
        yield f"{row['program']}: bench", sent | {"rate": float(row["tokens_per_second"])}


def generated(setup: Setup, side: Side) -> Iterator[tuple[str, Any]]:
    """The command that continues texts."""
    prompts = ("--prompt", "def main(", "--prompt", "import os\n\nclass Path")
    said = _command("generate", setup.demo, *prompts, "--max-new-tokens", 16, "--json", "--device", setup.on(side))
    yield "generate", {"tokens": [json.loads(line)["tokens"] for line in said.splitlines()]}


def scanned(setup: Setup, side: Side) -> Iterator[tuple[str, Any]]:
    """The command that draws heatmaps."""
    folder = Path(setup.folder) / f"scan-{side}"
    maps = ("--operation", "merge", "--operation", "2-parallel", "--layers", "3:6")
    _command("scan", setup.demo, "--data", "demo", "--tokens", 1024, "--window", 128, *maps, "-o", folder)
    cells = list(csv.DictReader((folder / "cells.csv").open()))
    keys = ("operation", "first", "last")
    yield "scan", {" ".join(cell[key] for key in keys): float(cell["perplexity"]) for cell in cells}


def evaluated(setup: Setup, side: Side) -> Iterator[tuple[str, Any]]:
    """The command that measures a model: one with factors that it keeps in files, and the demo model in 16 bits."""
    for name, model, more in (
        ("eval, factors of files", setup.demo, ("--program", programs()["low rank"])),
        ("eval, 16 bits", "demo", ()),
    ):
        folder = Path(setup.folder) / f"{name}-{side}"
        text = ("--data", "demo", "--tokens", 1024, "--window", 128)
        _command("eval", model, *more, *text, "--device", setup.on(side), "-o", folder)
        yield name, {"perplexity": float(json.loads((folder / "text.json").read_text())["perplexity"])}


def healed(setup: Setup, side: Side) -> Iterator[tuple[str, Any]]:
    """Two steps of the command that trains an edited model back."""
    folder = Path(setup.folder) / f"healed-{side}"
    text = ("--data", "demo:train", "--eval-data", "demo", "--eval-tokens", 512, "--window", 64)
    steps = ("--steps", 2, "--batch", 4, "--evaluate-every", 1, "--train", "all", "--distill", "logits")
    program = ("--program", programs()["lp"])
    _command("heal", setup.demo, *program, *text, *steps, "--device", setup.on(side), "-o", folder)
    rows = list(csv.DictReader((folder.with_name(f"{folder.name}.run") / "held_out.csv").open()))
    yield "heal, two steps", {f"step {row['step']}": float(row["perplexity"]) for row in rows}


def checks(setup: Setup) -> dict[str, Check]:
    """All of them by their names, the cheapest first."""
    kinds, more = list(programs()), list(forms())
    same = judge_error(EXACT)
    both = {f"{name}: {what}": judge for name in more for what, judge in (("logits", same), ("tokens", judge_tokens))}
    ways = {f"{name}: {way} passes": f"{name}: tokens" for name in more for way in setup.ways}
    plain = {f"{name}: {way}, no kernels": f"{name}: tokens" for name in kinds for way in setup.ways}
    ranks = {f"{name}: {how}": f"{name}: tokens" for how in setup.collectives for name in more}
    evals = {"eval, factors of files": judge_numbers(EXACT), "eval, 16 bits": judge_numbers(HALF)}
    return {
        "basics": Check(basics, {"float32 products": judge_product, "cuDNN attention": judge_switch}),
        "attention": Check(attention, {"attention in 16 bits": judge_error(HALF)}),
        "edited": Check(edited, both),
        "spread": Check(spread, {f"{name} on two devices": same for name in ("low rank", *derived())}),
        "decoded": Check(decoded, dict.fromkeys(ways, judge_tokens), ways),
        "kernels": Check(without_kernels, dict.fromkeys(plain, judge_tokens), plain),
        "ranks": Check(on_ranks, dict.fromkeys(ranks, judge_tokens), ranks),
        "bench": Check(benched, {f"{name}: bench": judge_bench for name in kinds}),
        "generate": Check(generated, {"generate": judge_tokens}),
        "scan": Check(scanned, {"scan": judge_numbers(EXACT)}),
        "eval": Check(evaluated, evals),
        "heal": Check(healed, {"heal, two steps": judge_numbers(TRAINED)}),
    }


@torch.no_grad()
def _logits(model: PreTrainedModel, ids: Tensor, **more: Any) -> Tensor:
    """Of all tokens, on the CPU in float32."""
    found: Tensor = model(input_ids=ids, use_cache=False, **more).logits
    return found.float().cpu()


def _ids(model: PreTrainedModel, texts: int, tokens: int) -> Tensor:
    """Random token ids where the model takes them, the same on both sides."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(model.config.vocab_size, (texts, tokens), generator=generator).to(model.device)


@torch.no_grad()
def _greedy(model: PreTrainedModel) -> dict[str, Any]:
    """The most likely next tokens of each text, and how far the second best was behind each, next to the best."""
    ids = torch.tensor(TEXTS.prompts(model.config.vocab_size), device=model.device)
    tokens, gaps, cache = [], [], None
    for _ in range(TEXTS.new):
        output: Any = model(input_ids=ids, past_key_values=cache, use_cache=True)
        cache, best = output.past_key_values, output.logits[:, -1].float().topk(2)
        ids = best.indices[:, :1]
        tokens.append(ids[:, 0].tolist())
        gaps.append(((best.values[:, 0] - best.values[:, 1]) / best.values[:, 0].abs()).tolist())
    found = {"tokens": tokens, "gaps": gaps}
    return {name: [list(text) for text in zip(*steps, strict=True)] for name, steps in found.items()}


def _command(*arguments: object) -> str:
    """What a command of surgeon's writes to standard output."""
    said = io.StringIO()
    with redirect_stdout(said):
        code = surgeon_command(list(map(str, arguments)))
    if code:
        raise RuntimeError(f"surgeon {arguments[0]} ended with {code}: {said.getvalue().strip()} (see the log)")
    return said.getvalue()
