"""One connection of a client: how long and how large the head of a request may be.

uvicorn bounds neither, so that clients that send a byte a minute would hold descriptors for ever.
Knows no route; bodies are bounded by the middleware.
"""

from __future__ import annotations

import asyncio
from typing import Any

import uvicorn
from starlette.responses import JSONResponse
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol
from uvicorn.server import ServerState

from graft.gateway.rest.errors import HttpError, http_error_response

MAX_HEAD_BYTES = 64 << 10


class ServerConfig(uvicorn.Config):
    """uvicorn's configuration, and how long a request's head may take."""

    def __init__(self, app: Any, head_timeout_s: float, **options: Any) -> None:
        super().__init__(app, http=Connection, **options)
        self.head_timeout_s = head_timeout_s


class Connection(HttpToolsProtocol):
    """uvicorn's connection with limits on heads, and its own errors in our shape."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        assert isinstance(config, ServerConfig)
        self._head_timeout_s = config.head_timeout_s
        self._in_head = True
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_head:
            self._head_bytes += len(data)
            self._expect_head()
        super().data_received(data)
        if self._in_head and self._head_bytes > MAX_HEAD_BYTES:
            self._refuse(
                431, "headers_too_large", f"the headers are larger than {MAX_HEAD_BYTES} bytes"
            )

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_waiting()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._in_head = True
        self._head_bytes = 0

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, "invalid_http", "this is not a valid HTTP request")

    def _expect_head(self) -> None:
        """Starts the clock of a head; between requests uvicorn's keep-alive clock runs."""
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self._head_timeout_s, self._late)

    def _stop_waiting(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _late(self) -> None:
        self._head_timer = None
        if self._head_bytes == 0:
            self.transport.close()
            return
        self._refuse(
            408,
            "request_timeout",
            f"the headers did not come within {self._head_timeout_s:g} s",
        )

    def _refuse(self, status: int, code: str, message: str) -> None:
        """Says why and closes; an answer that is still being sent on it is cut off."""
        self._stop_waiting()
        if self.transport.is_closing():
            return
        running = self.cycle is not None and not self.cycle.response_complete
        if not running:
            response = http_error_response(HttpError(status, code, message))
            self.transport.write(_written(status, response))
        self.transport.close()


def _written(status: int, response: JSONResponse) -> bytes:
    lines = [STATUS_LINE[status], b"connection: close\r\n"]
    lines += [name + b": " + value + b"\r\n" for name, value in response.raw_headers]
    return b"".join([*lines, b"\r\n", bytes(response.body)])
