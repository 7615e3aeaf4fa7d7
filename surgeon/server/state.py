"""What all requests share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from surgeon.checkpoint.generation_defaults import Defaults
from surgeon.runtime.service import Service
from surgeon.server.meters import Meters
from surgeon.server.texts import Texts


@dataclass
class ServerState:
    """A running server.

    Attributes:
        model: the name it is served under.
        capacity: how many requests the service takes at a time, those that wait among them.
        defaults: how the model wants its tokens chosen, for requests that do not say.
        key: what clients have to send; None if anybody may use the model.
        origins: of web pages that may use the model; "*" for any.
        draining: whether no more requests are taken, because the process is ending.
        created: seconds since 1970.
    """

    service: Service
    texts: Texts
    model: str
    capacity: int
    defaults: Defaults
    key: str | None = None
    origins: tuple[str, ...] = ()
    draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    meters: Meters = field(init=False)

    def __post_init__(self) -> None:
        self.meters = Meters(self.service)
