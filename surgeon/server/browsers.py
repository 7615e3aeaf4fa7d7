"""Which web pages may use the server: browsers ask it before a page of another origin does (CORS)."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import urlsplit

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

ANY = "*"
_PORTS = {"http": 80, "https": 443}


def check_origin(origin: str) -> str:
    """An origin as browsers send it, or "*" for any; what they never send would let nobody in.

    Raises:
        ValueError: if it is none, or written in another way.
    """
    if origin == ANY:
        return origin
    try:
        parts = urlsplit(origin)
        host, port = (parts.hostname or "").encode("idna").decode(), parts.port
    except ValueError:  # no port, no address, no name that there can be
        host = ""
    if not host or ANY in host or not parts.scheme:
        raise ValueError(f"{origin!r} is no origin of web pages; write one such as http://localhost:3000, or * for any")
    place = f"[{host}]" if ":" in host else host
    written = f"{parts.scheme}://{place}" + ("" if port in (None, _PORTS.get(parts.scheme)) else f":{port}")
    if written != origin:
        raise ValueError(f"browsers never send {origin!r} as an origin of web pages; write {written}")
    return origin


def with_browsers(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """An application that pages of these origins may use, its errors among what they may read.

    What a browser asks beforehand (the preflight) is answered here, without a key, which it does not send then.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "HEAD", "POST"),
        allow_headers=("*",),  # clients add some of their own
        allow_private_network=True,
        expose_headers=("Retry-After",),
    )
