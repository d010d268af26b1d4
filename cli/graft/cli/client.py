"""A small client of the gateway's REST surface: JSON in, server-sent events out."""

from __future__ import annotations

import contextlib
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from graft.common.errors import GraftError, InvalidArgument

_TIMEOUT_S = 300.0
_MAX_ERROR_BYTES = 1 << 16
_MAX_LINE_BYTES = 1 << 22


class GatewayRefused(GraftError):
    """The gateway answered with an error."""


class GatewayUnreachable(GraftError):
    """Nothing answers at the address."""


@dataclass(frozen=True, slots=True)
class Client:
    """Where the gateway is and the key it wants."""

    url: str
    api_key: str | None = None

    def get(self, path: str) -> Any:
        """The JSON answer to a GET.

        Raises:
            GatewayUnreachable, GatewayRefused: as their names say.
        """
        with self._open(path, None) as response:
            return json.load(response)

    def model(self) -> str:
        """The first model the gateway serves."""
        models = self.get("/v1/models").get("data") or []
        if not models:
            raise GatewayRefused(f"{self.url} serves no model")
        return str(models[0]["id"])

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """The chunks of a streamed answer, without the closing [DONE].

        Raises:
            GatewayUnreachable: nothing answers, or the stream ends early.
            GatewayRefused: an error before or inside the stream.
        """
        done = False
        with self._open(path, {**body, "stream": True}) as response:
            for event in _events(response, self.url):
                if event == "[DONE]":
                    done = True
                    break
                chunk = json.loads(event)
                if "error" in chunk:
                    raise GatewayRefused(_message(chunk) or "the answer failed")
                yield chunk
        if not done:
            raise GatewayUnreachable(f"{self.url} ended the answer early")

    def _open(self, path: str, body: Mapping[str, Any] | None) -> Any:
        headers = {"accept": "application/json", "user-agent": "graft-cli"}
        if self.api_key:
            headers["authorization"] = f"Bearer {self.api_key}"
        content = None
        if body is not None:
            content = json.dumps(body).encode()
            headers["content-type"] = "application/json"
        address = self.url.rstrip("/").removesuffix("/v1") + path
        if not address.startswith(("http://", "https://")):
            raise InvalidArgument(f"{self.url} is not an address such as http://127.0.0.1:8000")
        request = urllib.request.Request(address, data=content, headers=headers)
        opener = urllib.request.build_opener(_NoProxyOnLoopback())
        try:
            return opener.open(request, timeout=_TIMEOUT_S)
        except urllib.error.HTTPError as error:
            _refuse(error)
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise GatewayUnreachable(f"no gateway answers at {self.url}: {reason}") from None


class _NoProxyOnLoopback(urllib.request.ProxyHandler):
    """Uses the machine's proxy except for this machine itself."""

    def __init__(self) -> None:
        super().__init__()

    def proxy_open(self, req: Any, proxy: Any, type: Any) -> Any:
        host = (req.host or "").rsplit(":", 1)[0]
        if host == "localhost" or host.startswith(("127.", "[::1]")):
            return None
        return super().proxy_open(req, proxy, type)


def _events(response: Any, url: str) -> Iterator[str]:
    data: list[str] = []
    while True:
        try:
            line = response.readline(_MAX_LINE_BYTES)
        except (OSError, ValueError) as error:
            raise GatewayUnreachable(f"{url} stopped answering: {error}") from None
        if not line:
            return
        text = line.decode(errors="replace").rstrip("\r\n")
        if text.startswith("data:"):
            data.append(text.removeprefix("data:").removeprefix(" "))
        elif not text and data:
            yield "\n".join(data)
            data = []


def _refuse(error: urllib.error.HTTPError) -> NoReturn:
    answer: Any = None
    with error, contextlib.suppress(ValueError, OSError):
        answer = json.loads(error.read(_MAX_ERROR_BYTES))
    raise GatewayRefused(f"{_message(answer) or error.reason} (HTTP {error.code})") from None


def _message(answer: Any) -> str | None:
    if isinstance(answer, dict) and isinstance(answer.get("error"), dict):
        return str(answer["error"].get("message") or "") or None
    return None
