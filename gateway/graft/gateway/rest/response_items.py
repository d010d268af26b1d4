"""The output items of a response, as they are written. Knows no request and no transport.

Parts of a message go in; events come out, and `output` is what they add up to. A new kind of part
ends the item before it.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from graft.gateway.speech.parts import CallArguments, CallBegun, Content, Part, Reasoning
from graft.gateway.speech.reader import Speech

Event = dict[str, Any]


class OutputItems:
    """The items of one response, in order."""

    def __init__(self, speech: Speech) -> None:
        self.output: list[dict[str, Any]] = []
        self._speech = speech
        self._open: dict[str, Any] | None = None
        self._logprobs: list[dict[str, Any]] = []

    def take(self, parts: Iterable[Part], logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        """Adds parts. Log-probabilities go with the text that comes next."""
        self._logprobs += logprobs
        events: list[Event] = []
        for part in parts:
            match part:
                case Content(text):
                    events += self._enter("message")
                    events.append(self._text(text))
                case Reasoning(text):
                    events += self._enter("reasoning")
                    events.append(self._grown("reasoning_text", text))
                case CallBegun(_, name):
                    events += self._close("completed")
                    events += self._begin_call(name)
                case CallArguments(_, text) if self._open is not None:
                    self._open["arguments"] += text
                    events.append(self._of("response.function_call_arguments.delta", delta=text))
        return events

    def end(self, status: str) -> list[Event]:
        """Ends the last item; a response always has one."""
        events = self._enter("message") if not self.output else []
        return events + self._close(status)

    def _enter(self, kind: str) -> list[Event]:
        if self._open is not None and self._open["type"] == kind:
            return []
        events = self._close("completed")
        item: dict[str, Any]
        if kind == "message":
            item = {"id": _id("msg"), "type": kind, "role": "assistant", "content": []}
            part: dict[str, Any] = {
                "type": "output_text",
                "text": "",
                "annotations": [],
                "logprobs": [],
            }
        else:
            item = {"id": _id("rs"), "type": kind, "summary": [], "content": []}
            part = {"type": "reasoning_text", "text": ""}
        events.append(self._add(item))
        item["content"].append(part)
        events.append(self._of("response.content_part.added", content_index=0, part={**part}))
        return events

    def _begin_call(self, name: str) -> list[Event]:
        item = {
            "id": _id("fc"),
            "type": "function_call",
            "call_id": self._speech.new_id(),
            "name": name,
            "arguments": "",
        }
        return [self._add(item)]

    def _add(self, item: dict[str, Any]) -> Event:
        item["status"] = "in_progress"
        self.output.append(item)
        self._open = item
        shown = {**item, "content": []} if "content" in item else {**item}
        return {
            "type": "response.output_item.added",
            "output_index": len(self.output) - 1,
            "item": shown,
        }

    def _text(self, text: str) -> Event:
        logprobs, self._logprobs = self._logprobs, []
        assert self._open is not None
        self._open["content"][0]["logprobs"] += logprobs
        return {**self._grown("output_text", text), "logprobs": logprobs}

    def _grown(self, kind: str, text: str) -> Event:
        assert self._open is not None
        self._open["content"][0]["text"] += text
        return self._of(f"response.{kind}.delta", content_index=0, delta=text)

    def _close(self, status: str) -> list[Event]:
        item = self._open
        if item is None:
            return []
        events: list[Event] = []
        if item["type"] == "function_call":
            events.append(
                self._of(
                    "response.function_call_arguments.done",
                    name=item["name"],
                    arguments=item["arguments"],
                )
            )
        else:
            part = item["content"][0]
            done = self._of(f"response.{part['type']}.done", content_index=0, text=part["text"])
            if item["type"] == "message":
                part["logprobs"] += self._logprobs
                self._logprobs = []
                done["logprobs"] = part["logprobs"]
            events.append(done)
            events.append(self._of("response.content_part.done", content_index=0, part=part))
        item["status"] = status
        events.append(
            {
                "type": "response.output_item.done",
                "output_index": len(self.output) - 1,
                "item": item,
            }
        )
        self._open = None
        return events

    def _of(self, kind: str, **fields: Any) -> Event:
        """An event of the open item."""
        assert self._open is not None
        index = len(self.output) - 1
        return {"type": kind, "item_id": self._open["id"], "output_index": index, **fields}


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
