"""Which process a command runs in, where torchrun has started several."""

from __future__ import annotations

import typer


def settle_ranks(context: typer.Context, tp: int) -> int:
    """How many ranks a command runs on: all of torchrun's, else as many as --tp says.

    A process of torchrun's whose rank is not 0 does not come back from here: it is that rank until rank 0 ends.

    Raises:
        ValueError: if --tp is given and torchrun has started another number, or its variables make no sense.
        OSError: if rank 0 is not found, or goes.
    """
    from surgeon.processes.torchrun import check_ranks, read_environment

    torchrun = read_environment()
    if torchrun is None:
        return tp
    given = context.get_parameter_source("tp")
    if given is not None and given.name != "DEFAULT":
        check_ranks(torchrun, tp)
    if torchrun.rank:
        from surgeon.runtime.worker.rank import be_rank

        be_rank(torchrun)
    from surgeon.processes.rendezvous import rendezvous_at

    rendezvous_at(torchrun)  # now, so that the others wait for this process, not for a time-out, and end when it does
    return torchrun.ranks
