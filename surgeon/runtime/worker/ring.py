"""Connecting ranks one behind the other: what runs on each of them, and who has them connect."""

from __future__ import annotations

import secrets
from multiprocessing.connection import Listener

from surgeon.runtime.comm.link import Link
from surgeon.runtime.comm.ring import Address, joined, listener
from surgeon.runtime.worker.rank import Rank
from surgeon.runtime.worker.ranks import Ranks

LISTENER = "listener"


def connect(ranks: Ranks) -> None:
    """Connect each rank to the next one, and the last one to the first, by the options' link."""
    secret = secrets.token_bytes(32)
    addresses = ranks.call(listen, secret)
    ranks.call(join, addresses, secret)
    emulate(ranks, ranks.options.link)


def emulate(ranks: Ranks, link: Link | None, pace: float | None = None) -> None:
    """Have another link between connected ranks, and for what they have loaded another `StretchEngine.pace`."""
    ranks.call(use_link, link, pace)


def listen(rank: Rank, secret: bytes) -> Address:
    """Runs on a rank: begin to listen; where."""
    listening = listener(rank.settings.location.interface, secret)
    rank.engines[LISTENER] = listening
    address: Address = listening.address
    return address


def join(rank: Rank, addresses: list[Address], secret: bytes) -> None:
    """Runs on a rank that listens: connect."""
    listening: Listener = rank.engines.pop(LISTENER)
    rank.ring = joined(rank.rank, addresses, listening, secret)


def use_link(rank: Rank, link: Link | None, pace: float | None) -> None:
    """Runs on a rank: as `emulate`."""
    assert rank.ring is not None, "ranks are connected first"
    rank.ring.emulate(link)
    for engine in () if pace is None else rank.engines.values():
        engine.pace = pace
