"""The body of POST /v1/responses, and the chat request it stands for. Nothing is stored here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import Field, JsonValue, ValidationError

from graft.common.errors import GraftError, InvalidArgument, Unsupported
from graft.gateway.chat_request import MAX_MESSAGES, ChatRequest
from graft.gateway.faults import first_error
from graft.gateway.request import MAX_TOP_LOGPROBS, Fields, GenerationFields

_LOGPROBS = "message.output_text.logprobs"
_INCLUDABLE = (_LOGPROBS, "reasoning.encrypted_content")
_OWN = frozenset(
    "input instructions tools tool_choice text metadata max_output_tokens top_logprobs include "
    "store previous_response_id conversation background prompt truncation".split()
)
_ECHOED = ("instructions", "metadata", "text", "tool_choice", "tools", "user")
_MAX_METADATA = 16


class TextField(Fields):
    """What kind of text is wanted; `format` is as response_format, but flat."""

    format: dict[str, JsonValue] | None = None


class ResponsesRequest(GenerationFields):
    """The body of POST /v1/responses. What would need a store is refused."""

    not_offered: ClassVar[dict[str, tuple[Any, ...]]] = {
        **GenerationFields.not_offered,
        "n": (1,),
        "max_completion_tokens": (),
        "response_format": (),
        "return_token_ids": (False,),
        "speculation_trace": (False,),
        "store": (False,),
        "previous_response_id": (),
        "conversation": (),
        "background": (False,),
        "prompt": (),
        "truncation": ("disabled",),
    }

    input: str | list[dict[str, JsonValue]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    tools: list[dict[str, JsonValue]] = Field(default_factory=list)
    tool_choice: str | dict[str, JsonValue] | None = None
    parallel_tool_calls: bool = True
    text: TextField | None = None
    top_logprobs: int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS)
    include: list[str] = Field(default_factory=list)
    metadata: dict[str, str] = Field(default_factory=dict, max_length=_MAX_METADATA)
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    store: JsonValue = None
    previous_response_id: JsonValue = None
    conversation: JsonValue = None
    background: JsonValue = None
    prompt: JsonValue = None
    truncation: JsonValue = None

    def check(self) -> None:
        """As the base, and what can be included."""
        super().check()
        for name in self.include:
            if name not in _INCLUDABLE:
                raise Unsupported(f"include cannot be {name[:60]!r} here", field="include")
        options = self.stream_options
        if options is not None and (options.model_extra or {}).get("include_obfuscation"):
            raise Unsupported("obfuscation of streams is not offered", field="stream_options")
        for name in _ECHOED:
            try:
                json.dumps(self.model_dump(include={name}), ensure_ascii=False).encode()
            except UnicodeEncodeError:
                raise InvalidArgument(f"{name} holds half a surrogate pair", field=name) from None

    @property
    def unheeded(self) -> list[str]:
        """As the base, and `strict` where no call is forced and nothing holds those that come."""
        if self.tool_choice not in (None, "auto"):
            return self.unknown
        strict = [
            f"tools[{place}].strict"
            for place, tool in enumerate(self.tools)
            if tool.get("strict") is True
        ]
        return self.unknown + strict

    @property
    def wants_logprobs(self) -> bool:
        """True when tokens are to come with their log-probabilities."""
        return self.top_logprobs > 0 or _LOGPROBS in self.include

    def as_chat(self) -> ChatRequest:
        """The chat request that says the same.

        Raises:
            InvalidArgument, Unsupported: an item, a tool or the format cannot be honoured.
        """
        self.check()
        shared = set(GenerationFields.model_fields) - set(self.not_offered) - {"stream_options"}
        shared |= set(GenerationFields.not_offered) - {"response_format"}
        fields = self.model_dump(
            include=(shared | {"parallel_tool_calls", "chat_template_kwargs"}) - _OWN,
            exclude_unset=True,
        )
        fields.update(
            messages=_messages(self.instructions, self.input),
            tools=[_tool(place, tool) for place, tool in enumerate(self.tools)],
            tool_choice=_tool_choice(self.tool_choice),
            max_completion_tokens=self.max_output_tokens,
            logprobs=self.wants_logprobs,
            top_logprobs=self.top_logprobs,
            response_format=_response_format(self.text),
        )
        try:
            return ChatRequest.model_validate(fields)
        except ValidationError as failure:
            raise first_error(failure) from None


_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text",
}


def rename(error: GraftError) -> None:
    """Gives an error of the chat request the field's name here, in place."""
    field = error.field or ""
    for theirs, ours in _NAMES.items():
        if field == theirs or field.startswith((f"{theirs}[", f"{theirs}.")):
            error.field = ours + field.removeprefix(theirs)
            error.args = (str(error).replace(theirs, ours, 1),)


def _tool(place: int, tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool as chat writes it: the function's fields in an object of their own."""
    kind = tool.get("type")
    if kind != "function":
        raise Unsupported(
            f'tools[{place}]: only tools of type "function" are offered, got {str(kind)[:40]!r}',
            field="tools",
        )
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _tool_choice(choice: str | Mapping[str, Any] | None) -> Any:
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def _response_format(text: TextField | None) -> Any:
    """The format as chat writes it: the schema's fields in an object of their own."""
    if text is None or text.format is None or text.format.get("type") != "json_schema":
        return None if text is None else text.format
    return {
        "type": "json_schema",
        "json_schema": {key: value for key, value in text.format.items() if key != "type"},
    }


def _messages(
    instructions: str | None, given: str | Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The conversation. Calls join the assistant's message they stand behind."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*messages, {"role": "user", "content": given}]
    if not given:
        raise InvalidArgument("input is an empty list", field="input")
    if len(given) > MAX_MESSAGES:
        raise InvalidArgument(
            f"input holds {len(given)} items, limit is {MAX_MESSAGES}", field="input"
        )
    for place, item in enumerate(given):
        _add_item(messages, item, f"input[{place}]")
    return messages


def _add_item(messages: list[dict[str, Any]], item: Mapping[str, Any], field: str) -> None:
    match item.get("type", "message"):
        case "message":
            message = {"role": item.get("role"), "content": item.get("content")}
            if message["role"] == "assistant" and _continues(messages, "content"):
                messages[-1]["content"] = message["content"]
            else:
                messages.append(message)
        case "function_call":
            call = {
                "id": item.get("call_id"),
                "type": "function",
                "function": {"name": item.get("name"), "arguments": item.get("arguments") or ""},
            }
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": None})
            messages[-1].setdefault("tool_calls", []).append(call)
        case "function_call_output":
            messages.append(
                {
                    "role": "tool",
                    "tool_call_id": item.get("call_id"),
                    "content": item.get("output"),
                }
            )
        case "reasoning":
            content = item.get("content") or ()
            parts = content if isinstance(content, Sequence) else ()
            texts = [str(part.get("text", "")) for part in parts if isinstance(part, Mapping)]
            if any(texts):
                messages.append(
                    {
                        "role": "assistant",
                        "content": None,
                        "reasoning_content": "\n".join(texts),
                    }
                )
        case other:
            raise Unsupported(
                f"{field}: items of type {str(other)[:40]!r} cannot be read here", field="input"
            )


def _continues(messages: Sequence[Mapping[str, Any]], key: str) -> bool:
    """True when the last message is the assistant's and lacks what `key` names."""
    return bool(messages) and messages[-1]["role"] == "assistant" and messages[-1][key] is None
