"""A span for each HTTP request that asks for work. Knows headers; no route."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from graft.common.tracing import Tracing, current, failed, parent_of

_SERVER_ERROR = 500


class Traced:
    """Stands around the whole application; the span is current for all that the request does."""

    def __init__(self, app: ASGIApp, tracing: Tracing) -> None:
        self._app = app
        self._tracing = tracing

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]
        }
        method = scope["method"]
        with self._tracing.serving(method, parent_of(headers), {"http.request.method": method}):
            await self._app(scope, receive, send)


def describe_request(method: str, route: str, request_id: str, status: int) -> None:
    """Says in the current span what was asked and how it was answered."""
    span = current()
    if not span.is_recording():
        return
    span.update_name(f"{method} {route}")
    span.set_attributes(
        {"http.route": route, "http.response.status_code": status, "graft.request": request_id}
    )
    if status >= _SERVER_ERROR:
        failed(span, str(status))
