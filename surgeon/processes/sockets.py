"""Sockets between machines: their interfaces, proofs of a secret, and patience with somebody who has vanished."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from surgeon.processes.torchrun import TorchrunEnvironment

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


def prove(connected: socket.socket, secret: bytes, first: bool) -> None:
    """Have both ends prove that they know a secret, which is not sent: by HMAC of random challenges.

    The end that listens asks first.

    Raises:
        ConnectionError: if the other end does not.
    """
    connected.settimeout(None)
    watch_over(connected)
    if first:
        steps = (deliver_challenge, answer_challenge)
    else:
        steps = (answer_challenge, deliver_challenge)
    limit_silence(connected, PROOF_SECONDS)
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


def limit_silence(connected: socket.socket, seconds: int) -> None:
    """Give up reading when nothing comes for a while; 0 for waiting as long as it takes."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))
