"""The environment of each process that torchrun starts: its number, and where all of them meet.

Under torchrun the process with RANK 0 runs the command, and every other one becomes a rank of it (rendezvous.py).
Without these variables the ranks are processes that the command starts itself.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

NUMBERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
VARIABLES = (*NUMBERS, "MASTER_ADDR")
HOSTED = "TORCHELASTIC_USE_AGENT_STORE"
# Whoever sets one of these starts several processes; the others are also set without.
SIGNS = ("RANK", "WORLD_SIZE")

PATIENCE_VARIABLE = "SURGEON_JOIN_SECONDS"
PATIENCE_SECONDS = 60.0


@dataclass(frozen=True)
class RankLocation:
    """A rank's place.

    Attributes:
        local_rank: its number among the ranks of its machine.
        local_ranks: how many there are on its machine.
        interface: by which it reaches the other machines; None where all ranks are on one.
    """

    local_rank: int
    local_ranks: int
    interface: str | None = None


@dataclass(frozen=True)
class TorchrunEnvironment:
    """One process among those that torchrun has started.

    Attributes:
        rank, ranks: RANK and WORLD_SIZE.
        local_rank, local_ranks: LOCAL_RANK, also of its GPU, and LOCAL_WORLD_SIZE.
        address: MASTER_ADDR, a name or an address of the machine with rank 0.
        port: MASTER_PORT, of the store through which they find each other.
        hosted: whether that store is torchrun's own; else rank 0 opens it.
        attempt: how often torchrun has restarted the processes.
        patience: seconds until the processes must have found each other.
    """

    rank: int
    ranks: int
    local_rank: int
    local_ranks: int
    address: str
    port: int
    hosted: bool = False
    attempt: int = 0
    patience: float = PATIENCE_SECONDS

    def variables(self) -> dict[str, str]:
        """Variables that tell a process, ours or one that knows torch.distributed, that it is this one."""
        numbers = (self.rank, self.ranks, self.local_rank, self.local_ranks, self.port)
        named = dict(zip(NUMBERS, map(str, numbers), strict=True))
        return named | {"MASTER_ADDR": self.address, HOSTED: str(self.hosted)}


def read_environment() -> TorchrunEnvironment | None:
    """Read torchrun's environment; None if nobody but surgeon starts ranks."""
    variables = os.environ
    if not any(variables.get(name) for name in SIGNS):
        return None
    missing = [name for name in VARIABLES if not variables.get(name)]
    if missing:
        found = next(f"{name}={variables[name]}" for name in SIGNS if variables.get(name))
        raise ValueError(
            f"the environment has {found}, but {', '.join(missing)} not set; start the processes with torchrun, "
            f"or unset {found.partition('=')[0]} to start the ranks from here"
        )
    numbers = dict[str, int]()
    for name in NUMBERS:
        if not variables[name].isdecimal():
            raise ValueError(f"{name} must be a number, not {variables[name]!r}")
        numbers[name] = int(variables[name])
    for name, count in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if numbers[name] >= numbers[count]:
            raise ValueError(
                f"{name} must be less than {count}, which is {numbers[count]}, not {numbers[name]}"
            )
    if not 1 <= numbers["MASTER_PORT"] <= 65535:
        raise ValueError(f"MASTER_PORT must lie in 1..65535, not {numbers['MASTER_PORT']}")
    text = variables.get(PATIENCE_VARIABLE) or str(PATIENCE_SECONDS)
    patience = 0.0
    with suppress(ValueError):
        patience = float(text)
    if not 0 < patience < float("inf"):
        raise ValueError(f"{PATIENCE_VARIABLE} must be a number of seconds, not {text!r}")
    return TorchrunEnvironment(
        rank=numbers["RANK"],
        ranks=numbers["WORLD_SIZE"],
        local_rank=numbers["LOCAL_RANK"],
        local_ranks=numbers["LOCAL_WORLD_SIZE"],
        address=variables["MASTER_ADDR"],
        port=numbers["MASTER_PORT"],
        hosted=variables.get(HOSTED) == "True",
        attempt=int(variables.get("TORCHELASTIC_RESTART_COUNT") or 0),
        patience=patience,
    )


@contextmanager
def beside_torchrun() -> Iterator[None]:
    """Start ranks of this process's own meanwhile, also where torchrun has started it for something else."""
    held = {name: os.environ.pop(name) for name in VARIABLES if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(held)


def check_ranks(torchrun: TorchrunEnvironment, ranks: int) -> None:
    """Refuse another number of ranks than there are processes."""
    if ranks != torchrun.ranks:
        raise ValueError(
            f"{ranks} ranks are asked for, another number than torchrun has started (WORLD_SIZE {torchrun.ranks}); "
            f"ask for none, or for {torchrun.ranks}"
        )


def ranks_of_this_machine(ranks: int) -> int:
    """Count those of so many ranks that run on this machine."""
    torchrun = read_environment()
    if torchrun is None:
        return ranks
    return torchrun.local_ranks
