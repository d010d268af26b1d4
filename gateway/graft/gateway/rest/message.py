"""A choice's message as OpenAI's bodies write it: whole, and in deltas. Knows no route's frame."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from graft.gateway.speech.parts import CallArguments, CallBegun, Content, Part, Reasoning
from graft.gateway.speech.reader import Message, MessageReader, Speech
from graft.gateway.text import Emitted


def message_body(message: Message) -> dict[str, Any]:
    """The `message` of a choice; content is null where there is nothing but calls."""
    body: dict[str, Any] = {
        "role": "assistant",
        "content": message.content if message.content or not message.calls else None,
        "refusal": None,
    }
    if message.reasoning:
        body["reasoning_content"] = message.reasoning
    if message.calls:
        body["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.calls
        ]
    return body


def finish_reason(reason: str, num_calls: int) -> str:
    """A message that ended by itself after a call ended for the call."""
    return "tool_calls" if num_calls and reason == "stop" else reason


class Deltas:
    """The deltas of one choice. Without a format to read, a delta is the text."""

    def __init__(self, speech: Speech) -> None:
        self.num_calls = 0
        self.num_reasoning_tokens = 0  # of the piece that was read last
        self._speech = speech
        self._reader = None if speech.plain else MessageReader(speech)

    def of(self, text: str, tokens: Sequence[Emitted] = ()) -> dict[str, Any]:
        """The delta of a piece of text; empty when nothing may leave yet."""
        if self._reader is None:
            return {"content": text} if text else {}
        texts = [one.text for one in tokens]
        parts, self.num_reasoning_tokens = self._reader.feed_tokens(text, texts)
        return self._delta(parts)

    def rest(self) -> dict[str, Any]:
        """The delta of what was held back, at the end."""
        return {} if self._reader is None else self._delta(self._reader.finish())

    def _delta(self, parts: Iterable[Part]) -> dict[str, Any]:
        """One delta for all parts; a call's first piece has its id and name."""
        delta: dict[str, Any] = {}
        calls: dict[int, dict[str, Any]] = {}
        for part in parts:
            match part:
                case Content(text):
                    delta["content"] = delta.get("content", "") + text
                case Reasoning(text):
                    delta["reasoning_content"] = delta.get("reasoning_content", "") + text
                case CallBegun(index, name):
                    self.num_calls += 1
                    calls[index] = {
                        "index": index,
                        "id": self._speech.new_id(),
                        "type": "function",
                        "function": {"name": name, "arguments": ""},
                    }
                case CallArguments(index, text):
                    call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                    call["function"]["arguments"] += text
        if calls:
            delta["tool_calls"] = list(calls.values())
        return delta
