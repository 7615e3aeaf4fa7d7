"""What is fetched from the hub, and machines without a network: their users wait for no retries."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit
from urllib.request import getproxies

SECONDS = 5.0  # that a connection may take


@contextmanager
def fetching(name: str, what: str, advice: str) -> Iterator[None]:
    """Fetch something of a model on the hub, or take it from the hub's cache, in the block.

    Args:
        what: it is, before "could not be fetched".
        advice: what the user can do then.

    Raises:
        FileNotFoundError: whatever it is that goes wrong.
    """
    try:
        with without_retries():
            yield
    except Exception as error:
        raise FileNotFoundError(
            f"{name} is no folder here, and {what}could not be fetched from the hub ({type(error).__name__}); {advice}"
        ) from error


@contextmanager
def without_retries() -> Iterator[None]:
    """If the hub cannot be reached, ask its libraries for what they have here, as under HF_HUB_OFFLINE=1.

    Without this they try to reach it for half a minute, for every file, and only then look into their cache.
    """
    import datasets
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE or hub_answers(constants.ENDPOINT):
        yield
        return
    before = datasets.config.HF_HUB_OFFLINE
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = False
        datasets.config.HF_HUB_OFFLINE = before


def hub_answers(address: str) -> bool:
    """Whether a connection to the address is accepted; behind a proxy, which has to be asked, it may be."""
    url = urlsplit(address)
    if url.scheme in getproxies() or url.hostname is None:
        return True
    try:
        socket.create_connection((url.hostname, url.port or (80 if url.scheme == "http" else 443)), SECONDS).close()
    except OSError:
        return False
    return True
