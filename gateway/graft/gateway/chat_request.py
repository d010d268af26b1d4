"""What a conversation asks for: messages, functions and the fields of the chat route.

Knows no template and no tokenizer. Messages become what chat templates expect.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Literal

from pydantic import Field, JsonValue

from graft.common.errors import InvalidArgument, Unsupported
from graft.gateway.forced import structure_of_call
from graft.gateway.functions import (
    CalledTool,
    FunctionTool,
    FunctionUse,
    ToolChoice,
    function_use,
    loose_functions,
)
from graft.gateway.request import MAX_N, MAX_TOP_LOGPROBS, Fields, GenerationFields
from graft.gateway.structured import Structure

MAX_MESSAGES = 4096
_ONLY_TEXT = "only text is understood here: a {kind} part cannot be read by this model"


class ContentPart(Fields):
    """One part of a message's content."""

    type: str
    text: str | None = None


class ChatMessage(Fields):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool", "function"]
    content: str | list[ContentPart] | None = None
    tool_calls: list[CalledTool] = Field(default_factory=list, max_length=MAX_N)
    tool_call_id: str | None = None

    def for_template(self, place: int) -> dict[str, Any]:
        """The message as chat templates expect it: text content, `developer` as `system`, the
        arguments of calls as objects.

        Raises:
            Unsupported: a part is not text.
        """
        field = f"messages[{place}].content"
        content = self.content
        if isinstance(content, list):
            texts = []
            for part in content:
                if part.type not in ("text", "input_text", "output_text", "refusal"):
                    raise Unsupported(_ONLY_TEXT.format(kind=part.type[:40]), field=field)
                if part.text is None:
                    raise InvalidArgument("a text part has no text", field=field)
                texts.append(part.text)
            content = "\n".join(texts)
        role = "system" if self.role == "developer" else self.role
        message = {**(self.model_extra or {}), "role": role, "content": content or ""}
        if self.tool_calls:
            message["tool_calls"] = [call.for_template() for call in self.tool_calls]
        if self.tool_call_id is not None:
            message["tool_call_id"] = self.tool_call_id
        return message


def for_template(messages: Iterable[ChatMessage]) -> list[dict[str, Any]]:
    """A conversation as chat templates expect it.

    Raises:
        InvalidArgument, Unsupported: a message is not all text.
    """
    return [message.for_template(place) for place, message in enumerate(messages)]


class ChatRequest(GenerationFields):
    """The body of POST /v1/chat/completions."""

    not_offered: ClassVar[dict[str, tuple[Any, ...]]] = {
        **GenerationFields.not_offered,
        "functions": ([],),
        "function_call": ("none", "auto"),
        "audio": (),
        "modalities": (["text"],),
    }

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MAX_TOP_LOGPROBS)
    chat_template_kwargs: dict[str, JsonValue] = Field(default_factory=dict)
    tools: list[FunctionTool] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool = True
    functions: JsonValue = None
    function_call: JsonValue = None
    audio: JsonValue = None
    modalities: JsonValue = None

    def check(self) -> None:
        """As the base, and top_logprobs only with logprobs."""
        super().check()
        if self.top_logprobs and not self.logprobs:
            raise InvalidArgument("top_logprobs needs logprobs", field="top_logprobs")
        use, structure = self.function_use(), self.structure()
        if use.functions and structure is not None and not use.forced:
            raise InvalidArgument(
                f"{structure.field} leaves no room for calls: leave tools out, or set tool_choice "
                'to "none"',
                field=structure.field,
            )

    @property
    def unheeded(self) -> list[str]:
        """As the base, and `strict` where no call is forced and nothing holds those that come."""
        return self.unknown + loose_functions(self.tools, self.tool_choice)

    def structure(self) -> Structure | None:
        """As the base; a call that must be made is a grammar, too."""
        structure = super().structure()
        use = self.function_use()
        if not use.forced:
            return structure
        if structure is not None:
            raise InvalidArgument(
                f"tool_choice asks for a call: it cannot be combined with {structure.field}",
                field=structure.field,
            )
        return structure_of_call(use)

    def function_use(self) -> FunctionUse:
        """Which functions may be called, and which must.

        Raises:
            InvalidArgument, Unsupported: tools and tool_choice do not fit.
        """
        return function_use(self.tools, self.tool_choice, self.parallel_tool_calls)


class TokenizeRequest(Fields):
    """The body of POST /tokenize: a prompt, or messages that the chat template renders."""

    model: str | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool = True


class DetokenizeRequest(Fields):
    """The body of POST /detokenize."""

    model: str | None = None
    tokens: list[int]
