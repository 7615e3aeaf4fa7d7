"""`surgeon bench`, `surgeon.bench`: speed of programs on ranks, and the split of a pass's time."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Unpack

from surgeon.commands.command import command, option, several
from surgeon.commands.options import (
    COMPARED,
    DATA_HELP,
    Batches,
    ProgramText,
    Ranks,
    Rounds,
    VariantLayers,
    WayFlags,
)

if TYPE_CHECKING:
    from surgeon.findings.speeds import Benchmark
    from surgeon.language.program import Program
    from surgeon.opened import EditedModel, Model

COMPARED_TOKENS = 1024  # predicted with exact and with compressed reductions
RANDOM = "random tokens"


@command()
def bench(
    model: Annotated[
        str | Path | Model | EditedModel,
        option(
            "A checkpoint folder, a hub name, a .gguf file, demo, or a recipe (.yaml).",
            metavar="DIR",
        ),
    ],
    *,
    compare: Annotated[
        str | Path | Program | Sequence[str | Path | Program],
        several("Measure this too, in turns, and compare. A checkpoint, a recipe, " + COMPARED),
    ] = (),
    layers: VariantLayers = None,
    batch: Batches = 1,
    prompt: Annotated[int, option("Tokens of each prompt; they are random.", least=1)] = 64,
    new: Annotated[int, option("Tokens to add to each.", least=1)] = 32,
    rounds: Rounds = 5,
    seed: Annotated[int, option("Of the random tokens.")] = 0,
    ranks: Ranks = 2,
    program: ProgramText = None,
    data: Annotated[
        str | None,
        option(
            "With --compress: what to measure its divergence from exact reductions on. Default: random tokens. "
            + DATA_HELP
        ),
    ] = None,
    trace: Annotated[
        str | Path | None,
        option(
            "Write what torch.profiler sees of every program's first passes, for chrome://tracing or Perfetto: a file "
            "for each rank (NAME.rank0.json, ...)."
        ),
    ] = None,
    output: Annotated[
        str | Path | None, option("Folder for bench.csv, bench.json and bench.png.", "--output", "-o")
    ] = None,
    **ways: Unpack[WayFlags],
) -> Benchmark:
    """Measure how fast programs run on ranks, and where the time of a pass goes.

    Everything is loaded by the same ranks and measured in turns; a ratio is the median over the rounds of the one
    taken in each. First token: from being asked until every text has one. Per token: a decoding pass. Tokens/s: new
    tokens of all texts, from being asked to the last. Waiting: time in collectives; "32+2" are 32 of the program's
    steps and 2 of embedding and head. Bytes are those of the program's steps, of one rank. On GPUs a profiler tells
    waiting, in one more run.

    Caches have all the memory they need here, so that --kv auto is full; --kv lowrank is for the programs that have
    factors of k and v, beside others that have none.

    With --compress the same weights also predict some tokens with exact and with compressed reductions: divergence is
    KL(exact || compressed) over the full vocabulary.

    Raises:
        FileNotFoundError, ValueError: if a model or an option cannot be used.
        RankFailed: if a rank fails.
    """
    from surgeon.benchmarks.measure import (
        Needs,
        RankBench,
        bench_record,
        bench_table,
        divergence_of_compressed,
        plan_candidates,
        windows_to_compare,
    )
    from surgeon.commands.command import as_list, as_range, as_several
    from surgeon.commands.opening import name_of
    from surgeon.cost.candidates import open_candidates
    from surgeon.cost.deployment import Workload
    from surgeon.findings.speeds import Benchmark
    from surgeon.processes.files import make_folder
    from surgeon.progress import progress
    from surgeon.quality.summary import mean_divergence
    from surgeon.runtime.kernels.build import kernels_used
    from surgeon.runtime.worker.rank import RankOptions
    from surgeon.runtime.worker.ranks import Ranks as RunningRanks
    from surgeon.words import plural

    on = RankOptions.of(ranks)
    if data is not None and on.compression is None:
        raise ValueError(
            f"{data} is for measuring what compressed reductions change; have them compressed, too"
        )
    if not (sizes := as_several(batch)):
        raise ValueError(
            "batch is empty; give how many texts are computed together, one number or several"
        )
    loads = [Workload(size, prompt, new, seed) for size in sizes]
    candidates = open_candidates(model, as_list(compare), program, as_range(layers), weights=True)
    needs = Needs(on.ranks, prompt + new, on.device, ways)
    plans = plan_candidates(candidates, needs)
    unconnected = {one.name for one in candidates if not one.connected}
    if trace is not None and (
        Path(trace).is_dir() or not os.access(Path(trace).absolute().parent, os.W_OK)
    ):
        raise ValueError(
            f"the trace {trace} must be a file in a folder that exists and can be written to"
        )
    if output is not None:
        make_folder(Path(output))
    kind = None if on.ranks == 1 else on.compression
    windows = {
        name: windows_to_compare(plan, data, prompt + new, COMPARED_TOKENS, seed)
        for name, plan in plans.items()
        if kind is not None and name not in unconnected
    }
    with RunningRanks(on) as running:
        measured = RankBench.load(running, plans, unconnected)
        with progress("bench", rounds * len(loads) * len(plans), "runs") as advance:
            results = measured.measure(loads, rounds, advance)
        traces: tuple[Path, ...] = ()
        if trace is not None:
            traces = measured.profile(loads[0], Path(trace))
        divergence = {
            name: divergence_of_compressed(running, texts, kind, name)
            for name, texts in windows.items()
            if kind is not None
        }
    load = loads[0]
    place = f"{plural(on.ranks, 'rank')} ({on})"
    heading = f"{place}, prompt {load.prompt}, {load.new} new, {plural(rounds, 'round')}"
    used = dict.fromkeys(kernels_used(on.device, plan.dtype) for plan in plans.values())
    settings: dict[str, Any] = {"heading": heading, "seed": load.seed, "place": place, "rounds": rounds}
    settings["kernels"] = ", ".join(used)
    if divergence:
        predicted = min(sum(len(window) - 1 for window in texts) for texts in windows.values())
        settings |= {"compression": kind, "compared": data or RANDOM, "predicted": predicted}
        settings["divergence"] = {name: mean_divergence(values) for name, values in divergence.items()}
    name = name_of(model)
    found = Benchmark(
        bench_table(results, divergence),
        results,
        traces,
        record=settings | {"model": name},
        files=traces,
    )
    if output is None:
        return found
    record = candidates[0].model.provenance(**settings, results=bench_record(results))
    return replace(found, record=record | {"model": name}).save(Path(output))
