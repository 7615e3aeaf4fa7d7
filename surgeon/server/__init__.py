"""The OpenAI API over HTTP: `surgeon serve`.

From a request to its answer: `gate` counts it, lets web pages in and asks for the key, `bodies` says what it may have,
`texts` makes token ids of it, `answers` gives them to the service and merges what comes back, `formats` puts that into
OpenAI's words, whole or as a stream. `app` ties these to their paths, `connections` ends those that hold the server up,
and `run` begins and ends the process.
"""

from surgeon.errors import needs_extra

with needs_extra("serve", "serving"):
    import fastapi  # noqa: F401
    import prometheus_client  # noqa: F401
    import uvicorn  # noqa: F401
