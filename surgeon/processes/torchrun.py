"""The environment of each process that torchrun starts: its number, and where all of them meet.

Under torchrun the process with RANK 0 runs the command, and every other one becomes a rank of it (rendezvous.py).
Without these variables the ranks are processes that the command starts itself.

Sockets between machines come with it: their interfaces, proofs of a secret, and patience with the vanished.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

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


PROOF_SECONDS = 10  # that somebody who connects has to prove to know the secret

# A machine that vanishes (no power, no network) sends nothing: its connections are given up after these seconds.
IDLE_SECONDS = 2
PROBE_SECONDS = 1
PROBES = 4
_SILENCE_MILLISECONDS = (IDLE_SECONDS + PROBE_SECONDS * PROBES) * 1000


def interface_of(address: str) -> str | None:
    """The network interface that has an address, such as eth0; None if none has."""
    import psutil

    wanted = ipaddress.ip_address(address.partition("%")[0])
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family in (socket.AF_INET, socket.AF_INET6):
                found = ipaddress.ip_address(each.address.partition("%")[0])
                if found == wanted or (found.is_loopback and wanted.is_loopback):
                    return name
    return None


def address_of(interface: str) -> str:
    """The IPv4 address of a network interface."""
    import psutil

    for each in psutil.net_if_addrs().get(interface, ()):
        if each.family == socket.AF_INET:
            return str(each.address)
    raise ValueError(
        f"the network interface {interface} has no IPv4 address, which ranks connect to each other by"
    )


def interface_variables(interface: str | None) -> dict[str, str]:
    """Environment variables that have gloo and NCCL go by an interface: they would choose one by its name."""
    if interface is None:
        return {}
    # "=": no other that begins so.
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"}


def resolve(torchrun: TorchrunEnvironment) -> tuple[socket.AddressFamily, str]:
    """Resolve MASTER_ADDR on this machine."""
    try:
        family, _, _, _, address = socket.getaddrinfo(torchrun.address, None, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise ValueError(
            f"MASTER_ADDR {torchrun.address!r} cannot be found from here: {error.strerror}"
        ) from None
    return family, str(address[0])


def listen(torchrun: TorchrunEnvironment, port: int = 0) -> socket.socket:
    """Listen on the interface that MASTER_ADDR names, and on no other; at any free port if none is given."""
    family, address = resolve(torchrun)
    try:
        # Each of the other ranks connects three times, before anybody accepts.
        return socket.create_server((address, port), family=family, backlog=3 * torchrun.ranks)
    except OSError as error:
        if port:
            raise OSError(
                f"rank 0 cannot listen at {address}, MASTER_PORT {port}: {error.strerror}"
            ) from None
        raise ValueError(
            f"MASTER_ADDR {torchrun.address!r} ({address}) is no address of {socket.gethostname()}, where rank 0 runs: "
            f"{error.strerror}"
        ) from None


def watch_over(connected: socket.socket) -> None:
    """Send small messages at once, and notice within seconds when the other machine has vanished."""
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {
        "TCP_KEEPIDLE": IDLE_SECONDS,
        "TCP_KEEPINTVL": PROBE_SECONDS,
        "TCP_KEEPCNT": PROBES,
        "TCP_USER_TIMEOUT": _SILENCE_MILLISECONDS,
    }.items():
        if hasattr(socket, name):  # not on every system
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def prove(connected: socket.socket, secret: bytes, first: bool, seconds: float = PROOF_SECONDS) -> None:
    """Have both ends prove that they know a secret, which is not sent: by HMAC of random challenges.

    The end that listens asks first.

    Args:
        seconds: that the other end may be silent.

    Raises:
        ConnectionError: if the other end does not.
    """
    connected.settimeout(None)
    watch_over(connected)
    if first:
        steps = (deliver_challenge, answer_challenge)
    else:
        steps = (answer_challenge, deliver_challenge)
    limit_silence(connected, seconds)
    with Connection(os.dup(connected.fileno())) as connection:
        try:
            for step in steps:
                step(connection, secret)
        except (AuthenticationError, AssertionError) as error:
            raise ConnectionError(str(error) or "it does not say what it should") from None
        except OSError as error:
            if error.errno is None:  # the length of a message is no such length
                raise ConnectionError(str(error)) from None
            raise
    limit_silence(connected, 0)


def limit_silence(connected: socket.socket, seconds: float) -> None:
    """Give up reading when nothing comes for a while; 0 for waiting as long as it takes."""
    whole, rest = divmod(seconds, 1)
    limit = struct.pack("ll", int(whole), int(1e6 * rest))
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
