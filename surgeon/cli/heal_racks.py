"""`surgeon heal --racks`: an edited model is healed rack by rack, each with a coda and a loss of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from surgeon.cli.options import several

if TYPE_CHECKING:
    from surgeon.training.model import RackOptions


@dataclass(frozen=True)
class HealRacksArguments:
    """Racks that are healed one by one, in the user's words; a group of options (see grouped.py)."""

    racks: Annotated[
        list[str] | None,
        several(
            "--racks",
            metavar="RANGES",
            help="Cut the model by depth into racks (0:8,8:16 are layers 0 to 7 and 8 to 15), each trained by a loss "
            "of its own; no gradient goes from one to another. All weights are trained. With --distill both each rack "
            "learns the original's streams, which heals far better than the text does.",
        ),
    ] = None
    coda: Annotated[
        int | None,
        typer.Option(
            metavar="LAYERS",
            help="With --racks: private layers that every rack but the last predicts with, begun as copies of the "
            "model's last ones and kept beside the checkpoint. Default: 1.",
        ),
    ] = None

    rack_processes: Annotated[
        bool,
        typer.Option(
            "--rack-processes",
            help="Train all racks at once, each in a process of its own, and start again those that are killed. By "
            "default one after the other, with the same result.",
        ),
    ] = False
    average: Annotated[
        str,
        typer.Option(
            metavar="never|N|always",
            help="With --rack-processes: average the codas over the racks every N steps, or after each one.",
        ),
    ] = "never"
    rack_ahead: Annotated[
        int,
        typer.Option(help="With --rack-processes: micro-batches that a rack may be ahead of the next one's requests."),
    ] = 4
    rack_replicas: Annotated[
        int,
        typer.Option(
            help="With --rack-processes: processes that share each rack's batches; the result is that of one, up to "
            "rounding."
        ),
    ] = 1
    racks_by_hand: Annotated[
        bool,
        typer.Option(
            "--racks-by-hand",
            help="Prepare processes that are started by hand, on several machines say, and print their commands; given "
            "again when all are done, gather the result.",
        ),
    ] = False

    @property
    def in_processes(self) -> bool:
        """Whether each rack has a process of its own."""
        return self.rack_processes or self.racks_by_hand

    def check(self, keep_adapter: bool) -> None:
        """Refuse options that do not go together.

        Raises:
            ValueError: naming them.
        """
        if self.racks is None and self.coda is not None:
            raise ValueError("--coda says what racks predict with, and there are none; add --racks, or drop it")
        if self.racks is None and self.in_processes:
            raise ValueError("--rack-processes is for racks, and there are none; add --racks, or drop it")
        if self.average != "never" and not self.in_processes:
            raise ValueError("--average needs all racks at the same time; add --rack-processes, or drop it")
        if self.rack_replicas != 1 and not self.in_processes:
            raise ValueError("--rack-replicas says how many processes a rack has; add --rack-processes, or drop it")
        if self.racks is not None and keep_adapter:
            raise ValueError("--racks trains the weights themselves; leave --keep-adapter out")

    def options(self) -> RackOptions | None:
        """How the model is cut, and racks are trained; None where there are none."""
        from surgeon.training.model import RackOptions

        if self.racks is None:
            return None
        coda = 1 if self.coda is None else self.coda
        return RackOptions(self.racks, coda, self.in_processes, self.average, self.rack_ahead, self.rack_replicas)
