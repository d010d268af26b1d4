"""POST /v1/completions: texts or token ids, echo, and logprobs of prompts."""

from __future__ import annotations

import time
import uuid
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from graft.gateway.answer import Answer
from graft.gateway.core import Gateway
from graft.gateway.job import Delta, Finished, Started
from graft.gateway.request import CompletionRequest
from graft.gateway.rest import shapes
from graft.gateway.rest.context import (
    asked_by,
    cadence_of,
    collect,
    gateway_of,
    ignored_header,
)
from graft.gateway.rest.sse import Shaper, begin
from graft.gateway.rest.trace import rounds_body
from graft.gateway.text import Piece, token_texts

router = APIRouter(tags=["completions"])


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, request: Request) -> Response:
    """Continues texts."""
    gateway = gateway_of(request)
    headers = ignored_header(gateway, body)
    answer = gateway.answer(await gateway.prepare_completion(body, asked_by(request)))
    chunks = _TextChunks(gateway, body, answer)
    events = gateway.run(answer)
    if body.stream:
        return await begin(events, request, chunks, cadence_of(gateway), headers)
    choices = []
    for index, choice in enumerate(await collect(answer, events, request)):
        piece = Piece(choice.text, tuple(choice.tokens))
        delta = Delta(index, piece, tuple(choice.prompt), tuple(choice.rounds))
        part = chunks.part(delta)
        choices.append({**part, "finish_reason": choice.reason, "stop_reason": choice.stop})
    content = {
        **chunks.frame(),
        "choices": choices,
        "usage": shapes.usage(answer.tally),
        "metrics": shapes.metrics(answer.tally),
    }
    return JSONResponse(content, headers=headers)


class _TextChunks(Shaper):
    """The objects of one text completion."""

    def __init__(self, gateway: Gateway, body: CompletionRequest, answer: Answer) -> None:
        self._gateway = gateway
        self._body = body
        self._answer = answer
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())
        options = body.stream_options
        self._usage = options is not None and options.include_usage
        self._usage_always = options is not None and options.continuous_usage_stats
        self._logprobs = [shapes.TextLogprobs(gateway.tokenizer) for _ in answer.job.choices]
        self._echoed = [not body.echo for _ in answer.job.choices]

    def frame(self) -> dict[str, Any]:
        """What every object of the completion carries."""
        return {
            "id": self._id,
            "object": "text_completion",
            "created": self._created,
            "model": self._gateway.model,
        }

    def part(self, event: Delta) -> dict[str, Any]:
        """A piece of a choice, the prompt before it where it is echoed for the first time."""
        wanted = self._body.logprobs is not None
        text, logprobs = event.piece.text, []
        if not self._echoed[event.index]:
            self._echoed[event.index] = True
            texts = self._prompt_texts(event.index)
            text = "".join(texts) + text
            if wanted:
                logprobs.append(self._logprobs[event.index].prompt(event.prompt, texts))
        if wanted:
            logprobs.append(self._logprobs[event.index].generated(event.piece.tokens))
        part = {
            "index": event.index,
            "text": text,
            "logprobs": shapes.joined(logprobs) if wanted else None,
            "finish_reason": None,
        }
        if self._body.return_token_ids:
            part.update(shapes.token_lists(event.piece.tokens))
        if self._body.speculation_trace:
            part["speculation_trace"] = rounds_body(event.rounds, self._gateway.tokenizer)
        return part

    def started(self, event: Started) -> list[dict[str, Any]]:
        """Nothing: a text completion has no role."""
        return []

    def delta(self, event: Delta) -> list[dict[str, Any]]:
        """A piece of text; a piece without text is sent only for what its tokens carry."""
        wanted = self._body.logprobs is not None or self._body.return_token_ids
        carries = wanted and (bool(event.piece.tokens) or bool(event.prompt))
        carries = carries or bool(event.rounds)
        if not event.piece.text and not carries and self._echoed[event.index]:
            return []
        return [self._chunk(self.part(event))]

    def finished(self, event: Finished) -> list[dict[str, Any]]:
        """The one chunk of a choice with a finish_reason; an echo nobody sent yet goes first."""
        chunks = []
        if not self._echoed[event.index]:
            chunks.append(self._chunk(self.part(Delta(event.index, Piece()))))
        last = {
            "index": event.index,
            "text": "",
            "logprobs": None,
            "finish_reason": event.reason,
            "stop_reason": event.stop,
        }
        return [*chunks, self._chunk(last)]

    def last(self) -> list[dict[str, Any]]:
        """Usage and metrics, where asked for."""
        if not self._usage:
            return []
        tally = self._answer.tally
        return [
            {
                **self.frame(),
                "choices": [],
                "usage": shapes.usage(tally),
                "metrics": shapes.metrics(tally),
            }
        ]

    def _chunk(self, choice: dict[str, Any]) -> dict[str, Any]:
        chunk: dict[str, Any] = {**self.frame(), "choices": [choice]}
        if self._usage_always:
            chunk["usage"] = shapes.usage(self._answer.tally)
        elif self._usage:
            chunk["usage"] = None
        return chunk

    def _prompt_texts(self, index: int) -> list[str]:
        """The prompt, token by token; half characters stand with the token that completes them."""
        tokenizer = self._gateway.tokenizer
        return token_texts(self._answer.job.choices[index].plan.prompt, tokenizer.token_bytes)
