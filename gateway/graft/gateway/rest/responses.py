"""POST /v1/responses, streamed and not. Stateless: nothing is stored, nothing can be fetched."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from graft.common.errors import GraftError
from graft.gateway.answer import Answer
from graft.gateway.core import Gateway
from graft.gateway.job import Delta, Finished, Started
from graft.gateway.responses_request import ResponsesRequest, rename
from graft.gateway.rest import shapes
from graft.gateway.rest.context import (
    asked_by,
    cadence_of,
    collect,
    gateway_of,
    ignored_header,
)
from graft.gateway.rest.errors import error_body
from graft.gateway.rest.response_items import OutputItems
from graft.gateway.rest.sse import Shaper, begin
from graft.gateway.speech.reader import MessageReader
from graft.gateway.text import Emitted

router = APIRouter(tags=["responses"])


@router.post("/v1/responses")
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    """Writes the next items of a conversation that the request holds whole."""
    gateway = gateway_of(request)
    headers = ignored_header(gateway, body)
    try:
        job = await gateway.prepare_chat(body.as_chat(), asked_by(request))
    except GraftError as error:
        rename(error)
        raise
    answer = gateway.answer(job)
    events = gateway.run(answer)
    shaper = _ResponseEvents(gateway, body, answer)
    if body.stream:
        return await begin(events, request, shaper, cadence_of(gateway), headers)
    (choice,) = await collect(answer, events, request)
    shaper.read(choice.text, choice.tokens)
    shaper.finished(Finished(0, choice.reason, choice.stop))
    return JSONResponse(shaper.whole(), headers=headers)


class _ResponseEvents(Shaper):
    """The events of one response, and what they add up to."""

    def __init__(self, gateway: Gateway, body: ResponsesRequest, answer: Answer) -> None:
        self._gateway = gateway
        self._body = body
        self._answer = answer
        self._reader = MessageReader(answer.job.speech)
        self._items = OutputItems(answer.job.speech)
        self._id = f"resp_{uuid.uuid4().hex}"
        self._created = int(time.time())
        self._status = "in_progress"
        self._num_sent = 0

    def started(self, event: Started) -> list[dict[str, Any]]:
        """The response, empty."""
        return self._numbered(
            [
                {"type": kind, "response": self._response()}
                for kind in ("response.created", "response.in_progress")
            ]
        )

    def delta(self, event: Delta) -> list[dict[str, Any]]:
        """What a piece of text adds to the items."""
        return self._numbered(self.read(event.piece.text, event.piece.tokens))

    def read(self, text: str, tokens: Sequence[Emitted]) -> list[dict[str, Any]]:
        """Takes a piece of text; the events it makes, not numbered yet."""
        parts, count = self._reader.feed_tokens(text, [one.text for one in tokens])
        self._answer.tally.num_reasoning += count
        logprobs: Sequence[dict[str, Any]] = ()
        if self._body.wants_logprobs:
            logprobs = shapes.chat_logprobs(tokens, self._gateway.tokenizer)["content"]
        return self._items.take(parts, logprobs)

    def finished(self, event: Finished) -> list[dict[str, Any]]:
        """The end of the last item."""
        self._status = "completed" if event.reason == "stop" else "incomplete"
        parts = self._items.take(self._reader.finish())
        return self._numbered(parts + self._items.end(self._status))

    def last(self) -> list[dict[str, Any]]:
        """The whole response."""
        return self._numbered([{"type": f"response.{self._status}", "response": self.whole()}])

    def failed(self, error: GraftError) -> list[dict[str, Any]]:
        """That it failed, to those who follow the response and to those who wait for an error."""
        inner = error_body(error)["error"]
        self._status = "failed"
        response = self._response()
        response["error"] = {"code": "server_error", "message": inner["message"]}
        return self._numbered(
            [
                {"type": "response.failed", "response": response},
                {"type": "error", **{k: inner[k] for k in ("code", "message", "param")}}
                | {"error": inner},
            ]
        )

    def wire(self, body: Mapping[str, Any]) -> bytes:
        """An event with its name."""
        text = json.dumps(body, ensure_ascii=False, separators=(",", ":"))
        return f"event: {body['type']}\ndata: {text}\n\n".encode()

    @property
    def ending(self) -> bytes:
        """The last event says that it is the last."""
        return b""

    def whole(self) -> dict[str, Any]:
        """The finished response, with what it cost."""
        return {
            **self._response(),
            "completed_at": int(time.time()) if self._status == "completed" else None,
            "usage": self._usage(),
            "metrics": shapes.metrics(self._answer.tally),
        }

    def _numbered(self, events: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        for event in events:
            event["sequence_number"] = self._num_sent
            self._num_sent += 1
        return list(events)

    def _response(self) -> dict[str, Any]:
        body = self._body
        given = body.text.format if body.text is not None else None
        incomplete = {"reason": "max_output_tokens"} if self._status == "incomplete" else None
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": self._status,
            "background": False,
            "error": None,
            "incomplete_details": incomplete,
            "instructions": body.instructions,
            "max_output_tokens": body.max_output_tokens,
            "metadata": body.metadata,
            "model": self._gateway.model,
            "output": self._items.output if self._status != "in_progress" else [],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": body.temperature,
            "text": {"format": given or {"type": "text"}},
            "tool_choice": body.tool_choice or "auto",
            "tools": body.tools,
            "top_logprobs": body.top_logprobs,
            "top_p": body.top_p,
            "truncation": "disabled",
            "usage": None,
            "user": body.user,
        }

    def _usage(self) -> dict[str, Any]:
        tally = self._answer.tally
        return {
            "input_tokens": tally.num_prompt,
            "input_tokens_details": {"cached_tokens": tally.num_cached, "cache_write_tokens": 0},
            "output_tokens": tally.num_completion,
            "output_tokens_details": {"reasoning_tokens": tally.num_reasoning},
            "total_tokens": tally.num_prompt + tally.num_completion,
        }
