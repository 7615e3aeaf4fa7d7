"""Goes through what surgeon does on GPUs without one, on tensors that say they lie there.

    scripts/gpu/rehearse [--environment DIR] [--here] [--only TEXT ...] [-o TABLE.txt]

Every kind of program and every family, in passes of any shape, of fixed shapes, and recorded; one rank, and two, over
gloo or with nothing between them; drawn and scored texts; factors, a scan, an evaluation on two GPUs, and what training
is told on four: all of it is computed on the CPU, then on GPUs that are not there. Tokens and numbers are to be the
same, tensors of two devices must not meet, and what is recorded must not wait for anything. A row of the table is one
part, and the exit status is 0 if all are right. It says nothing of speed. Ranks that add up over NCCL, and kernels
that are compiled, are not in it: scripts/gpu/check runs them where there is a GPU.

The environment with PyTorch's build for GPUs takes 6 GB and is made once, in build/rehearse or in DIR; --here takes the
Python that is there, with whatever build of PyTorch it has.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

os.environ.setdefault("TRITON_INTERPRET", "1")  # before anything imports triton: there is no GPU to compile for
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # surgeon need not be installed

import torch
from accelerate import PartialState

import surgeon
from scripts.gpu.rehearsed import LONGEST, NEW, PROMPTS, Found, continued, on_rank, require_close
from surgeon.analysis.engine.measure import MeasureOptions, measure
from surgeon.analysis.engine.sharing import share
from surgeon.analysis.factors.factor_plan import FactorPlan, Making
from surgeon.analysis.factors.make_factors import make_factors
from surgeon.analysis.factors.matrices import Matrix
from surgeon.errors import first_line
from surgeon.language.operations.lowrank import Calibration
from surgeon.language.program import Program
from surgeon.opened import open_model
from surgeon.processes.files import write_text
from surgeon.provenance import versions
from surgeon.quality.data import Windows, digest_of
from surgeon.runtime.batching.request import Request, Sampling
from surgeon.runtime.batching.scheduler import Limits
from surgeon.runtime.batching.windows import blocks_for
from surgeon.runtime.comm.collectives import Alone, Unconnected
from surgeon.runtime.comm.quantised import Compressed
from surgeon.runtime.kernels import triton
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.plan.checks import make_plan
from surgeon.runtime.plan.specification import Plan
from surgeon.runtime.worker.options import RankOptions
from surgeon.runtime.worker.ranks import Ranks
from surgeon.runtime.worker.worker import ENGINE, complete
from surgeon.training.arguments import describe_devices, join_processes, share_of_batch, training_arguments
from surgeon.training.settings import TrainSettings
from tests.pretended import pretended_gpus
from tests.tiny_models import sample_sentences, save_checkpoint

FACTORS = "A0@q8,k8,v8,o8 F0@up16,gate16,down16"
PROGRAMS = {
    "dense": "A0 F0 A1 F1 A2 F2 A3 F3",
    "pruned": "A0 F0 A3 F3",
    "pair": "A0 F0 [A1 A2] [F1 F2] A3 F3",
    "attention beside MLP": "[A0 F0] [A1 F1] A2 F2 A3 F3",
    "ladder": "A0 F0 >A1 >F1 >A2 >F2 A3 F3",
    "ladder over a pair": "A0 F0 >[A1 A2] >[F1 F2] A3 F3",
    "parallel": "A0 F0 {A1 F1 | A2 F2} A3 F3",
    "tracks": "A0 F0 {A1/2:0 F1/2:0 A2/2:0 F2/2:0 | A1/2:1 F1/2:1 A2/2:1 F2/2:1} A3 F3",
    "dropped sums": "A0 F0 {A1/2:0 F1/2:0 | A1/2:1 F1/2:1} A2 F2 A3 F3",
    "average": "A0 F0 A1~A2 F1~F2 A3 F3",
    "low rank": f"{FACTORS} A1 F1 A2 F2 A3 F3",
    "width": "A0 F0 A1#1 F1#24 A2 F2 A3 F3",
    "repeat": "A0 F0 A1 F1 A1 F1 A3 F3",
}
FAMILIES = ("mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3", "opt", "gpt2", "gpt_neo", "gpt_neox")
FAMILIES += ("smollm3", "granite", "olmo3")
WAYS = ("dynamic", "static", "captured")
# What ranks do of their own, with one program each.
SHARED: dict[str, tuple[str, dict[str, Any]]] = {
    "gather": ("low rank", {"low_rank": "gather"}),
    "replicate": ("low rank", {"low_rank": "replicate"}),
    "base": ("low rank", {"low_rank": "base"}),
    "cache in rank space": ("low rank", {"low_rank": "gather", "kv": "lowrank"}),
    "sums in 8 bits": ("pair", {"compression": "int8"}),
}
GIGABYTE = 1 << 30
INTERPRETED = (4, 17), 2  # prompts and new tokens where kernels are: it takes seconds
WAITS_OF_PASS = 1  # of one that adds a token to each text: for the tokens
LAUNCHES_OF_LAYER = {"dynamic": 18, "static": 16, "kernels": 9}  # at most, of such passes with three texts


@dataclass
class Stage:
    """Where parts are rehearsed.

    Attributes:
        folder: for models and results.
    """

    folder: Path
    ended: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.close()

    def model(self, family: str = "llama") -> Path:
        """A tiny random one, in float32, with a tokenizer."""
        folder = self.folder / family
        if not (folder / "tokenizer.json").exists():
            save_checkpoint(folder, family)
        return folder

    @cached_property
    def text(self) -> Path:
        path, sentences = self.folder / "text.txt", sample_sentences()
        path.write_text("\n".join(next(sentences) for _ in range(60)) + "\n")
        return path

    @cached_property
    def ranks(self) -> Ranks:
        """Two of them, whose sums go through main memory."""
        return self.ended.enter_context(Ranks(RankOptions(2, "cpu", "gloo")))

    def plan(self, device: str, program: str | None, family: str = "llama", ranks: int = 1, **more: Any) -> Plan:
        return make_plan(self.model(family), ranks, LONGEST, program, device, dtype="float32", **more)


def passes(stage: Stage, program: str | None, way: str, family: str = "llama", kernels: bool = False) -> str:
    """One rank: every kind of pass gives what it gives on the CPU; passes that add a token wait once."""
    texts = INTERPRETED if kernels else (PROMPTS, NEW)
    expected = continued(RankEngine(stage.plan("cpu", program, family), Alone(), torch.device("cpu")), None, *texts)
    with pretended_gpus(1, kernels=kernels) as noted:
        engine = RankEngine(stage.plan("cuda", program, family, decoding=way), Alone(), torch.device("cuda", 0))
        assert (engine.graphs is not None) == (way == "captured")
        found = continued(engine, noted, *texts)
    found.require(expected)
    return _of_a_pass(found, way)


def _of_a_pass(found: Found, way: str) -> str:
    """What a pass that adds a token to each text has asked of a GPU."""
    assert len(found.waits) <= WAITS_OF_PASS, f"waits {len(found.waits)} times in a pass: {found.waits}"
    recorded, launches = found.launches["graph"], found.launches.total()
    assert recorded == (way == "captured"), f"{recorded} graphs in a pass"
    return f"{'1 graph' if recorded else f'{launches} launches'}, {len(found.waits)} wait"


def launches(stage: Stage, way: str, kernels: bool = False) -> str:
    """How many launches a layer takes: the difference between four of them and two."""
    counts, texts = [], INTERPRETED if kernels else (PROMPTS, NEW)
    for program in (PROGRAMS["dense"], PROGRAMS["pruned"]):
        with pretended_gpus(1, kernels=kernels) as noted:
            engine = RankEngine(stage.plan("cuda", program, decoding=way), Alone(), torch.device("cuda", 0))
            counts.append(continued(engine, noted, *texts).launches.total())
    each, outside = (counts[0] - counts[1]) / 2, 2 * counts[1] - counts[0]
    most = LAUNCHES_OF_LAYER["kernels" if kernels else way]
    assert each <= most, f"{each:g} launches of a layer, {most} at most"
    return f"{each:g} launches of a layer, {outside} outside"


def unconnected(stage: Stage, program: str, way: str, rank: int = 0, **more: Any) -> str:
    """One of two ranks that add nothing up, so that their passes can be recorded here: what it gives on the CPU."""
    everybody, compression = Unconnected(rank, (0, 1)), more.pop("compression", None)
    collectives = everybody if compression is None else Compressed(everybody, compression)
    plan = partial(stage.plan, program=program, ranks=2, **more)
    expected = continued(RankEngine(plan("cpu"), collectives, torch.device("cpu")))
    with pretended_gpus(2) as noted:
        engine = RankEngine(plan("cuda", decoding=way), collectives, torch.device("cuda", rank))
        found = continued(engine, noted)
    found.require(expected)
    return _of_a_pass(found, way)


def measured_ways(stage: Stage) -> str:
    """Whether first factors are gathered is measured as passes will run: by graphs where they are recorded."""
    seen = []
    for way in ("static", "captured"):
        with pretended_gpus(2) as noted:
            plan = stage.plan("cuda", PROGRAMS["low rank"], ranks=2, decoding=way)
            RankEngine(plan, Unconnected(0, (0, 1)), torch.device("cuda", 0))
            seen.append(noted.launches["graph"])
    assert seen[0] == 0 < seen[1], f"{seen} graphs"
    return f"{seen[1]} replays"


def over_gloo(stage: Stage, program: str, **more: Any) -> str:
    """Two ranks that add up: the tokens of two on the CPU, on every rank, in passes of any and of fixed shapes."""
    compression = more.pop("compression", None)
    plans = [stage.plan("cpu", program, ranks=2, **more)]
    plans += [stage.plan("cuda", program, ranks=2, decoding=way, **more) for way in ("dynamic", "static")]
    try:
        made = stage.ranks.call(on_rank, plans, compression)
    except BaseException:
        del stage.ranks  # both have ended
        raise
    for expected, *others in made:
        for found in others:
            found.require(expected)
    return f"the same on both ranks, {len(expected.tokens)} passes"


def requests(stage: Stage) -> str:
    """Greedy, drawn, penalised and scored texts together, as a service computes them."""
    wanted = [Sampling(), Sampling(temperature=0.8, top_p=0.9, top_k=20, min_p=0.01, seed=1, logprobs=2)]
    wanted += [Sampling(repetition_penalty=1.2), Sampling(prompt_logprobs=2)]
    asked = [
        Request(number, (5 + number,) * 20, replace(one, max_new_tokens=NEW, ignore_end=True))
        for number, one in enumerate(wanted)
    ]

    def texts(device: str) -> Any:
        engine = RankEngine(stage.plan(device, None), Alone(), torch.device(device))
        rank: Any = SimpleNamespace(rank=0, engines={ENGINE: engine}, sender=MagicMock(), notify=lambda _: None)
        outputs = complete(rank, asked, 4 * blocks_for(LONGEST), Limits(4, LONGEST, pass_tokens=16))[0]
        return [(one.request, one.token) for one in outputs]

    expected = texts("cpu")
    with pretended_gpus(1):
        found = texts("cuda")
    assert found == expected, f"other tokens: {found} in place of {expected}"
    return f"{len(found)} tokens"


def edited(stage: Stage, program: str) -> str:
    """A program on a model of transformers that lies on a GPU: its logits."""
    ids = torch.randint(3, 60, (2, 24), generator=torch.Generator().manual_seed(1))
    expected = surgeon.edit(surgeon.load(stage.model()), program)(input_ids=ids).logits.detach()
    with pretended_gpus(1) as noted:
        model = surgeon.edit(surgeon.load(stage.model()).to("cuda"), program)
        found = model(input_ids=ids.to("cuda")).logits
    assert found.device.type == "cuda", f"on {found.device}"
    require_close(found.held, expected)
    return f"{noted.launches.total()} launches"


def similar(stage: Stage) -> str:
    """How alike streams are, and what becomes of angles and influence."""

    def numbers(where: str) -> torch.Tensor:
        found = surgeon.similarity(stage.model(), stage.text, stage.folder / f"alike-{where}", tokens=240, window=24)
        return torch.tensor(found.table().select_dtypes("number").fillna(0).to_numpy())

    expected = numbers("cpu")
    with pretended_gpus(1) as noted:
        found = numbers("cuda")
    assert noted.devices == {"cuda:0"}, f"computed on {noted.devices}"
    require_close(found, expected, 1e-3)
    return f"{expected.numel()} numbers"


def made_factors(stage: Stage, calibration: dict[str, Any]) -> str:
    """Factors made for a text on a GPU, and the divergence of the program that has them, read from their files."""
    program = Program.parse(PROGRAMS["low rank"])
    ids = torch.randint(3, 60, (4, 24), generator=torch.Generator().manual_seed(1))
    windows = Windows(ids, "random", digest_of(ids))
    targets = [Matrix(replace(one, piece=None), role) for one in program.sublayers() for role, _ in one.ranks]

    def made(device: str) -> list[float]:
        model, folder = surgeon.load(stage.model()).to(device), stage.folder / f"factors-{device}"
        shutil.rmtree(folder, ignore_errors=True)
        plan = FactorPlan(program, {one: Making("whitened") for one in targets}, Calibration(**calibration))
        factors = make_factors(model, plan, windows, folder, model_hash="x")
        options = MeasureOptions(2, factors=factors.source)
        parts = measure(model, ids, share([Program.parse(PROGRAMS["dense"]), program]), options)
        divergences = [float(part.quality.divergence.mean()) for part in parts if part.program == program]
        return [*(one.loss for one in factors.facts.values()), *divergences]

    expected = made("cpu")
    with pretended_gpus(1):
        found = made("cuda")
    require_close(found, expected, 1e-3)
    return f"{len(targets)} matrices"


def scanned(stage: Stage, room: int, layer_by_layer: bool) -> str:
    """A scan on a GPU with so many bytes left, read layer by layer or not."""

    def cells(where: str) -> list[float]:
        folder = stage.folder / f"scan-{where}-{room}"
        text = {"tokens": 240, "window": 24}
        found = surgeon.scan(stage.model(), stage.text, folder, operations=["merge", "width"], layers="1:4", **text)
        return [float(one) for one in found.cells["perplexity"]]

    expected = cells("cpu")
    with pretended_gpus(1, room), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = cells("cuda")
    assert layer_by_layer == any("read layer by layer" in str(one.message) for one in said), "read otherwise"
    require_close(found, expected)
    return f"{len(found)} cells"


def evaluated(stage: Stage, program: str) -> str:
    """Perplexity of an edited model whose layers lie on two GPUs, as none has room for all of them."""

    def perplexity(device: str) -> float:
        found = surgeon.evaluate(stage.model(), stage.text, program=program, tokens=240, window=24, device=device)
        assert found.text is not None
        return found.text.perplexity

    expected = perplexity("cpu")
    with pretended_gpus(2, int(0.8 * open_model(stage.model()).bytes_on("cuda"))) as noted:
        found = perplexity("cuda")
    assert noted.devices == {"cuda:0", "cuda:1"}, f"computed on {noted.devices}"
    require_close(found, expected)
    return f"perplexity {found:.4g}"


def training(stage: Stage) -> str:
    """One process of a machine with four GPUs trains on one of them, and its batch is what was asked for."""
    settings = TrainSettings(batch=8, micro_batch=4)
    with pretended_gpus(4):
        PartialState._reset_state()
        try:
            processes, where = join_processes("auto")
            share = share_of_batch(settings, processes.num_processes)
            made = training_arguments(settings, stage.folder / "run", 1, share, where)
            assert (made.device.type, made.n_gpu, made.train_batch_size) == ("cuda", 1, 4), made
            assert made.gradient_accumulation_steps == 2, made
            return describe_devices(processes, where).partition(";")[0]
        finally:
            PartialState._reset_state()


Part = Callable[[Stage], str]


def parts() -> dict[str, Part]:
    """All there is to rehearse, by what the table calls it."""
    found: dict[str, Part] = {}
    for name, program in PROGRAMS.items():
        found |= {f"{name}: {way} passes": partial(passes, program=program, way=way) for way in WAYS}
        found[f"inside transformers, {name}"] = partial(edited, program=program)
    for family in FAMILIES:
        found |= {f"{family}: {way} passes": partial(passes, program=None, way=way, family=family) for way in WAYS}
    found |= {f"launches of {way} passes": partial(launches, way=way) for way in ("dynamic", "static")}
    if triton.missing() is None:
        found["launches of static passes, by kernels"] = partial(launches, way="static", kernels=True)
        for name in ("dense", "ladder", "low rank"):
            found[f"{name}: captured passes, by kernels"] = partial(
                passes, program=PROGRAMS[name], way="captured", kernels=True
            )
        found["gemma2: captured passes, by kernels"] = partial(
            passes, program=None, way="captured", family="gemma2", kernels=True
        )
    of_ranks = {name: (program, {}) for name, program in PROGRAMS.items()}
    of_ranks |= {name: (PROGRAMS[program], more) for name, (program, more) in SHARED.items()}
    for name, (program, more) in of_ranks.items():
        if name != "low rank":  # whether first factors are gathered follows from times, and here numbers from that
            found[f"rank 1 of 2, {name}: captured"] = partial(
                unconnected, program=program, way="captured", rank=1, **more
            )
        found[f"two ranks over gloo, {name}"] = partial(over_gloo, program=program, **more)
    return found | {
        "factors gathered or not, measured": measured_ways,
        "drawn and scored texts": requests,
        "factors": partial(made_factors, calibration={}),
        "factors, one after the other": partial(made_factors, calibration={"sequential": True}),
        "similarity": similar,
        "scan": partial(scanned, room=1 << 30, layer_by_layer=False),
        "scan, layer by layer": partial(scanned, room=80 << 20, layer_by_layer=True),
        "evaluation on two GPUs": partial(evaluated, program=PROGRAMS["average"]),
        "training on a machine with four": training,
    }


def rehearse(asked: Sequence[str], folder: Path, say: Callable[[str], None]) -> int:
    """Say the table row by row; returns how many parts are wrong."""
    wrong = 0
    with Stage(folder) as stage:
        for name in asked:
            began = time.monotonic()
            try:
                found, verdict = parts()[name](stage), "right"
            except Exception as error:  # noqa: BLE001 - whatever it is, it is what the row is to say
                found, verdict, wrong = f"{type(error).__name__}: {first_line(error)}", "WRONG", wrong + 1
            say(f"{name:<48}{found:<40} {time.monotonic() - began:>5.1f} {verdict}")
    say(f"{len(asked) - wrong} of {len(asked)} parts are right" + (f", {wrong} WRONG" if wrong else ""))
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="scripts/gpu/rehearse", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--environment", metavar="DIR", help="where the environment lies, or is made")
    parser.add_argument("--here", action="store_true", help="make no environment")
    parser.add_argument("--only", nargs="+", metavar="TEXT", default=[""], help="parts whose names have one of these")
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the table here, too")
    options = parser.parse_args(arguments)
    asked = [name for name in parts() if any(text in name for text in options.only)]
    if not asked:
        parser.error(f"no part has {' or '.join(options.only)} in its name; they are {', '.join(parts())}")
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        print(line, flush=True)

    say(", ".join(f"{name} {version}" for name, version in versions().items()))
    with tempfile.TemporaryDirectory() as folder:
        wrong = rehearse(asked, Path(folder), say)
    if options.output is not None:
        write_text(options.output, "\n".join(lines) + "\n")
    return min(1, wrong)


if __name__ == "__main__":
    from scripts.gpu import rehearsal  # where ranks find what they are to run

    sys.exit(rehearsal.main())
