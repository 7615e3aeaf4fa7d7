"""Parts of a rehearsal on models of transformers: edits, factors, scans, evaluations, what training is told."""

from __future__ import annotations

import json
import shutil
import warnings
from dataclasses import replace
from typing import Any

import torch
from accelerate import PartialState

import surgeon
from surgeon.analysis.engine.measure import MeasureOptions, measure
from surgeon.analysis.engine.sharing import share
from surgeon.analysis.factors.factor_plan import FactorPlan, Making
from surgeon.analysis.factors.make_factors import make_factors
from surgeon.analysis.factors.matrices import Matrix
from surgeon.language.operations.lowrank import Calibration
from surgeon.language.program import Program
from surgeon.opened import open_model
from surgeon.quality.data import Windows, digest_of
from surgeon.training.settings import (
    TrainSettings,
    describe_devices,
    join_processes,
    share_of_batch,
    training_arguments,
)
from tests.pretended import pretended_gpus
from tests.scripts.gpu.rehearsed import require_close
from tests.scripts.gpu.stage import PROGRAMS, Stage


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
        found = surgeon.similarity(
            stage.model(), stage.text, stage.folder / f"alike-{where}", tokens=240, window=24
        )
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
    targets = [
        Matrix(replace(one, piece=None), role) for one in program.sublayers() for role, _ in one.ranks
    ]

    def made(device: str) -> list[float]:
        model = surgeon.load(stage.model()).to(device)
        folder = stage.folder / f"factors-{device}"
        shutil.rmtree(folder, ignore_errors=True)
        plan = FactorPlan(
            program, {one: Making("whitened") for one in targets}, Calibration(**calibration)
        )
        factors, _ = make_factors(model, plan, windows, folder, model_hash="x")
        options = MeasureOptions(2, factors=factors)
        parts = measure(model, ids, share([Program.parse(PROGRAMS["dense"]), program]), options)
        divergences = [
            float(part.quality["divergence"].mean()) for part in parts if part.program == program
        ]
        record = json.loads((folder / "factors.json").read_text())
        return [*(one["loss"] for one in record["matrices"].values()), *divergences]

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
        found = surgeon.scan(
            stage.model(), stage.text, folder, operations=["merge", "width"], layers="1:4", **text
        )
        return [float(one) for one in found.cells["perplexity"]]

    expected = cells("cpu")
    with pretended_gpus(1, room), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = cells("cuda")
    assert layer_by_layer == any("read layer by layer" in str(one.message) for one in said), (
        "read otherwise"
    )
    require_close(found, expected)
    return f"{len(found)} cells"


def evaluated(stage: Stage, program: str) -> str:
    """Perplexity of an edited model whose layers lie on two GPUs, as none has room for all of them."""

    def perplexity(device: str) -> float:
        found = surgeon.evaluate(
            stage.model(), stage.text, program=program, tokens=240, window=24, device=device
        )
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
