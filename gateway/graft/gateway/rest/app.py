"""The REST surface as one ASGI application."""

from __future__ import annotations

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp

from graft.common import log
from graft.common.errors import GraftError
from graft.common.tracing import OFF, Tracing
from graft.gateway.core import Gateway
from graft.gateway.faults import invalid
from graft.gateway.info import server_version
from graft.gateway.keys import Keys
from graft.gateway.rest import chat, completions, health, models, responses, tokenize
from graft.gateway.rest.errors import HttpError, error_response, http_error_response
from graft.gateway.rest.follow import ClientGone
from graft.gateway.rest.middleware import CLIENT_GONE, Front
from graft.gateway.rest.page import page_paths, page_router, read_files
from graft.gateway.rest.traced import Traced

_log = log.get("rest")
_CODES = {400: "invalid_json", 404: "not_found", 405: "method_not_allowed"}


def build(gateway: Gateway, tracing: Tracing = OFF) -> ASGIApp:
    """The application in front of `gateway`, with a span for each request where tracing is on."""
    app = FastAPI(
        title="Graft",
        version=server_version(),
        redirect_slashes=False,
        docs_url=None,
        redoc_url=None,
    )
    app.state.gateway = gateway
    for route in (models, chat, completions, responses, tokenize, health):
        app.include_router(route.router)
    app.add_exception_handler(GraftError, _graft_error)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(ClientGone, _client_gone)
    app.add_exception_handler(Exception, _defect)
    settings = gateway.settings
    page = read_files() if settings.ui else {}
    if page:
        app.include_router(page_router(page))
    front = Front(
        app,
        Keys(settings.api_keys),
        gateway.metrics,
        settings.max_body_bytes,
        page_paths(page) if page else frozenset(),
    )
    return Traced(front, tracing) if tracing.enabled else front


async def _graft_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, GraftError)
    return error_response(error)


async def _invalid(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    errors = error.errors()
    if errors and errors[0]["type"] == "json_invalid":
        reason = errors[0].get("ctx", {}).get("error", "")
        return http_error_response(
            HttpError(400, "invalid_json", f"the body is not valid JSON: {reason}")
        )
    return error_response(invalid(errors, loc_start=1))


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = _CODES.get(error.status_code, "invalid_request")
    path = request.url.path[:200]
    message = {
        400: f"the body is not valid JSON{_why(error.__cause__)}",
        404: f"there is no route {path}",
        405: f"{request.method} is not allowed on {path}",
    }.get(error.status_code, str(error.detail))
    return http_error_response(HttpError(error.status_code, code, message), error.headers)


def _why(cause: BaseException | None) -> str:
    if isinstance(cause, UnicodeDecodeError):
        return ": it is not UTF-8"
    if isinstance(cause, RecursionError):
        return ": it is nested too deeply"
    return ": a number has too many digits" if isinstance(cause, ValueError) else ""


async def _client_gone(_: Request, error: Exception) -> Response:
    return Response(status_code=CLIENT_GONE)


async def _defect(_: Request, error: Exception) -> Response:
    return error_response(GraftError("internal error"))
