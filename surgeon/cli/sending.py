"""How ranks send to each other, as users say it: an emulated link, and reductions as integers."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from surgeon.runtime.comm.link import Link
    from surgeon.runtime.comm.quantised import Compression


@dataclass(frozen=True)
class Sending:
    """What `Ranks` and `Service` take, and the user's own words for it.

    Attributes:
        words: to follow the names of device and collectives, such as ", link of 1ms, int8".
    """

    link: Link | None
    compression: Compression | None
    words: str


def parse_sending(ranks: int, delay: str | None, bandwidth: str | None, compression: str | None) -> Sending:
    """Read the options. Whether there is such a compression, and ranks can send so, `check_sending` says.

    Raises:
        ValueError: if the delay or the bandwidth cannot be read.
    """
    from surgeon.runtime.comm.link import parse_link

    link = parse_link(delay, bandwidth)
    if ranks == 1 and (link is not None or compression is not None):
        warnings.warn("one rank sends nothing: the link and the compression change nothing", stacklevel=2)
    words = {"link of {}": delay, "{}/s": bandwidth and bandwidth.removesuffix("/s"), "{}": compression}
    told = "".join(f", {word.format(value)}" for word, value in words.items() if value)
    return Sending(link, cast("Compression | None", compression), told)
