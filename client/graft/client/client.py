"""The asyncio client of the gateway's gRPC API. Knows calls and retries; knows no model."""

from __future__ import annotations

import random
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc.aio
from tenacity import AsyncRetrying, RetryCallState, retry_if_exception, stop_after_attempt

from graft.client.answers import (
    Answer,
    Model,
    Piece,
    ServerInfo,
    answer_of,
    model_of,
    piece_of,
    server_info_of,
)
from graft.client.failure import CallFailed, call_failed
from graft.client.options import Message, Options, chat_fields, conversation, prompts
from graft.common.channel import Tls, open_channel
from graft.common.tracing import outgoing_metadata
from graft.v1 import gateway_pb2, gateway_pb2_grpc

_Result = TypeVar("_Result")

_FIRST_PAUSE_S = 0.2
_MAX_PAUSE_S = 8.0
_DEFAULTS = Options()
_RESPONSES = (gateway_pb2.ChatStreamResponse, gateway_pb2.CompleteStreamResponse)


class Client:
    """One gateway. Use it as a context; calls may run side by side.

    A call that the gateway did not admit is made again up to `retries` times, after the pause that
    the gateway names. A connection that fails is tried again only for what asks and writes nothing.
    A stream is never begun again once its first piece has come.
    """

    def __init__(
        self,
        address: str = "127.0.0.1:8001",
        *,
        api_key: str = "",
        tls: Tls | None = None,
        insecure: bool = False,
        timeout_s: float = 600.0,
        retries: int = 2,
    ) -> None:
        self._address = address
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        self._tls = tls
        self._insecure = insecure
        self._timeout_s = timeout_s
        self._retries = retries
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        self._channel = open_channel(self._address, tls=self._tls, plaintext_ok=self._insecure)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            await channel.close(None)

    async def chat(
        self, messages: str | Sequence[Message], options: Options = _DEFAULTS, *, model: str = ""
    ) -> Answer:
        """The next message of a conversation; a text alone is one message of the user.

        Raises:
            CallFailed: the gateway refused, failed, or was not reached.
        """
        request = gateway_pb2.ChatRequest(**_chat(messages, options, model))
        response = await self._call(lambda stub: stub.Chat, request, _may_write)
        return answer_of(response.answer)

    async def chat_stream(
        self, messages: str | Sequence[Message], options: Options = _DEFAULTS, *, model: str = ""
    ) -> AsyncGenerator[Piece, None]:
        """As `chat`, piece by piece as it is written; closing the iterator ends the work."""
        request = gateway_pb2.ChatStreamRequest(**_chat(messages, options, model))
        async with aclosing(self._stream(lambda stub: stub.ChatStream, request)) as pieces:
            async for piece in pieces:
                yield piece

    async def complete(
        self,
        prompt: str | Sequence[str] | Sequence[int],
        options: Options = _DEFAULTS,
        *,
        echo: bool = False,
        model: str = "",
    ) -> Answer:
        """The continuation of a text, of several texts, or of one prompt of token ids.

        Raises:
            CallFailed: the gateway refused, failed, or was not reached.
        """
        request = gateway_pb2.CompleteRequest(
            model=model, prompts=prompts(prompt), echo=echo, options=options.message()
        )
        response = await self._call(lambda stub: stub.Complete, request, _may_write)
        return answer_of(response.answer)

    async def complete_stream(
        self,
        prompt: str | Sequence[str] | Sequence[int],
        options: Options = _DEFAULTS,
        *,
        echo: bool = False,
        model: str = "",
    ) -> AsyncGenerator[Piece, None]:
        """As `complete`, piece by piece as it is written; closing the iterator ends the work."""
        request = gateway_pb2.CompleteStreamRequest(
            model=model, prompts=prompts(prompt), echo=echo, options=options.message()
        )
        async with aclosing(self._stream(lambda stub: stub.CompleteStream, request)) as pieces:
            async for piece in pieces:
                yield piece

    async def tokenize(self, text: str | Sequence[Message]) -> list[int]:
        """The token ids of a text, or of a conversation as its template writes it."""
        if isinstance(text, str):
            request = gateway_pb2.TokenizeRequest(text=text)
        else:
            request = gateway_pb2.TokenizeRequest(messages=conversation(text))
        response = await self._call(lambda stub: stub.Tokenize, request, _only_asks)
        return list(response.tokens)

    async def detokenize(self, tokens: Sequence[int]) -> str:
        """The text of token ids."""
        request = gateway_pb2.DetokenizeRequest(tokens=tokens)
        response = await self._call(lambda stub: stub.Detokenize, request, _only_asks)
        return str(response.text)

    async def models(self) -> list[Model]:
        """What is served."""
        request = gateway_pb2.ListModelsRequest()
        response = await self._call(lambda stub: stub.ListModels, request, _only_asks)
        return [model_of(model) for model in response.models]

    async def server_info(self) -> ServerInfo:
        """How the server is doing."""
        request = gateway_pb2.GetServerInfoRequest()
        response = await self._call(lambda stub: stub.GetServerInfo, request, _only_asks)
        return server_info_of(response)

    async def _call(
        self,
        method: Callable[[Any], Callable[..., Awaitable[Any]]],
        request: Any,
        safe: Callable[[BaseException], bool],
    ) -> Any:
        async def once() -> Any:
            try:
                return await method(self._stub())(
                    request, timeout=self._timeout_s, metadata=self._headers()
                )
            except grpc.aio.AioRpcError as error:
                raise call_failed(error) from None

        return await self._retrying(once, safe)

    async def _stream(
        self, method: Callable[[Any], Callable[..., Any]], request: Any
    ) -> AsyncGenerator[Piece, None]:
        calls: list[Any] = []

        async def begin() -> Any:
            """The first message of a new call; the call is the last one in `calls`."""
            calls.append(
                method(self._stub())(request, timeout=self._timeout_s, metadata=self._headers())
            )
            try:
                return await calls[-1].read()
            except grpc.aio.AioRpcError as error:
                raise call_failed(error) from None

        try:
            message = await self._retrying(begin, _may_write)
            async for event in _messages(calls[-1], message):
                piece = piece_of(event)
                if piece is not None:
                    yield piece
        finally:
            for call in calls:
                call.cancel()

    async def _retrying(
        self, call: Callable[[], Awaitable[_Result]], safe: Callable[[BaseException], bool]
    ) -> _Result:
        trying = AsyncRetrying(
            stop=stop_after_attempt(self._retries + 1),
            wait=_pause_s,
            retry=retry_if_exception(safe),
            reraise=True,
        )
        return await trying(call)

    def _stub(self) -> Any:
        if self._channel is None:
            raise RuntimeError("the client is not open; use it in an async with statement")
        return gateway_pb2_grpc.GatewayServiceStub(self._channel)

    def _headers(self) -> tuple[tuple[str, str], ...]:
        return (*self._metadata, *outgoing_metadata())


async def _messages(call: Any, first: Any) -> AsyncIterator[gateway_pb2.AnswerEvent]:
    """The events of a call whose first message has been read.

    Raises:
        CallFailed: the answer broke off.
    """
    message = first
    try:
        while isinstance(message, _RESPONSES):
            yield message.event
            message = await call.read()
    except grpc.aio.AioRpcError as error:
        raise call_failed(error) from None


def _chat(messages: str | Sequence[Message], options: Options, model: str) -> dict[str, Any]:
    return {
        "model": model,
        "messages": conversation(messages),
        "options": options.message(),
        **chat_fields(options),
    }


def _may_write(error: BaseException) -> bool:
    return isinstance(error, CallFailed) and error.not_admitted


def _only_asks(error: BaseException) -> bool:
    return isinstance(error, CallFailed) and (error.not_admitted or error.unreachable)


def _pause_s(state: RetryCallState) -> float:
    """What the gateway asked for, and more at every try; never the same for two clients."""
    error = None if state.outcome is None else state.outcome.exception()
    asked_s = (error.retry_after_s or 0.0) if isinstance(error, CallFailed) else 0.0
    longest_s = max(asked_s, _FIRST_PAUSE_S * 2**state.attempt_number)
    return min(_MAX_PAUSE_S, asked_s + random.uniform(0, longest_s))
