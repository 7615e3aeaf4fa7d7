"""Errors as OpenAI's clients expect them: `{"error": {"message", "type", "param", "code"}}` and a status."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.responses import JSONResponse

RETRY_SOON = {"Retry-After": "1"}
MOST_SHOWN = 60  # characters of a client's value in a message
GONE = 499  # the client hung up; nobody reads this status, it is only counted

_SHORT = reprlib.Repr()  # writes only the first items of a list
_SHORT.maxstring = _SHORT.maxother = MOST_SHOWN

# What pydantic says of a field that takes several types is a list of what each of them lacks.
_KINDS = {
    "chat_template_kwargs": 'an object such as {"enable_thinking": false}',
    "prompt": "a text, a list of texts, a list of token ids, or a list of such lists",
    "stop": "a text or a list of texts",
    "stream_options": 'an object such as {"include_usage": true}',
    "messages": 'a list of messages such as {"role": "user", "content": "Hello"}',
}


class ApiError(Exception):
    """An answer that is an error; its type, in OpenAI's words, follows from the HTTP status.

    Attributes:
        param: the field at fault.
    """

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        kind = "invalid_request_error"
        if self.status >= 500:
            kind = "server_error"
        elif self.status == 429:
            kind = "rate_limit_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status, self.headers)


def invalid(message: str, param: str | None = None) -> ApiError:
    """400: the client can mend it."""
    return ApiError(400, message, param)


def refuse_while_draining() -> ApiError:
    """503 while the last requests are finished."""
    return ApiError(503, "the server is ending and takes no more requests", code="draining")


def refuse_after_failure(reason: Exception) -> ApiError:
    """503 after a rank has failed."""
    return ApiError(503, f"the server has failed: {reason}", code="rank_failed")


def short(value: Any) -> str:
    """A client's value, short enough for a message."""
    text = _SHORT.repr(value)
    if len(text) <= MOST_SHOWN:
        return text
    return f"{text[: MOST_SHOWN - 3]}..."


def explain(errors: Sequence[Any]) -> ApiError:
    """The first of pydantic's complaints about a body, in a sentence that names field and value."""
    error = errors[0]
    kind = error["type"]
    path = error["loc"][1:]
    value = error.get("input")
    if kind == "json_invalid":
        return invalid(f"the body is not valid JSON: {error['ctx']['error']} (at character {path[0]})")
    if not path:
        return invalid("the body must be a JSON object, sent with Content-Type: application/json")
    field = str(path[0])
    name = ".".join(map(str, path))
    if kind == "missing":
        return invalid(f"{name} is missing", field)
    if field in _KINDS:
        return invalid(f"{field} must be {_KINDS[field]}, not {short(value)}", field)
    wanted = str(error["msg"]).removeprefix("Input should be ").removeprefix("a valid ")
    return invalid(f"{name} must be a valid {wanted}, not {short(value)}", field)
