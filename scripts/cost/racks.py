"""Block-wise local training against pipelined training on paper: the article's case, and more racks.

    python scripts/cost/racks.py [-o FILE.md] [--coda 2] [--microbatches 8]

A model is cut by depth into racks. A pipeline sends every microbatch forward through all racks and its gradients back:
between two updates of the weights the racks fill and drain, so that of m + p - 1 turns (p racks, m microbatches) each
works in m. Block-wise local training gives each rack a few private layers (a coda) and a copy of the head, and its own
loss: no gradient crosses a rack, so nothing waits for the end of the pipeline, and a rack is idle only until the first
microbatch has come to it. It costs the computation of codas and heads.

The article trains 1B to 13B models on four nodes of eight H100. Two tables: how much idle racks and codas cost (the
article's 38% leaves codas out), and what crosses a boundary between racks beside the article's 540 GB and 38 GB. With
-o a picture of speed by racks lies beside the file. Sizes are in bytes, powers of ten; times in seconds.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from matplotlib.figure import Figure

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # where scripts find each other

from scripts.commands import add_defaults, make_parser
from scripts.markdown import format_table
from surgeon.cost.hardware import load_hardware

RECIPES = Path(__file__).resolve().parents[2] / "recipes" / "train" / "papers"
# The article has these sizes, and each has a recipe.
SIZES = {"1B": "racks-1b", "3B": "racks-2.8b", "7B": "racks-7b", "13B": "racks-13b"}
TOKENS = 4 * 2048  # of a microbatch
EACH_WAY = 540e9  # bytes that the article counts for a pipeline
RECEIVED = 38e9  # and for local training
RACKS = (2, 4, 8, 16, 32)
NUMBER_BYTES = 2  # of an activation, a gradient and a weight that is sent
BACKWARD = 2  # a backward pass computes twice what a forward pass does


@dataclass(frozen=True)
class RackTraining:
    """A model cut by depth, and the racks that train it.

    Attributes:
        layers: of the model, shared out evenly.
        layer_parameters: of one layer.
        hidden: how wide the stream is.
        vocabulary: rows of the head.
        racks: how many.
        microbatches: between two updates of the weights.
        tokens: of one microbatch.
        flops: FLOP/s that a rack reaches.
        link: bytes/s between two racks, each way.
        latency: seconds of a message between two racks.
        coda: private layers of each rack, for local training.
    """

    layers: int
    layer_parameters: int
    hidden: int
    vocabulary: int
    racks: int
    microbatches: int
    tokens: int
    flops: float
    link: float
    latency: float = 0.0
    coda: int = 0

    @property
    def message(self) -> int:
        """Bytes of a microbatch's stream, or of its gradient, between two racks."""
        return self.tokens * self.hidden * NUMBER_BYTES

    @property
    def send(self) -> float:
        """Seconds of such a message; nothing is sent where there is one rack."""
        if self.racks > 1:
            return self.latency + self.message / self.link
        return 0.0

    def computation(self, layers: int, head: bool) -> float:
        """Seconds in which a rack computes so many layers, and the head or not, forward and back for a microbatch."""
        parameters = layers * self.layer_parameters + head * self.vocabulary * self.hidden
        return (1 + BACKWARD) * 2 * parameters * self.tokens / self.flops


def pipelined(training: RackTraining) -> float:
    """Seconds of an update by one forward, one backward in turn (1F1B): p - 1 turns in which racks fill and drain.

    A turn is the computation of the slowest rack, the last one with its head, or the time of the link where that is
    more; filling and draining wait for every message on the way.
    """
    layers = training.layers // training.racks
    turn = max(training.computation(layers, head=True), training.send)
    filling = (training.racks - 1) * (training.computation(layers, head=False) + 2 * training.send)
    return training.microbatches * turn + filling


def local(training: RackTraining) -> float:
    """Seconds of an update by racks with codas and heads: turns follow each other without a gap, update after update.

    The first microbatch takes p - 1 turns to the last rack, once in a training; that is not counted.
    """
    layers = training.layers // training.racks + training.coda
    return training.microbatches * max(training.computation(layers, head=True), training.send)


def model_entries(size: str) -> dict[str, Any]:
    """Read a size's Llama configuration from its recipe."""
    return dict(yaml.safe_load((RECIPES / f"{SIZES[size]}.yaml").read_text(encoding="utf-8"))["model"])


def case(size: str, racks: int, microbatches: int, coda: int) -> RackTraining:
    """A model on racks of eight H100 each, with eight ports of InfiniBand between them; layers stretch to the racks."""
    hardware = load_hardware("h100-sxm")
    model = model_entries(size)
    layers = model["num_hidden_layers"]
    hidden = model["hidden_size"]
    device = hardware.device
    network = hardware.link(between_nodes=True)
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
    coda = training.coda * training.layer_parameters * NUMBER_BYTES
    return 2 * (training.racks - 1) * coda // training.racks


def window_tokens(crossed: float, training: RackTraining) -> float:
    """How many tokens passed while so many bytes of stream crossed all boundaries each way."""
    return crossed / ((training.racks - 1) * training.hidden * NUMBER_BYTES)


def compared(racks: int, microbatches: int, coda: int) -> dict[str, float]:
    """How much faster local training is, without codas and heads and with them."""
    free = replace(case("13B", racks, microbatches, 0), vocabulary=1)
    with_coda = case("13B", racks, microbatches, coda)
    cases = {
        "no codas, no heads: the bubble alone": free,
        f"13B over all racks, codas of {coda}": with_coda,
        f"70 layers a rack, codas of {coda}": replace(with_coda, layers=70 * racks),
    }
    return {name: pipelined(one) / local(one) for name, one in cases.items()}


def speed_table(microbatches: int, coda: int) -> list[str]:
    """Idle racks, and the speed of local training."""
    columns = [
        "racks",
        "idle in a pipeline",
        "without codas",
        f"13B with codas of {coda}",
        "70 layers a rack, the same",
    ]
    rows = []
    for racks in RACKS:
        gains = compared(racks, microbatches, coda).values()
        rows.append([racks, f"{bubble(racks, microbatches):.0%}", *(f"{gain:.2f}x" for gain in gains)])
    return format_table(columns, rows, left=())


def traffic_table(coda: int) -> list[str]:
    """The article's bytes, for each of its sizes on four racks."""
    columns = [
        "size",
        "a token crosses a boundary with",
        "tokens in 540 GB each way",
        "averagings of codas in 38 GB",
    ]
    rows = []
    for size in SIZES:
        training = case(size, 4, 8, coda)
        tokens = window_tokens(EACH_WAY, training) / 1e6
        times = RECEIVED / averaging_bytes(training)
        crossed = training.message / training.tokens
        rows.append([size, f"{crossed / 1e3:.1f} kB each way", f"{tokens:.0f} million", f"{times:.0f}"])
    return format_table(columns, rows)


def draw(path: Path, microbatches: int, coda: int) -> None:
    """Speed of local training over a pipeline's, by racks."""
    figure = Figure(figsize=(6.5, 3.6), layout="constrained", dpi=160)
    axes = figure.subplots()
    gains = [compared(racks, microbatches, coda) for racks in RACKS]
    for name, colour, style in zip(
        gains[0], ("#33638d", "#f0a04b", "#4aa36c"), ("-", ":", "--"), strict=True
    ):
        axes.plot(RACKS, [each[name] for each in gains], style, color=colour, marker="o", label=name)
    axes.plot([4], [1.38], "k*", markersize=11, label="measured in the article")
    axes.axhline(1, color="#999999", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set_xticks(RACKS, labels=[str(racks) for racks in RACKS])
    axes.set_xlabel("racks")
    axes.set_ylabel("times as fast as a pipeline")
    axes.legend(fontsize=8, frameon=False)
    axes.set_title(f"Local training, {microbatches} microbatches an update", fontsize=11)
    figure.savefig(path)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument(
        "-o", "--output", type=Path, help="a file for the tables; a picture goes beside it"
    )
    add_defaults(
        parser,
        coda=(2, "layers of each rack's coda"),
        microbatches=(8, "between two updates of the weights"),
    )
    options = parser.parse_args()
    if options.coda < 0 or options.microbatches < 1:
        parser.error("--coda must be at least 0, --microbatches at least 1")
    tables = speed_table(options.microbatches, options.coda), traffic_table(options.coda)
    text = "\n\n".join(["# Racks on paper", *map("\n".join, tables)]) + "\n"
    if options.output is None:
        print(text)
    else:
        options.output.write_text(text, encoding="utf-8")
        draw(options.output.with_suffix(".png"), options.microbatches, options.coda)


if __name__ == "__main__":
    main()
