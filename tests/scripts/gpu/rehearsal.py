"""What surgeon does on GPUs, gone through without one, on tensors that say they lie there.

Every kind of program and every family, in passes of any shape, of fixed shapes, and recorded; one rank, and two, over
gloo or with nothing between them; passes recorded before texts come; ways for small sums; drawn and scored texts;
factors, a scan, an evaluation on two GPUs, and what training is told on four: all of it is computed on the CPU, then on
GPUs that are not there. Tokens and numbers are to be the same, tensors of two devices must not meet, and what is
recorded must not wait for anything. It says nothing of speed. Ranks that add up over NCCL, and kernels that are
compiled, are not in it: scripts/gpu/check runs them where there is a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock
from unittest.mock import MagicMock

import torch

from surgeon.runtime.batching.blocks import blocks_for
from surgeon.runtime.batching.request import Request, Sampling
from surgeon.runtime.batching.scheduler import Limits
from surgeon.runtime.comm.collectives import Alone, Compressed, Unconnected
from surgeon.runtime.kernels import build
from surgeon.runtime.kernels.recording import CudaRecorder
from surgeon.runtime.model.engine import RankEngine
from surgeon.runtime.worker.worker import ENGINE, complete
from tests.pretended import pretended_gpus
from tests.scripts.gpu.rehearsed import LONGEST, NEW, PROMPTS, Found, continued, on_rank, through_memory
from tests.scripts.gpu.rehearsed_models import (
    edited,
    evaluated,
    made_factors,
    scanned,
    similar,
    training,
)
from tests.scripts.gpu.stage import PROGRAMS, Stage

FAMILIES = (
    "mistral",
    "qwen2",
    "qwen3",
    "gemma2",
    "gemma3_text",
    "phi3",
    "opt",
    "gpt2",
    "gpt_neo",
    "gpt_neox",
)
FAMILIES += ("smollm3", "granite", "olmo3", "glm4", "cohere2", "ministral3")
DECODINGS: dict[str, Any] = {"dynamic": "dynamic", "static": "static", "captured": "auto"}
WAYS = tuple(DECODINGS)
# What ranks do of their own, with one program each.
SHARED: dict[str, tuple[str, dict[str, Any]]] = {
    "gather": ("low rank", {"low_rank": "gather"}),
    "replicate": ("low rank", {"low_rank": "replicate"}),
    "base": ("low rank", {"low_rank": "base"}),
    "cache in rank space": ("low rank", {"low_rank": "gather", "kv": "lowrank"}),
    "sums in 8 bits": ("pair", {"compression": "int8"}),
}
INTERPRETED = (4, 17), 2  # prompts and new tokens where kernels are: it takes seconds
WAITS_OF_PASS = 1  # of one that adds a token to each text: for the tokens
# At most, of such passes with three texts.
LAUNCHES_OF_LAYER = {"dynamic": 18, "static": 16, "kernels": 9}


def passes(
    stage: Stage, program: str | None, way: str, family: str = "llama", kernels: bool = False
) -> str:
    """One rank: every kind of pass gives what it gives on the CPU; passes that add a token wait once."""
    texts = INTERPRETED if kernels else (PROMPTS, NEW)
    expected = continued(
        RankEngine(stage.plan("cpu", program, family), Alone(), torch.device("cpu")), None, *texts
    )
    with pretended_gpus(1, kernels=kernels) as noted:
        engine = RankEngine(
            stage.plan("cuda", program, family, decoding=DECODINGS[way]),
            Alone(),
            torch.device("cuda", 0),
        )
        assert (engine.model.program.graphs is not None) == (way == "captured")
        found = continued(engine, noted, *texts)
    found.require(expected)
    return _of_a_pass(found, way)


def _of_a_pass(found: Found, way: str) -> str:
    """What a pass that adds a token to each text has asked of a GPU."""
    assert len(found.waits) <= WAITS_OF_PASS, f"waits {len(found.waits)} times in a pass: {found.waits}"
    recorded = found.launches["graph"]
    launches = found.launches.total()
    assert recorded == (way == "captured"), f"{recorded} graphs in a pass"
    return f"{'1 graph' if recorded else f'{launches} launches'}, {len(found.waits)} wait"


def launches(stage: Stage, way: str, kernels: bool = False) -> str:
    """How many launches a layer takes: the difference between four of them and two."""
    counts = []
    texts = INTERPRETED if kernels else (PROMPTS, NEW)
    for program in (PROGRAMS["dense"], PROGRAMS["pruned"]):
        with pretended_gpus(1, kernels=kernels) as noted:
            engine = RankEngine(
                stage.plan("cuda", program, decoding=DECODINGS[way]), Alone(), torch.device("cuda", 0)
            )
            counts.append(continued(engine, noted, *texts).launches.total())
    each = (counts[0] - counts[1]) / 2
    outside = 2 * counts[1] - counts[0]
    most = LAUNCHES_OF_LAYER["kernels" if kernels else way]
    assert each <= most, f"{each:g} launches of a layer, {most} at most"
    return f"{each:g} launches of a layer, {outside} outside"


def unconnected(stage: Stage, program: str, way: str, rank: int = 0, **more: Any) -> str:
    """One of two ranks that add nothing up, so that their passes can be recorded here: what it gives on the CPU."""
    everybody = Unconnected(rank, (0, 1))
    compression = more.pop("compression", None)
    collectives = everybody if compression is None else Compressed(everybody, compression)
    plan = partial(stage.plan, program=program, ranks=2, **more)
    expected = continued(RankEngine(plan("cpu"), collectives, torch.device("cpu")))
    with pretended_gpus(2) as noted:
        engine = RankEngine(
            plan("cuda", decoding=DECODINGS[way]), collectives, torch.device("cuda", rank)
        )
        found = continued(engine, noted)
    found.require(expected)
    return _of_a_pass(found, way)


def measured_ways(stage: Stage) -> str:
    """Whether first factors are gathered is measured as passes will run: by graphs where they are recorded."""
    seen = []
    for way in ("static", "captured"):
        with pretended_gpus(2) as noted:
            plan = stage.plan("cuda", PROGRAMS["low rank"], ranks=2, decoding=DECODINGS[way])
            RankEngine(plan, Unconnected(0, (0, 1)), torch.device("cuda", 0))
            seen.append(noted.launches["graph"])
    assert seen[0] == 0 < seen[1], f"{seen} graphs"
    return f"{seen[1]} replays"


def over_gloo(stage: Stage, program: str, **more: Any) -> str:
    """Two ranks that add up: the tokens of two on the CPU, on every rank, in passes of any and of fixed shapes."""
    compression = more.pop("compression", None)
    plans = [stage.plan("cpu", program, ranks=2, **more)]
    plans += [
        stage.plan("cuda", program, ranks=2, decoding=way, **more) for way in ("dynamic", "static")
    ]
    try:
        made = stage.ranks.call(on_rank, plans, compression)
    except BaseException:
        del stage.ranks  # both have ended
        raise
    for expected, *others in made:
        for found in others:
            found.require(expected)
    return f"the same on both ranks, {len(expected.tokens)} passes"


def recorded_at_start(stage: Stage, program: str) -> str:
    """Passes that were recorded before texts came are those that texts come to: none is recorded behind them."""
    expected = continued(RankEngine(stage.plan("cpu", program), Alone(), torch.device("cpu")))
    counts = [0]
    record = CudaRecorder.__call__

    def counting(recorder: CudaRecorder, compute: Callable[[], Any]) -> Callable[[], Any]:
        counts[-1] += 1
        return record(recorder, compute)

    with pretended_gpus(1) as noted, mock.patch.object(CudaRecorder, "__call__", counting):
        engine = RankEngine(
            stage.plan("cuda", program, decoding="auto"), Alone(), torch.device("cuda", 0)
        )
        continued(engine, noted, ahead=lambda: counts.append(0)).require(expected)
    assert counts[0] > 0 == counts[1], f"{counts[0]} recorded at the start, {counts[1]} when texts came"
    return f"{counts[0]} graphs at the start, none later"


def through_symmetric_memory(stage: Stage, program: str, shared: bool = False) -> str:
    """Two ranks choose ways for small sums alike, late ones go beside the current stream, and tokens are the CPU's.

    Args:
        shared: whether they share a GPU; gloo, in which the host waits, sends nothing of a recorded pass then.
    """
    plans = [
        stage.plan("cpu", program, ranks=2),
        stage.plan("cuda", program, ranks=2, decoding="auto" if shared else "static"),
    ]
    made = stage.ranks.call(through_memory, plans, shared)
    for expected, found, said, memory in made:
        found.require(expected)
        assert said == f"one shot up to 4.19 MB, {'gloo' if shared else 'NCCL'} above", said
        assert found.launches["graph"] == shared, found.launches
        assert {(name, aside) for name, _, aside in memory.sums} >= {
            ("one shot", False),
            ("one shot", True),
        }
    sums = [memory.sums for *_, memory in made]
    assert sums[0] == sums[1], "the ranks go different ways"
    return f"{len(sums[0])} sums, {sum(aside for *_, aside in sums[0])} aside"


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
        rank: Any = SimpleNamespace(
            rank=0, engines={ENGINE: engine}, sender=MagicMock(), notify=lambda _: None
        )
        outputs = complete(rank, asked, 4 * blocks_for(LONGEST), Limits(4, LONGEST, pass_tokens=16))[0]
        return [(one.request, one.token) for one in outputs]

    expected = texts("cpu")
    with pretended_gpus(1):
        found = texts("cuda")
    assert found == expected, f"other tokens: {found} in place of {expected}"
    return f"{len(found)} tokens"


Part = Callable[[Stage], str]


def parts() -> dict[str, Part]:
    """All there is to rehearse, by name."""
    found: dict[str, Part] = {}
    for name, program in PROGRAMS.items():
        found |= {f"{name}: {way} passes": partial(passes, program=program, way=way) for way in WAYS}
        found[f"inside transformers, {name}"] = partial(edited, program=program)
    for family in FAMILIES:
        found |= {
            f"{family}: {way} passes": partial(passes, program=None, way=way, family=family)
            for way in WAYS
        }
    found |= {f"launches of {way} passes": partial(launches, way=way) for way in ("dynamic", "static")}
    if build.reason_without() is None:
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
        # Whether first factors are gathered follows from times, and here numbers from that.
        if name != "low rank":
            found[f"rank 1 of 2, {name}: captured"] = partial(
                unconnected, program=program, way="captured", rank=1, **more
            )
        found[f"two ranks over gloo, {name}"] = partial(over_gloo, program=program, **more)
    return found | {
        "recorded at the start": partial(recorded_at_start, program=PROGRAMS["ladder over a pair"]),
        "two ranks that share a GPU, recorded": partial(
            through_symmetric_memory, program=PROGRAMS["ladder"], shared=True
        ),
        "two ranks over gloo, symmetric memory": partial(
            through_symmetric_memory, program=PROGRAMS["ladder"]
        ),
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
