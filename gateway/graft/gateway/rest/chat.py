"""POST /v1/chat/completions, streamed and not."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from graft.gateway.answer import Answer
from graft.gateway.chat_request import ChatRequest
from graft.gateway.core import Gateway
from graft.gateway.job import Collected, Delta, Finished, Started
from graft.gateway.rest import shapes
from graft.gateway.rest.context import (
    asked_by,
    cadence_of,
    collect,
    gateway_of,
    ignored_header,
)
from graft.gateway.rest.message import Deltas, finish_reason, message_body
from graft.gateway.rest.sse import Shaper, begin
from graft.gateway.rest.trace import rounds_body
from graft.gateway.rounds import SeenRound
from graft.gateway.speech.reader import read_message

router = APIRouter(tags=["chat"])


@router.post("/v1/chat/completions")
async def create_chat_completion(body: ChatRequest, request: Request) -> Response:
    """Writes the next message of a conversation."""
    gateway = gateway_of(request)
    headers = ignored_header(gateway, body)
    answer = gateway.answer(await gateway.prepare_chat(body, asked_by(request)))
    chunks = _ChatChunks(gateway, body, answer)
    events = gateway.run(answer)
    if body.stream:
        return await begin(events, request, chunks, cadence_of(gateway), headers)
    choices = await collect(answer, events, request)
    content = {
        **chunks.frame("chat.completion"),
        "choices": [chunks.whole(index, choice) for index, choice in enumerate(choices)],
        "usage": shapes.usage(answer.tally),
        "metrics": shapes.metrics(answer.tally),
    }
    return JSONResponse(content, headers=headers)


class _ChatChunks(Shaper):
    """The objects of one chat completion."""

    def __init__(self, gateway: Gateway, body: ChatRequest, answer: Answer) -> None:
        self._gateway = gateway
        self._body = body
        self._answer = answer
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        options = body.stream_options
        self._usage = options is not None and options.include_usage
        self._usage_always = options is not None and options.continuous_usage_stats
        self._deltas = [Deltas(answer.job.speech) for _ in answer.job.choices]

    def frame(self, kind: str) -> dict[str, Any]:
        """What every object of the completion carries."""
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._gateway.model,
        }

    def whole(self, index: int, choice: Collected) -> dict[str, Any]:
        """A choice of the body that is not streamed."""
        texts = [one.text for one in choice.tokens]
        message = read_message(choice.text, self._answer.job.speech, texts)
        self._answer.tally.num_reasoning += message.num_reasoning_tokens
        return {
            "index": index,
            "message": message_body(message),
            "logprobs": self._logprobs(choice.tokens),
            "finish_reason": finish_reason(choice.reason, len(message.calls)),
            "stop_reason": choice.stop,
            **self._tokens(choice.tokens),
            **self._rounds(choice.rounds),
        }

    def started(self, event: Started) -> list[dict[str, Any]]:
        """The role, and no text yet."""
        return [self._chunk(event.index, {"role": "assistant", "content": ""})]

    def delta(self, event: Delta) -> list[dict[str, Any]]:
        """A piece of text; a piece without text is sent only for what its tokens carry."""
        tokens = event.piece.tokens
        carries = bool(tokens) and (self._body.logprobs or self._body.return_token_ids)
        deltas = self._deltas[event.index]
        delta = deltas.of(event.piece.text, tokens)
        self._answer.tally.num_reasoning += deltas.num_reasoning_tokens
        if not delta and not carries and not event.rounds:
            return []
        chunk = self._chunk(event.index, delta)
        chunk["choices"][0].update(
            logprobs=self._logprobs(tokens), **self._tokens(tokens), **self._rounds(event.rounds)
        )
        return [chunk]

    def finished(self, event: Finished) -> list[dict[str, Any]]:
        """What was held back, then the one chunk of a choice with a finish_reason."""
        deltas = self._deltas[event.index]
        rest = deltas.rest()
        chunk = self._chunk(event.index, {})
        reason = finish_reason(event.reason, deltas.num_calls)
        chunk["choices"][0].update(finish_reason=reason, stop_reason=event.stop)
        return [*([self._chunk(event.index, rest)] if rest else []), chunk]

    def last(self) -> list[dict[str, Any]]:
        """Usage and metrics, where asked for."""
        if not self._usage:
            return []
        tally = self._answer.tally
        return [
            {
                **self.frame("chat.completion.chunk"),
                "choices": [],
                "usage": shapes.usage(tally),
                "metrics": shapes.metrics(tally),
            }
        ]

    def _chunk(self, index: int, delta: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk: dict[str, Any] = {**self.frame("chat.completion.chunk"), "choices": [choice]}
        if self._usage_always:
            chunk["usage"] = shapes.usage(self._answer.tally)
        elif self._usage:
            chunk["usage"] = None
        return chunk

    def _logprobs(self, tokens: Any) -> dict[str, Any] | None:
        if not self._body.logprobs:
            return None
        return shapes.chat_logprobs(tokens, self._gateway.tokenizer)

    def _tokens(self, tokens: Any) -> dict[str, Any]:
        return shapes.token_lists(tokens) if self._body.return_token_ids else {}

    def _rounds(self, rounds: Iterable[SeenRound]) -> dict[str, Any]:
        if not self._body.speculation_trace:
            return {}
        return {"speculation_trace": rounds_body(rounds, self._gateway.tokenizer)}
