"""The paths of the API."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from surgeon.server.answers import chat, complete
from surgeon.server.bodies import ChatBody, CompletionBody
from surgeon.server.errors import ApiError, explain
from surgeon.server.gate import MOST_BYTES, counted, guarded, too_large, with_browsers
from surgeon.server.state import ServerState
from surgeon.version import __version__


def make_app(state: ServerState) -> ASGIApp:
    """The application that answers for a server."""
    app = FastAPI(
        title="surgeon", version=__version__, docs_url=None, redoc_url=None, max_body_size=MOST_BYTES
    )  # the pages of documentation would fetch scripts from elsewhere; /openapi.json is there
    _add_paths(app, state)
    _add_errors(app)
    return counted(with_browsers(guarded(app, state), state.origins), state)


def _add_paths(app: FastAPI, state: ServerState) -> None:
    @app.post("/v1/completions", response_model=None)
    async def completions(request: Request, body: CompletionBody) -> Response:
        state.check_model(body.model)
        return await complete(request, state, body)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        state.check_model(body.model)
        return await chat(request, state, body)

    @app.head("/v1/models", include_in_schema=False)
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [state.card()]}

    @app.head("/v1/models/{name:path}", include_in_schema=False)
    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        state.check_model(name)
        return state.card()

    @app.head("/health", response_model=None, include_in_schema=False)
    @app.get("/health", response_model=None)
    async def health() -> Response:
        if state.service.failure is not None:
            return JSONResponse({"status": "failed", "reason": str(state.service.failure)}, 503)
        if state.draining:
            return JSONResponse({"status": "draining"}, 503)
        return JSONResponse({"status": "ok"})

    @app.head("/metrics", response_model=None, include_in_schema=False)
    @app.get("/metrics", response_model=None)
    def metrics() -> Response:  # in a thread: the ranks may be asked
        return Response(state.meters.text(), media_type=CONTENT_TYPE_LATEST)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid_body(_: Request, error: RequestValidationError) -> Response:
        return explain(error.errors()).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        """What the framework refuses: unknown paths, wrong methods, bodies that are too large or no text."""
        path = request.url.path
        status = error.status_code
        words = {404: f"there is no {path} here", 405: f"{path} does not take {request.method}"}
        refused = ApiError(status, words.get(status, str(error.detail)), headers=error.headers)
        return (too_large() if status == 413 else refused).response()

    @app.exception_handler(Exception)
    async def defect(_: Request, error: Exception) -> Response:
        del error  # uvicorn writes its traceback to standard error, and the client need not know it
        return ApiError(500, "internal error; the server's log has the details").response()
