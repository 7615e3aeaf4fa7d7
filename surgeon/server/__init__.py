"""The OpenAI API over HTTP: `surgeon serve`.

From a request to its answer: `state` counts it, lets web pages in and asks for the key, `bodies` checks its fields and
makes token ids of it, `answers` gives them to the service, merges the events and puts them into OpenAI's words, whole
or as a stream. `run` ties these to their paths, and begins and ends the process.
"""

from surgeon.errors import needs_extra

with needs_extra("serve", "serving"):
    import fastapi  # noqa: F401
    import prometheus_client  # noqa: F401
    import uvicorn  # noqa: F401
