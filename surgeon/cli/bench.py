"""`surgeon bench`: what programs cost on ranks, against each other."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from surgeon.cli.options import (
    DATA_HELP,
    CompressOption,
    DecodingOption,
    DtypeOption,
    LinkBandwidthOption,
    LinkDelayOption,
    ProgramOption,
    RanksDeviceOption,
    RanksOption,
)
from surgeon.cli.sending import parse_sending
from surgeon.operations.declare import VARIANTS, described

if TYPE_CHECKING:
    from surgeon.bench.compression_cost import CompressionCost
    from surgeon.bench.measure import Candidate, Load, Result
    from surgeon.runtime.comm.link import Link
    from surgeon.runtime.comm.quantised import Compression

COMPARED_TOKENS = 1024  # predicted with exact and with compressed reductions
RANDOM = "random tokens"
_VARIANTS_LISTED = ", ".join(described(name, variant.note) for name, variant in VARIANTS.items())


def bench(
    model: Annotated[
        str, typer.Argument(metavar="DIR", help="A checkpoint folder, a hub name, demo, or a recipe (.yaml).")
    ],
    compare: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure this too, in turns, and compare; may be repeated. A checkpoint, a recipe, a program such as "
            f'"A0 F0 [A1 A2] [F1 F2]", or a variant of the model: dense, {_VARIANTS_LISTED}, upper-bound (without any '
            "communication: wrong results, and the best time there can be).",
            show_default=False,
        ),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help="The layers that variants change, e.g. 4:30 (4 to 29). Default: all but the first and last two.",
            show_default=False,
        ),
    ] = None,
    program: ProgramOption = None,
    tp: RanksOption = 2,
    batch: Annotated[str, typer.Option(help="How many texts are computed together; several as 1,8.")] = "1",
    prompt: Annotated[int, typer.Option(min=1, help="Tokens of each prompt; they are random.")] = 64,
    new: Annotated[int, typer.Option(min=1, help="Tokens to add to each.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="How often everything is measured.")] = 5,
    seed: Annotated[int, typer.Option(help="Of the random tokens.")] = 0,
    device: RanksDeviceOption = "auto",
    dtype: DtypeOption = "auto",
    decoding: DecodingOption = "auto",
    collectives: Annotated[
        str, typer.Option(help="shm, gloo, nccl, auto: the fastest that fits, or none: see upper-bound.")
    ] = "auto",
    link_delay: LinkDelayOption = None,
    link_bandwidth: LinkBandwidthOption = None,
    compress: CompressOption = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="With --compress: what to measure its divergence from exact reductions on. Default: random tokens. "
            + DATA_HELP,
            show_default=False,
        ),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Write a timeline of every program's prefill and one decoding pass, for chrome://tracing or Perfetto.",
            show_default=False,
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="Folder for bench.csv, bench.json and bench.png.", show_default=False),
    ] = None,
) -> None:
    """Measure how fast programs run on ranks, and where the time of a pass goes.

    Everything is loaded by the same ranks and measured in turns; a ratio is the median over the rounds of the one
    taken in each. First token: from being asked until every text has one. Per token: a decoding pass. Tokens/s: new
    tokens of all texts, from being asked to the last. Waiting: time in collectives; "32+2" are 32 of the program's
    steps and 2 of embedding and head. Bytes are those of the program's steps, of one rank.

    With --compress the same weights also predict some tokens with exact and with compressed reductions: divergence is
    KL(exact || compressed) over the full vocabulary.
    """
    from surgeon.bench.candidates import Needs, open_candidates
    from surgeon.bench.measure import Load, load_candidates, measure
    from surgeon.progress import progress
    from surgeon.report.bench import bench_table, describe_bench
    from surgeon.report.compression import compression_record, describe_compression
    from surgeon.runtime.processes.ranks import RankOptions, Ranks, choose_device

    loads = [Load(size, prompt, new, seed) for size in _batches(batch)]
    stretch = _stretch(layers)
    sending = parse_sending(tp, link_delay, link_bandwidth, compress)
    chosen = choose_device(device, tp)
    options = RankOptions(tp, chosen, collectives, sending.link, sending.compression)
    way = options.collectives
    needs = Needs(tp, prompt + new, chosen, dtype, decoding)
    candidates = open_candidates(model, compare or [], needs, program, stretch)
    _check_files(output, trace, chosen)
    texts = _texts(candidates, sending.compression, data, prompt + new, seed)
    with Ranks(options) as ranks:
        load_candidates(ranks, candidates)
        with progress("bench", rounds * len(loads) * len(candidates), "runs") as advance:
            results = measure(ranks, candidates, loads, rounds, advance)
        if trace is not None:
            _write_trace(trace, ranks, candidates, loads[0], way, sending.link)
        costs = _compression_costs(ranks, candidates, texts, sending.compression)
    table = bench_table(results)
    place = f"{tp} {'rank' if tp == 1 else 'ranks'} ({chosen}, {way}{sending.words})"
    heading = f"{place}, prompt {prompt}, {new} new, {rounds} {'round' if rounds == 1 else 'rounds'}"
    typer.echo(f"{heading}\n\n{describe_bench(table)}")
    settings: dict[str, Any] = {"seed": seed, "place": place, "rounds": rounds}
    if costs:
        text = data or RANDOM
        typer.echo(f"\n{describe_compression(costs, text)}")
        settings["compression"] = compression_record(costs, text)
    if output is not None:
        _write(output, model, results, settings, heading)


def _texts(
    candidates: list[Candidate], compression: str | None, data: str | None, length: int, seed: int
) -> dict[str, list[list[int]]]:
    """What each program that sends anything is to predict; empty without compression."""
    from surgeon.bench.compression_cost import windows_of

    if compression is None:
        if data is not None:
            raise ValueError(f"--data {data} is for measuring what --compress changes; give --compress, too")
        return {}
    sending = [one for one in candidates if one.connected and one.plan.ranks > 1]
    windows = windows_of((one.plan for one in sending), data, length, COMPARED_TOKENS, seed)
    return {one.name: windows for one, windows in zip(sending, windows, strict=True)}


def _compression_costs(
    ranks: Any, candidates: list[Candidate], texts: dict[str, list[list[int]]], kind: Compression | None
) -> dict[str, CompressionCost]:
    from surgeon.bench.compression_cost import measure_compression

    plans = {one.name: one.plan for one in candidates}
    if kind is None:
        return {}
    return {name: measure_compression(ranks, plans[name], text, kind, name) for name, text in texts.items()}


def _batches(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) for part in parts):
        raise ValueError(f"--batch {text!r} is no list of batch sizes; write e.g. 1,8")
    return list(dict.fromkeys(map(int, parts)))


def _stretch(layers: str | None) -> range | None:
    from surgeon.recipe import parse_range

    return None if layers is None else parse_range(layers)


def _check_files(output: Path | None, trace: Path | None, device: str) -> None:
    """Say what is wrong with what is to be written before anything is measured."""
    from surgeon.runtime.processes.torchrun import read_environment

    if trace is not None and device != "cpu":
        raise ValueError("--trace shows what processes do, and GPUs go on while theirs wait; use --device cpu")
    if trace is not None and read_environment() is not None:
        raise ValueError("--trace puts all ranks on one clock, and machines have one each; leave it out under torchrun")
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
    if trace is not None and (trace.is_dir() or not trace.absolute().parent.is_dir()):
        raise ValueError(f"--trace {trace} must be a file in a folder that exists")


def _write_trace(path: Path, ranks: Any, candidates: list[Candidate], load: Load, way: str, link: Link | None) -> None:
    import json

    from surgeon.bench.measure import shared_vocabulary
    from surgeon.bench.measure import trace as run_traced
    from surgeon.bench.trace import Wires, chrome_trace
    from surgeon.provenance import write_text

    runs = run_traced(ranks, candidates, load, shared_vocabulary(candidates))
    write_text(path, json.dumps(chrome_trace(runs, Wires(way == "shm", link))) + "\n")
    print(f"{path}: open it in chrome://tracing or https://ui.perfetto.dev", file=sys.stderr)


def _write(folder: Path, model: str, results: list[Result], settings: dict[str, Any], heading: str) -> None:
    from surgeon.checkpoint.read import Checkpoint
    from surgeon.provenance import provenance, write_json, write_table
    from surgeon.report.bench import bench_record, bench_table, draw_bench

    table = bench_table(results)
    model_hash = Checkpoint(results[0].candidate.plan.folder).model_hash()
    record = provenance(model, model_hash, **settings, results=bench_record(results))
    write_table(folder / "bench.csv", table)
    write_json(folder / "bench.json", record)
    draw_bench(table, folder / "bench.png", heading)
    print(f"{folder}: bench.csv, bench.json, bench.png", file=sys.stderr)
