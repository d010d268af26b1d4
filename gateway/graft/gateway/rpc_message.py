"""Conversations and messages as client protos: what is asked, what is said whole and in pieces.

Knows functions and calls; knows no service.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from graft.common.errors import InvalidArgument
from graft.gateway.speech.parts import CallArguments, CallBegun, Content, Part, Reasoning
from graft.gateway.speech.reader import Message, MessageReader, Speech
from graft.gateway.text import Emitted
from graft.v1 import gateway_pb2

_Request = gateway_pb2.ChatRequest | gateway_pb2.ChatStreamRequest


def message_fields(messages: Sequence[gateway_pb2.ChatMessage]) -> list[dict[str, Any]]:
    """The conversation as REST would tell it."""
    found = []
    for message in messages:
        fields: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.tool_calls:
            fields["tool_calls"] = [_called(call) for call in message.tool_calls]
        if message.tool_call_id:
            fields["tool_call_id"] = message.tool_call_id
        if message.reasoning:
            fields["reasoning_content"] = message.reasoning
        if message.name:
            fields["name"] = message.name
        found.append(fields)
    return found


def tool_fields(request: _Request) -> dict[str, Any]:
    """The functions that may be called, as REST would tell them.

    Raises:
        InvalidArgument: the parameters of a tool are not JSON.
    """
    fields: dict[str, Any] = {
        "tools": [_tool(place, tool) for place, tool in enumerate(request.tools)]
    }
    match request.WhichOneof("choice"):
        case "tool_choice":
            fields["tool_choice"] = request.tool_choice
        case "named_tool":
            function = {"name": request.named_tool}
            fields["tool_choice"] = {"type": "function", "function": function}
    if request.HasField("parallel_tool_calls"):
        fields["parallel_tool_calls"] = request.parallel_tool_calls
    return fields


def call_messages(message: Message) -> list[gateway_pb2.ToolCall]:
    """The calls of a whole message."""
    return [
        gateway_pb2.ToolCall(id=call.id, name=call.name, arguments=call.arguments)
        for call in message.calls
    ]


class MessageDeltas:
    """The message of one choice, read as it is written. `num_calls` counts those begun."""

    def __init__(self, speech: Speech) -> None:
        self.num_calls = 0
        self._speech = speech
        self._reader = None if speech.plain else MessageReader(speech)

    def read(self, text: str, tokens: Sequence[Emitted], delta: gateway_pb2.ChoiceDelta) -> int:
        """Sets text, reasoning and calls of a delta, in place; how many tokens are reasoning."""
        if self._reader is None:
            delta.text = text
            return 0
        parts, num_reasoning = self._reader.feed_tokens(text, [one.text for one in tokens])
        self._put(parts, delta)
        return num_reasoning

    def rest(self, delta: gateway_pb2.ChoiceDelta) -> bool:
        """Sets what was held back, in place, at the end; False when it is nothing."""
        parts = [] if self._reader is None else self._reader.finish()
        self._put(parts, delta)
        return bool(parts)

    def _put(self, parts: Iterable[Part], delta: gateway_pb2.ChoiceDelta) -> None:
        for part in parts:
            match part:
                case Content(text):
                    delta.text += text
                case Reasoning(text):
                    delta.reasoning += text
                case CallBegun(index, name):
                    self.num_calls += 1
                    delta.tool_calls.add(index=index, id=self._speech.new_id(), name=name)
                case CallArguments(index, text):
                    last = delta.tool_calls[-1] if delta.tool_calls else None
                    if last is None or last.index != index:
                        last = delta.tool_calls.add(index=index)
                    last.arguments += text


def _called(call: gateway_pb2.ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": call.arguments}
    named = {"id": call.id} if call.id else {}
    return {**named, "type": "function", "function": function}


def _tool(place: int, tool: gateway_pb2.Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.HasField("strict"):
        function["strict"] = tool.strict
    if tool.parameters:
        try:
            function["parameters"] = json.loads(tool.parameters)
        except (ValueError, RecursionError) as error:
            field = f"tools[{place}].parameters"
            raise InvalidArgument(f"{field} is not JSON: {error}", field=field) from None
    return {"type": "function", "function": function}
