"""Errors as OpenAI's clients read them: a nested object, and headers that say whether to retry."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from graft.common.errors import GraftError, Unauthenticated, mapping_of, reason_name

MAX_MESSAGE_BYTES = 4096


class HttpError(Exception):
    """A failure of HTTP itself: no such route, too large, wrong media type."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = code


def error_object(message: str, kind: str, param: str | None, code: str) -> dict[str, Any]:
    """The body of every error; the message is cut to its limit at a whole character."""
    cut = message.encode(errors="replace")[:MAX_MESSAGE_BYTES].decode(errors="ignore")
    return {"error": {"message": cut, "type": kind, "param": param, "code": code}}


def error_body(error: GraftError) -> dict[str, Any]:
    """The body of one of our errors."""
    code = reason_name(error.reason)
    if isinstance(error, Unauthenticated):
        code = "invalid_api_key"
    return error_object(str(error), mapping_of(error).kind, error.field, code)


def error_response(error: GraftError) -> JSONResponse:
    """The response to one of our errors."""
    mapping = mapping_of(error)
    headers: dict[str, str] = {}
    if not mapping.retriable:
        headers["x-should-retry"] = "false"
    elif mapping.http in (429, 503):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after_s or 1.0)))
    if mapping.http == 401:
        headers["www-authenticate"] = "Bearer"
    return JSONResponse(error_body(error), mapping.http, headers)


def http_error_response(error: HttpError, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """The response to a failure of HTTP itself."""
    body = error_object(str(error), "invalid_request_error", None, error.code)
    return JSONResponse(body, error.status, {**(headers or {}), "x-should-retry": "false"})
