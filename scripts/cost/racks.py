"""Block-wise local training against pipelined training on paper: the article's case, and more racks.

    python scripts/cost/racks.py [-o FILE.md] [--coda 2] [--microbatches 8]

The article trains 1B to 13B models on four nodes of eight H100. Four tables: what idle racks cost, what crosses a
boundary between racks, what the codas cost in computation (which the article's 38% leaves out), and what the article's
540 GB and 38 GB can be. With -o a picture of speed by racks lies beside the file.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.cost.rack_cost import RackTraining, local, pipelined
from surgeon.cost.hardware import load_hardware

RECIPES = Path(__file__).resolve().parents[2] / "recipes" / "train" / "papers"
SIZES = {"1B": "racks-1b", "3B": "racks-2.8b", "7B": "racks-7b", "13B": "racks-13b"}  # the article's, by recipe
TOKENS = 4 * 2048  # of a microbatch
EACH_WAY, RECEIVED = 540e9, 38e9  # bytes: what the article counts for a pipeline, and for local training
RACKS = (2, 4, 8, 16, 32)


def model_entries(size: str) -> dict[str, Any]:
    """Read a size's Llama configuration from its recipe."""
    return dict(yaml.safe_load((RECIPES / f"{SIZES[size]}.yaml").read_text(encoding="utf-8"))["model"])


def case(size: str, racks: int, microbatches: int, coda: int) -> RackTraining:
    """A model on racks of eight H100 each, with eight ports of InfiniBand between them; layers stretch to the racks."""
    hardware = load_hardware("h100-sxm")
    model = model_entries(size)
    layers = model["num_hidden_layers"]
    hidden = model["hidden_size"]
    device, network = hardware.device, hardware.link(between_nodes=True)
    reached = device.shares.flops.at(TOKENS / hardware.devices)
    return RackTraining(
        layers=-(-layers // racks) * racks,
        layer_parameters=4 * hidden**2 + 3 * hidden * model["intermediate_size"],
        hidden=hidden,
        vocabulary=model["vocab_size"],
        racks=racks,
        microbatches=microbatches,
        tokens=TOKENS,
        flops=hardware.devices * device.peak("bfloat16") * reached,
        link=hardware.devices * network.bandwidth * max(one.share.at(2) for one in network.algorithms),
        latency=max(one.hop.at(2) for one in network.algorithms),
        coda=coda,
    )


def bubble(racks: int, microbatches: int) -> float:
    """The part of a pipeline's turns in which a rack waits: (p - 1) / (m + p - 1)."""
    return (racks - 1) / (microbatches + racks - 1)


def averaging_bytes(training: RackTraining) -> int:
    """What a rack receives when all average their codas once: a ring's all-reduce, 2 (p - 1) / p of a coda."""
    coda = training.coda * training.layer_parameters * training.number_bytes
    return 2 * (training.racks - 1) * coda // training.racks


def window_tokens(crossed: float, training: RackTraining, boundaries: int | None = None) -> float:
    """How many tokens passed while so many bytes of stream crossed the boundaries (all of them by default) each way."""
    return crossed / ((boundaries or training.racks - 1) * training.hidden * training.number_bytes)


def speed_table(microbatches: int, coda: int) -> list[str]:
    """Idle racks, and how much faster local training is, without codas and heads and with them."""
    lines = [f"| racks | idle in a pipeline | without codas | 13B with codas of {coda} | 70 layers a rack, the same |"]
    lines.append("|--:|--:|--:|--:|--:|")
    for racks in RACKS:
        free = replace(case("13B", racks, microbatches, 0), vocabulary=1)
        with_coda = case("13B", racks, microbatches, coda)
        deep = replace(with_coda, layers=70 * racks)
        gains = [pipelined(one).seconds / local(one).seconds for one in (free, with_coda, deep)]
        shown = " | ".join(f"{gain:.2f}x" for gain in gains)
        lines.append(f"| {racks} | {bubble(racks, microbatches):.0%} | {shown} |")
    return lines


def traffic_table(coda: int) -> list[str]:
    """What the article's bytes can be, for each of its sizes on four racks."""
    lines = ["| size | a token crosses a boundary with | tokens in 540 GB each way | averagings of codas in 38 GB |"]
    lines.append("|:--|--:|--:|--:|")
    for size in SIZES:
        training = case(size, 4, 8, coda)
        crossed = training.message / training.tokens
        tokens, times = window_tokens(EACH_WAY, training) / 1e6, RECEIVED / averaging_bytes(training)
        lines.append(f"| {size} | {crossed / 1e3:.1f} kB each way | {tokens:.0f} million | {times:.0f} |")
    return lines


def draw(path: Path, microbatches: int, coda: int) -> None:
    """Speed of local training over a pipeline's, by racks."""
    figure = Figure(figsize=(6.5, 3.6), layout="constrained", dpi=160)
    axes = figure.subplots()
    lines: dict[str, list[RackTraining]] = {
        "no codas, no heads: the bubble alone": [replace(case("13B", n, microbatches, 0), vocabulary=1) for n in RACKS],
        f"70 layers a rack, codas of {coda}": [
            replace(case("13B", n, microbatches, coda), layers=70 * n) for n in RACKS
        ],
        f"13B over all racks, codas of {coda}": [case("13B", n, microbatches, coda) for n in RACKS],
    }
    for (name, cases), colour, style in zip(
        lines.items(), ("#33638d", "#4aa36c", "#f0a04b"), ("-", "--", ":"), strict=True
    ):
        gains = [pipelined(one).seconds / local(one).seconds for one in cases]
        axes.plot(RACKS, gains, style, color=colour, marker="o", label=name)
    axes.plot([4], [1.38], "k*", markersize=11, label="measured in the article")
    axes.axhline(1, color="#999999", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(RACKS, labels=[str(racks) for racks in RACKS])
    axes.set_xlabel("racks")
    axes.set_ylabel("times as fast as a pipeline")
    axes.legend(fontsize=8, frameon=False)
    axes.set_title(f"Local training, {microbatches} microbatches an update", fontsize=11)
    figure.savefig(path)


def page(microbatches: int, coda: int) -> str:
    """The tables."""
    parts: list[Sequence[str]] = [["# Racks on paper"], speed_table(microbatches, coda), traffic_table(coda)]
    return "\n\n".join("\n".join(part) for part in parts) + "\n"


def main() -> None:
    """Print, or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, help="a file for the tables; a picture goes beside it")
    parser.add_argument("--coda", type=int, default=2, help="layers of each rack's coda")
    parser.add_argument("--microbatches", type=int, default=8, help="between two updates of the weights")
    options = parser.parse_args()
    text = page(options.microbatches, options.coda)
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text, encoding="utf-8")
        draw(options.output.with_suffix(".png"), options.microbatches, options.coda)


if __name__ == "__main__":
    main()
