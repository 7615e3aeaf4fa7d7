"""`surgeon.train_sweep`: programs, seeds and learning rates beside each other, each a model from scratch."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from surgeon.errors import Diverged
from surgeon.exports.plan import check_storage
from surgeon.library.train import as_asked, train
from surgeon.library.training import say
from surgeon.named import public
from surgeon.processes.files import make_folder
from surgeon.provenance import provenance
from surgeon.quality.summary import Values, known_interval
from surgeon.results.training import NO_INTERVAL, OnHeldOut, ScratchRun, WithInterval
from surgeon.results.training_sweep import DIVERGED, TrainingSweep
from surgeon.training.arguments import join_processes
from surgeon.training.resume import RECORD_FILE, add_to_record, read_record, require_same, run_folder
from surgeon.training.run_log import HELD_OUT_FILE, read_rows
from surgeon.training.scratch.build import Blueprint, blueprint
from surgeon.training.scratch.config import parse_config
from surgeon.training.scratch.sweep import SweptModel, parse_sweep, read_sweep

_SAME = ["program", "learning_rate"]  # of models that differ by their seeds alone


def train_sweep(
    config: str | Path | Mapping[str, Any],
    output: str | Path,
    *,
    steps: int | None = None,
    scale: float | None = None,
    tokenizer: str | None = None,
    data: str | Mapping[str, float] | None = None,
    eval_data: str | None = None,
    arguments: Mapping[str, Any] | None = None,
    form: str = "auto",
    dtype: str = "float32",
    device: str = "auto",
) -> TrainingSweep | None:
    """Train every program of a sweep with every learning rate and seed, and compare them.

    Each model is what `surgeon.train` makes of its configuration. A sweep that was killed goes on where it was: models
    that are there are not trained again. One with more programs, seeds or rates goes on in the same folder, too.

    Args:
        config: a YAML file, or its keys as a mapping, with the key `sweep` (training/scratch/sweep.py).
        output: folder in which each model has a checkpoint and a run, and of the tables and pictures.
        steps, scale, tokenizer, data, eval_data, arguments, form, dtype, device: as of `surgeon.train`, for each model.

    Returns:
        What lies in the folder; None in every process but the first, where there are several (torchrun).

    Raises:
        FileNotFoundError, ValueError: as `surgeon.train`, for the first model that cannot be trained, before any is; or
            if a run in the folder is of another one.
        NotProven, OSError: as `surgeon.train`.
    """
    folder = Path(output)
    check_storage(form, dtype)
    read = parse_sweep(json.dumps(config)) if isinstance(config, Mapping) else read_sweep(Path(config))
    texts = {"tokenizer": tokenizer, "data": data, "eval_data": eval_data}
    models = [
        SweptModel(one.program, as_asked(one.config, texts, scale, steps=steps, arguments=arguments or {}))
        for one in read
    ]
    plans = [blueprint(model.config) for model in models]
    folders = [run_folder(folder / model.name) for model in models]
    done = [_is_finished(plan, run) for plan, run in zip(plans, folders, strict=True)]
    processes, _ = join_processes(device)
    make_folder(folder)
    for place, (model, run) in enumerate(zip(models, folders, strict=True)):
        if processes.is_main_process:
            say(f"{place + 1} of {len(models)}: {model.name}{', which is there' if done[place] else ''}")
        if done[place]:
            continue
        try:  # its checkpoint can be there all the same, where it was killed before its run ended
            train(model.config, folder / model.name, form=form, dtype=dtype, overwrite=run.is_dir(), device=device)
        except Diverged as error:  # in every process, at the same step
            if processes.is_main_process:
                say(f"{model.name} has diverged: {str(error).partition(';')[0]}; the sweep goes on")
                add_to_record(run, {DIVERGED: str(error), "configuration": model.config.to_yaml(public)})
    if not processes.is_main_process:
        return None
    records = [read_record(run) for run in folders]
    table = pd.DataFrame([_row(model, record) for model, record in zip(models, records, strict=True)])
    curves = curves_of(models, [pd.DataFrame(read_rows(run / HELD_OUT_FILE), dtype=float) for run in folders])
    configurations = {model.name: model.config.to_yaml(public) for model in models}
    data = next((record["data"] for record in records if "data" in record), None)
    record = provenance("", "", data=data, configurations=configurations)
    return TrainingSweep(summarised(table), table, curves, record=record).save(folder)


def _is_finished(plan: Blueprint, folder: Path) -> bool:
    """Whether a run is there that has ended, or diverged, which it would again.

    Raises:
        ValueError: if it is of something else.
    """
    record = read_record(folder) if (folder / RECORD_FILE).is_file() else {}
    if not record.keys() & {ScratchRun.LAST, DIVERGED}:
        return False
    texts = plan.texts()
    digests = {"data": texts.training.digest, "held_out": texts.held_out.digest}
    wanted = plan.identity() | {"settings": plan.config.settings.to_json()} | digests
    there = {name: record["identity"].get(name) for name in wanted}
    cut = [config.racks and vars(config.racks) for config in (parse_config(record["configuration"]), plan.config)]
    require_same(folder, there | {"racks": cut[0]}, json.loads(json.dumps(wanted | {"racks": cut[1]})))
    return True


def _row(model: SweptModel, record: Mapping[str, Any]) -> dict[str, Any]:
    settings, diverged = model.config.settings, record.get(DIVERGED, "")
    known = None if diverged else OnHeldOut.of(record[ScratchRun.LAST]).perplexity
    perplexity = known or WithInterval(math.inf, *NO_INTERVAL)
    ends = {"": perplexity.value, "_low": perplexity.low, "_high": perplexity.high}
    return {
        "run": model.name,
        "program": model.program,
        "learning_rate": settings.rate,
        "seed": settings.seed,
        **{name: record.get(name, math.nan) for name in ("parameters", "steps", "tokens", "seconds")},
        **{f"nll{end}": math.log(value) for end, value in ends.items()},
        **{f"perplexity{end}": value for end, value in ends.items()},
        DIVERGED: diverged.partition(",")[0],
    }


def summarised(runs: pd.DataFrame) -> pd.DataFrame:
    """Means over seeds of a sweep's models, and how far they are from the first program's.

    Args:
        runs: a row for each, as in `sweep.csv`.

    Returns:
        A row for each program and learning rate, as in `summary.csv`. Differences are taken between models of one seed
        and rate; intervals are Student's t over seeds, NaN with fewer than two. The loss of a model that has diverged
        is infinite, and so is the mean over its program's seeds; differences from such a mean are not known.
    """
    first, rows = runs["program"].iloc[0], []
    for (program, rate), same in runs.groupby(_SAME, sort=False):
        losses = same.set_index("seed")["nll"]
        others = runs[(runs["program"] == first) & (runs["learning_rate"] == rate)].set_index("seed")["nll"]
        both = program != first and np.isfinite([*losses, *others]).all()
        apart = (losses - others).dropna() if both else losses[:0]
        rows.append(
            {"program": program, "learning_rate": rate, "seeds": len(losses), DIVERGED: int(np.isinf(losses).sum())}
            | _mean("nll", losses.to_numpy(np.float64))
            | {"perplexity": float(np.exp(losses.mean()))}
            | _mean("difference", apart.to_numpy(np.float64))
        )
    return pd.DataFrame(rows)


def _mean(name: str, values: Values) -> dict[str, float]:
    low, high = known_interval(values) or (math.nan, math.nan)
    return {name: float(values.mean()) if len(values) else math.nan, f"{name}_low": low, f"{name}_high": high}


def curves_of(models: Sequence[SweptModel], held_out: Sequence[pd.DataFrame]) -> pd.DataFrame:
    """Held-out perplexity as training went on: over seeds the geometric mean, the least and the highest.

    Args:
        held_out: of each model, as in its run's `held_out.csv`; one that has diverged ends there.

    Returns:
        A row for each program, learning rate and step that was measured, as in `curves.csv`.
    """
    measured = pd.concat([_measured(*each) for each in zip(models, held_out, strict=True) if len(each[1])])
    over_seeds = measured.groupby([*_SAME, "step", "tokens"], sort=False)["nll"]
    means = over_seeds.agg(["mean", "min", "max", "count"]).reset_index()
    means[["mean", "min", "max"]] = np.exp(means[["mean", "min", "max"]])
    return means.rename(columns={"mean": "perplexity", "min": "least", "max": "highest", "count": "seeds"})


def _measured(model: SweptModel, held_out: pd.DataFrame) -> pd.DataFrame:
    settings = model.config.settings
    return held_out[["step", "perplexity"]].assign(
        program=model.program,
        learning_rate=settings.rate,
        tokens=held_out["step"] * settings.batch * model.config.window,
        nll=np.log(held_out["perplexity"]),
    )
