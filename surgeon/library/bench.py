"""`surgeon.bench`: how fast programs run on ranks, against each other, and where the time of a pass goes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Unpack

from surgeon.benchmarks.compressed import divergence_of_compressed, windows_to_compare
from surgeon.benchmarks.measure import RankBench
from surgeon.benchmarks.plans import Needs, plan_candidates
from surgeon.benchmarks.tables import bench_record, bench_table
from surgeon.benchmarks.trace import Wires, chrome_trace
from surgeon.cost.candidates import open_candidates
from surgeon.cost.workload import Workload
from surgeon.findings.bench import Benchmark
from surgeon.language.program import Program
from surgeon.library.opening import as_list, as_range, check_counts
from surgeon.opened import EditedModel, Model
from surgeon.processes.files import make_folder, write_text
from surgeon.processes.torchrun import read_environment
from surgeon.progress import progress
from surgeon.provenance import provenance
from surgeon.quality.summary import mean_divergence
from surgeon.runtime.kernels.used import kernels_used
from surgeon.runtime.plan.specification import Ways
from surgeon.runtime.worker.options import RankOptions
from surgeon.runtime.worker.ranks import Ranks
from surgeon.words import plural

COMPARED_TOKENS = 1024  # predicted with exact and with compressed reductions
RANDOM = "random tokens"


def bench(
    model: str | Path | Model | EditedModel,
    *,
    compare: str | Path | Program | Sequence[str | Path | Program] = (),
    layers: range | str | None = None,
    program: Program | str | None = None,
    batch: int | Sequence[int] = 1,
    prompt: int = 64,
    new: int = 32,
    rounds: int = 5,
    seed: int = 0,
    ranks: int | RankOptions = 2,
    data: str | None = None,
    trace: str | Path | None = None,
    output: str | Path | None = None,
    **ways: Unpack[Ways],
) -> Benchmark:
    """Measure how fast programs run on ranks; all are loaded by the same ranks and measured in turns.

    Args:
        model: a checkpoint's folder, a hub name, "demo", a recipe (.yaml), or a model that is open, edited or not.
        compare: more checkpoints, recipes, programs, or variants of the model by name ("lp"), "halves", "upper-bound".
        layers: that variants change; "4:30" is layers 4 to 29. All but the first and last two by default.
        program: of the model, instead of its own.
        batch: texts that are computed together; several sizes in turns.
        prompt, new: tokens of each prompt, which are random, and to add to each.
        rounds: how often everything is measured.
        seed: of the random tokens.
        ranks: how many, on GPUs where there is one for each, or what they are in full.
        data: text to measure the divergence of compressed reductions on; random tokens by default.
        trace: a file for a timeline of every program's prefill and one decoding pass; on GPUs one for each rank beside
            it, of what `torch.profiler` sees.
        output: folder for bench.csv, bench.json and bench.png.
        ways: dtype, decoding, low_rank, kv: how it is computed, as of `Ways`; a `kv` of "lowrank" is for the programs
            that have factors of k and v.

    Raises:
        FileNotFoundError, ValueError: if one of them cannot be used or cannot run so, or there can be no trace.
        RankFailed: if a rank fails.
    """
    ranks = RankOptions.of(ranks)
    if data is not None and ranks.compression is None:
        raise ValueError(f"{data} is for measuring what compressed reductions change; have them compressed, too")
    check_counts(rounds=rounds)
    if not (sizes := [batch] if isinstance(batch, int) else batch):
        raise ValueError("batch is empty; give how many texts are computed together, one number or several")
    loads = [Workload(size, prompt, new, seed) for size in sizes]
    candidates = open_candidates(model, as_list(compare), program, as_range(layers), weights=True)
    needs = Needs(ranks.ranks, prompt + new, ranks.device, ways)
    plans, unconnected = plan_candidates(candidates, needs), {one.name for one in candidates if not one.connected}
    traced, folder = None if trace is None else Path(trace), None if output is None else Path(output)
    if traced is not None:
        _check_trace(traced)
    if folder is not None:
        make_folder(folder)
    kind = None if ranks.ranks == 1 else ranks.compression
    windows = {
        name: windows_to_compare(plan, data, prompt + new, COMPARED_TOKENS, seed)
        for name, plan in plans.items()
        if kind is not None and name not in unconnected
    }
    with Ranks(ranks) as running:
        measured = RankBench.load(running, plans, unconnected)
        with progress("bench", rounds * len(loads) * len(plans), "runs") as advance:
            results = measured.measure(loads, rounds, advance)
        traces = () if traced is None else _write_trace(measured, loads[0], traced)
        divergence = {
            name: divergence_of_compressed(running, plans[name], texts, kind, name)
            for name, texts in windows.items()
            if kind is not None
        }
    place, load = f"{plural(ranks.ranks, 'rank')} ({ranks})", loads[0]
    heading = f"{place}, prompt {load.prompt}, {load.new} new, {plural(rounds, 'round')}"
    used = dict.fromkeys(kernels_used(ranks.device, plan.dtype) for plan in plans.values())
    settings: dict[str, Any] = {"heading": heading, "seed": load.seed, "place": place, "rounds": rounds}
    settings["kernels"] = ", ".join(used)
    settings |= {"experts": measured.experts} if measured.experts else {}
    if divergence:
        predicted = min(sum(len(window) - 1 for window in texts) for texts in windows.values())
        settings |= {"compression": kind, "compared": data or RANDOM, "predicted": predicted}
        settings["divergence"] = {name: mean_divergence(values) for name, values in divergence.items()}
    name = model.name if isinstance(model, Model | EditedModel) else str(model)
    found = Benchmark(
        bench_table(results, divergence), results, traces, record=settings | {"model": name}, files=traces
    )
    if folder is None:
        return found
    record = provenance(name, candidates[0].model.hash, **settings, results=bench_record(results))
    return replace(found, record=record).save(folder)


def _write_trace(measured: RankBench, load: Workload, path: Path) -> tuple[Path, ...]:
    """A timeline of what processes do, which on GPUs are those of a profiler; its files."""
    options = measured.ranks.options
    if options.device == "cuda":
        return measured.profile(load, path)
    timeline = chrome_trace(measured.trace(load), Wires(options.collectives == "shm", options.link))
    write_text(path, json.dumps(timeline) + "\n")
    return (path,)


def _check_trace(path: Path) -> None:
    """Say what is wrong with a trace before anything is measured.

    Raises:
        ValueError: if there can be none, or not there.
    """
    if read_environment() is not None:
        raise ValueError("a trace puts all ranks on one clock, and machines have one each; take none under torchrun")
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise ValueError(f"the trace {path} must be a file in a folder that exists")
