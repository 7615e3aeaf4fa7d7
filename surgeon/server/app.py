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

from surgeon import __version__
from surgeon.errors import did_you_mean
from surgeon.server.answers import chat, complete
from surgeon.server.bodies import ChatBody, CompletionBody
from surgeon.server.browsers import with_browsers
from surgeon.server.errors import ApiError, explain, internal, too_large
from surgeon.server.gate import MOST_BYTES, Counter, Gate
from surgeon.server.state import ServerState


def make_app(state: ServerState) -> ASGIApp:
    """The application that answers for a server."""
    app = FastAPI(
        title="surgeon", version=__version__, docs_url=None, redoc_url=None, max_body_size=MOST_BYTES
    )  # the pages of documentation would fetch scripts from elsewhere; /openapi.json is there
    _add_answers(app, state)
    _add_views(app, state)
    _add_errors(app)
    return Counter(with_browsers(Gate(app, state), state.origins), state)


def _add_answers(app: FastAPI, state: ServerState) -> None:
    @app.post("/v1/completions", response_model=None)
    async def completions(request: Request, body: CompletionBody) -> Response:
        _check_model(state, body.model)
        return await complete(request, state, body)

    @app.post("/v1/chat/completions", response_model=None)
    async def chat_completions(request: Request, body: ChatBody) -> Response:
        _check_model(state, body.model)
        return await chat(request, state, body)


def _add_views(app: FastAPI, state: ServerState) -> None:
    @app.head("/v1/models", include_in_schema=False)
    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [_card(state)]}

    @app.head("/v1/models/{name:path}", include_in_schema=False)
    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> dict[str, Any]:
        _check_model(state, name)
        return _card(state)

    @app.head("/health", response_model=None, include_in_schema=False)
    @app.get("/health", response_model=None)
    async def health() -> Response:
        if state.service.failure is not None:
            return JSONResponse({"status": "failed", "reason": str(state.service.failure)}, 503)
        return JSONResponse({"status": "draining"}, 503) if state.draining else JSONResponse({"status": "ok"})

    @app.head("/metrics", response_model=None, include_in_schema=False)
    @app.get("/metrics", response_model=None)
    def metrics() -> Response:  # in a thread: the ranks may be asked
        return Response(state.meters.text(), media_type=CONTENT_TYPE_LATEST)


def _check_model(state: ServerState, name: str | None) -> None:
    if name not in (None, state.model):
        message = f"there is no model {name!r} here; {did_you_mean(str(name), [state.model])}"
        raise ApiError(404, message, "model", code="model_not_found")


def _card(state: ServerState) -> dict[str, Any]:
    return {
        "id": state.model,
        "object": "model",
        "created": state.created,
        "owned_by": "surgeon",
        "max_model_len": state.service.max_tokens,
    }


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(ApiError)
    async def api_error(_: Request, error: ApiError) -> Response:
        return error.response()

    @app.exception_handler(RequestValidationError)
    async def invalid_body(_: Request, error: RequestValidationError) -> Response:
        return explain(error.errors()).response()

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> Response:
        return _http_error(request, error).response()

    @app.exception_handler(Exception)
    async def defect(_: Request, error: Exception) -> Response:
        del error  # uvicorn writes its traceback to standard error
        return internal().response()


def _http_error(request: Request, error: HTTPException) -> ApiError:
    """What the framework refuses: unknown paths, wrong methods, bodies that are too large or no text."""
    if error.status_code == 413:
        return too_large(MOST_BYTES)
    words = {
        404: f"there is no {request.url.path} here",
        405: f"{request.url.path} does not take {request.method}",
    }
    message = words.get(error.status_code, str(error.detail))
    return ApiError(error.status_code, message, headers=error.headers)
