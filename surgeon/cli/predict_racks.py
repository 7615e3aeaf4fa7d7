"""`surgeon predict --racks`: training over racks on paper."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from surgeon.cost.racks import Update

_NOTE = """\
Idle: of a rack without the head. MB: over each boundary between racks. In
flight: microbatches whose activations a rack holds."""


@dataclass(frozen=True)
class RacksArguments:
    """A training over racks, in the user's words; a group of options (see grouped.py)."""

    racks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Training instead: the model cut by depth into so many racks, each a node of the hardware; a pipeline "
            "beside block-wise local training.",
            show_default=False,
        ),
    ] = None
    microbatches: Annotated[int, typer.Option(min=1, help="With --racks: between two updates of the weights.")] = 8
    tokens: Annotated[int, typer.Option(min=1, help="With --racks: of a microbatch.")] = 8192
    coda: Annotated[int, typer.Option(min=0, help="With --racks: private layers of each rack, in local training.")] = 2


def train_on_racks(asked: RacksArguments, model: str, hardware: str) -> None:
    """Print what both ways take, send and hold.

    Raises:
        FileNotFoundError, ValueError: if there is no such model or hardware.
        ValueError: if the layers do not divide into the racks, or the hardware has no network.
    """
    from surgeon.cost.candidates import open_candidates
    from surgeon.cost.hardware_file import load_hardware
    from surgeon.cost.racks import RackTraining, local, pipelined
    from surgeon.words import aligned

    assert asked.racks is not None
    shapes, machine = open_candidates(model)[0].model.shapes, load_hardware(hardware)
    training = RackTraining.of(shapes, machine, asked.racks, asked.microbatches, asked.tokens, asked.coda)
    one, other = pipelined(training), local(training)
    lines = [["one update", "ms", "times", "idle", "MB forward", "MB back", "in flight"]]
    lines.append(_line("pipeline", one, one))
    lines.append(_line(f"local, codas of {asked.coda}", other, one))
    heading = f"{shapes.name} on {asked.racks} x {machine.name}: bfloat16, {asked.microbatches} microbatches of"
    typer.echo(f"{heading} {asked.tokens} tokens\n\n{aligned(lines)}\n\n{_NOTE}")


def _line(name: str, update: Update, first: Update) -> list[str]:
    sent = [f"{crossed / 1e6:.0f}" for crossed in (update.forward_bytes, update.backward_bytes)]
    times = f"{first.seconds / update.seconds:.2f}"
    return [name, f"{update.seconds * 1e3:.0f}", times, f"{update.idle:.0%}", *sent, str(update.in_flight)]
