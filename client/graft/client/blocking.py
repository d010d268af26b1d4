"""The client for programs without an event loop: the same calls, each on a loop of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Sequence
from types import TracebackType
from typing import Any, Self

from graft.client.answers import Answer, Model, Piece, ServerInfo
from graft.client.client import Client
from graft.client.options import Message, Options

_DEFAULTS = Options()


class BlockingClient:
    """One gateway, one call at a time, from one thread. Arguments are those of `Client`."""

    def __init__(self, address: str = "127.0.0.1:8001", **settings: Any) -> None:
        self._client = Client(address, **settings)
        self._runner = asyncio.Runner()

    def __enter__(self) -> Self:
        self._runner.run(self._client.__aenter__())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self._runner.run(self._client.__aexit__(kind, error, traceback))
        finally:
            self._runner.close()

    def chat(
        self, messages: str | Sequence[Message], options: Options = _DEFAULTS, *, model: str = ""
    ) -> Answer:
        """As `Client.chat`."""
        return self._runner.run(self._client.chat(messages, options, model=model))

    def chat_stream(
        self, messages: str | Sequence[Message], options: Options = _DEFAULTS, *, model: str = ""
    ) -> Iterator[Piece]:
        """As `Client.chat_stream`."""
        return self._pieces(self._client.chat_stream(messages, options, model=model))

    def complete(
        self,
        prompt: str | Sequence[str] | Sequence[int],
        options: Options = _DEFAULTS,
        *,
        echo: bool = False,
        model: str = "",
    ) -> Answer:
        """As `Client.complete`."""
        return self._runner.run(self._client.complete(prompt, options, echo=echo, model=model))

    def complete_stream(
        self,
        prompt: str | Sequence[str] | Sequence[int],
        options: Options = _DEFAULTS,
        *,
        echo: bool = False,
        model: str = "",
    ) -> Iterator[Piece]:
        """As `Client.complete_stream`."""
        return self._pieces(self._client.complete_stream(prompt, options, echo=echo, model=model))

    def tokenize(self, text: str | Sequence[Message]) -> list[int]:
        """As `Client.tokenize`."""
        return self._runner.run(self._client.tokenize(text))

    def detokenize(self, tokens: Sequence[int]) -> str:
        """As `Client.detokenize`."""
        return self._runner.run(self._client.detokenize(tokens))

    def models(self) -> list[Model]:
        """As `Client.models`."""
        return self._runner.run(self._client.models())

    def server_info(self) -> ServerInfo:
        """As `Client.server_info`."""
        return self._runner.run(self._client.server_info())

    def _pieces(self, pieces: AsyncGenerator[Piece, None]) -> Iterator[Piece]:
        async def following() -> Piece | None:
            return await anext(pieces, None)

        try:
            while (piece := self._runner.run(following())) is not None:
                yield piece
        finally:
            self._runner.run(pieces.aclose())
