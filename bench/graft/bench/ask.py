"""Asks a running gateway over REST, as any client does, and notes when what came.

Knows the OpenAI API and the fields this project adds to it; knows no schedule of requests.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from graft.bench.latency import Streamed
from graft.common.errors import GraftError

REQUEST_TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, and how.

    speculation: a word or a tier as in the API, or None for the server's own choice.
    """

    text: str
    max_tokens: int
    temperature: float = 0.0
    seed: int = 0
    speculation: str | Mapping[str, Any] | None = None
    cache_salt: str = ""

    def body(self, model: str) -> dict[str, Any]:
        """The JSON of a streamed chat completion."""
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": self.text}],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "seed": self.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.speculation is not None:
            word = self.speculation
            body["speculation"] = word if isinstance(word, str) else dict(word)
        if self.cache_salt:
            body["cache_salt"] = self.cache_salt
        return body


class Client:
    """One gateway. Use as an async context manager."""

    def __init__(self, url: str, api_key: str | None = None, connections: int = 64) -> None:
        self.url = url
        self.model = ""
        self._client = httpx.AsyncClient(
            base_url=url,
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=REQUEST_TIMEOUT_S,
            limits=httpx.Limits(max_connections=connections),
        )

    async def __aenter__(self) -> Client:
        listed = await self.call("GET", "/v1/models")
        self.model = str(listed["data"][0]["id"])
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._client.aclose()

    async def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """One plain request.

        Raises:
            GraftError: no answer, or another one than 200.
        """
        try:
            response = await self._client.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise GraftError(f"{self.url} did not answer: {error!r}") from None
        if response.status_code != 200:
            raise GraftError(f"{path} answered {response.status_code}: {response.text[:300]}")
        return response.json()

    async def page(self, path: str) -> str:
        """The text of a page.

        Raises:
            GraftError: as `call`.
        """
        try:
            response = await self._client.get(path)
        except httpx.HTTPError as error:
            raise GraftError(f"{self.url} did not answer: {error!r}") from None
        if response.status_code != 200:
            raise GraftError(f"{path} answered {response.status_code}: {response.text[:300]}")
        return response.text

    async def tokenize(self, text: str) -> list[int]:
        """Ids of a question as the chat template renders it."""
        body = {"messages": [{"role": "user", "content": text}]}
        tokens: list[int] = (await self.call("POST", "/tokenize", body))["tokens"]
        return tokens

    async def ask(self, question: Question) -> Any:
        """The whole answer to a question, as one object.

        Raises:
            GraftError: as `call`.
        """
        body = question.body(self.model)
        del body["stream"], body["stream_options"]
        return await self.call("POST", "/v1/chat/completions", body)

    async def stream(self, question: Question, due: float, clock: Callable[[], float]) -> Streamed:
        """Asks now; `due` is when it should have been asked. A failure is in the answer."""
        arrivals: list[float] = []
        last: dict[str, Any] = {}
        try:
            async with self._client.stream(
                "POST", "/v1/chat/completions", json=question.body(self.model)
            ) as response:
                if response.status_code != 200:
                    told = (await response.aread()).decode(errors="replace")
                    return Streamed(due, error=f"{response.status_code}: {told[:200]}")
                async for line in response.aiter_lines():
                    if not line.startswith("data: ") or line == "data: [DONE]":
                        continue
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        return Streamed(due, error=str(chunk["error"])[:200])
                    if any(choice["delta"].get("content") for choice in chunk["choices"]):
                        arrivals.append(clock())
                    if chunk.get("usage"):
                        last = chunk
        except (httpx.HTTPError, ValueError) as error:
            return Streamed(due, error=repr(error))
        if not last:
            return Streamed(due, error="the stream ended without its usage")
        record = (last.get("metrics") or {}).get("speculative_decoding") or {}
        return Streamed(
            due,
            tuple(arrivals or [clock()]),
            last["usage"]["completion_tokens"],
            record.get("num_rounds", 0),
            record.get("num_accepted_draft_tokens", 0),
        )


def stopwatch() -> Callable[[], float]:
    """A clock of seconds since now."""
    began = time.perf_counter()
    return lambda: time.perf_counter() - began
