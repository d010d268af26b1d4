"""What happens to every HTTP request before a route sees it. Knows no route's meaning.

In this order: the request id, folding of the path, the API key, the media type, the size of the
body, which is read here so that nothing is parsed before its size is known. `send` in the state is
the server's own, for the pieces of a stream that has begun.
"""

from __future__ import annotations

import asyncio
import re
import time
import uuid

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from graft.common import log
from graft.common.errors import GraftError
from graft.gateway.keys import Keys
from graft.gateway.metrics import Metrics
from graft.gateway.rest.errors import HttpError, error_response, http_error_response
from graft.gateway.rest.traced import describe_request

_log = log.get("rest")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_SLASHES = re.compile(r"/{2,}")
_OPEN_PATHS = frozenset({"/health", "/ready", "/version", "/metrics", "/v1/version"})
CLIENT_GONE = 499
_BODY_TIMEOUT_S = 60.0


class Front:
    """The outermost ASGI application. `open_paths` need no key, beside those of probes."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Keys,
        metrics: Metrics,
        max_body_bytes: int,
        open_paths: frozenset[str] = frozenset(),
    ) -> None:
        self._app = app
        self._keys = keys
        self._metrics = metrics
        self._max_body_bytes = max_body_bytes
        self._open_paths = _OPEN_PATHS | open_paths

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        path = _SLASHES.sub("/", scope["path"])
        if len(path) > 1:
            path = path.rstrip("/") or "/"
        request = Request(scope)
        request_id = request.headers.get("x-request-id", "")
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        state = dict(scope.get("state") or {})
        state.update(request_id=request_id, tenant="", client_gone=False, send=send)
        scope = {**scope, "path": path, "raw_path": path.encode(), "state": state}
        inner = _as_routed(scope)
        status = 0

        async def noting(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            response = await self._refusal(scope)
            if response is None:
                body = await self._body_in_time(receive)
                await self._app(inner, _replaying(body, receive), noting)
            else:
                await response(scope, receive, noting)
        except HttpError as error:
            await http_error_response(error, _closing(error))(scope, receive, noting)
        except _Gone:
            state["client_gone"] = True
        finally:
            code = CLIENT_GONE if state["client_gone"] else status
            route = inner.get("route")
            name = getattr(route, "path", "other")
            describe_request(scope["method"], name, request_id, code)
            self._metrics.request(name, str(code))
            line = _log.debug if path in self._open_paths else _log.info
            line(
                "request answered",
                request=request_id,
                method=scope["method"],
                route=name,
                status=code,
                millis=round((time.monotonic() - began) * 1000, 1),
            )

    async def _refusal(self, scope: Scope) -> Response | None:
        request = Request(scope)
        path = scope["path"]
        if path not in self._open_paths:
            try:
                raw = dict(scope["headers"]).get(b"authorization")
                scope["state"]["tenant"] = self._keys.tenant(raw)
            except GraftError as error:
                return error_response(error)
        if scope["method"] in ("POST", "PUT", "PATCH"):
            kind = request.headers.get("content-type", "").split(";")[0].strip()
            if kind and kind.lower() != "application/json" and not kind.lower().endswith("+json"):
                raise HttpError(
                    415,
                    "unsupported_media_type",
                    f"the body is {kind[:100]}, expected application/json",
                )
        length = request.headers.get("content-length", "0")
        if length.isdigit() and int(length) > self._max_body_bytes:
            raise self._too_large()
        return None

    async def _body_in_time(self, receive: Receive) -> bytes:
        try:
            async with asyncio.timeout(_BODY_TIMEOUT_S):
                return await self._body(receive)
        except TimeoutError:
            message = f"the body did not come within {_BODY_TIMEOUT_S:g} s"
            raise HttpError(408, "request_timeout", message) from None

    async def _body(self, receive: Receive) -> bytes:
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise _Gone
            part = message.get("body", b"")
            size += len(part)
            if size > self._max_body_bytes:
                raise self._too_large()
            parts.append(part)
            if not message.get("more_body", False):
                return b"".join(parts)

    def _too_large(self) -> HttpError:
        return HttpError(
            413,
            "request_too_large",
            f"the body is larger than the limit of {self._max_body_bytes} bytes",
        )


def _as_routed(scope: Scope) -> Scope:
    """The request as routes see it: HEAD is a GET whose body the server drops, and a body that
    passed is JSON, whichever of its names it came under."""
    method = "GET" if scope["method"] == "HEAD" else scope["method"]
    headers = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
    headers.append((b"content-type", b"application/json"))
    return {**scope, "method": method, "headers": headers}


class _Gone(Exception):
    """The client left before its request was complete."""


def _replaying(body: bytes, receive: Receive) -> Receive:
    """A receive that gives the body once, then whatever comes after it: the disconnect."""
    given = False

    async def replay() -> Message:
        nonlocal given
        if not given:
            given = True
            return {"type": "http.request", "body": body, "more_body": False}
        return await receive()

    return replay


def _closing(error: HttpError) -> dict[str, str]:
    """A body that was not read to its end leaves a connection that cannot be used again."""
    return {"connection": "close"} if error.status in (408, 413) else {}
