"""What a request may ask for, and its form on the wire. Knows no channel."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from graft.client.answers import Call, Choice
from graft.v1 import gateway_pb2

_PLAIN = (
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids",
    "include_stop", "ignore_eos", "min_tokens", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "n", "logprobs", "top_logprobs", "keep_special_tokens",
    "cache_salt", "accept_rule", "threshold_single", "threshold_acc", "trace_rounds", "prediction",
    "regex",
    "ebnf",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation; role is system, developer, user, assistant or tool.

    calls: what an assistant's message called; call_id: the call whose result a tool's message is.
    name: who speaks, or the function whose result it is, for templates that say it.
    """

    role: str
    content: str = ""
    calls: Sequence[Call] = ()
    call_id: str = ""
    reasoning: str = ""
    name: str = ""

    @classmethod
    def of(cls, choice: Choice) -> Self:
        """An answer's choice as a message, for the conversation to go on after it."""
        return cls("assistant", choice.text, calls=choice.calls, reasoning=choice.reasoning)


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: str | Mapping[str, Any] | None = None
    strict: bool | None = None

    def message(self) -> gateway_pb2.Tool:
        """The function as it is sent."""
        return gateway_pb2.Tool(
            name=self.name,
            description=self.description,
            parameters="" if self.parameters is None else _written(self.parameters),
            strict=self.strict,
        )


@dataclass(frozen=True, slots=True)
class Wish:
    """A tier of speculation by hand; what is None comes from the proposer's default."""

    proposer: str = ""
    num_steps: int | None = None
    topk: int | None = None
    num_draft_tokens: int | None = None
    lookahead: int | None = None


@dataclass(frozen=True, slots=True)
class Options:
    """How text is written; what is None is the server's choice.

    speculation: ``"auto"``, ``"off"``, a proposer's name, or a tier.
    prediction: what the text is expected to be; it speeds the text up and never changes it.
    trace_rounds: have every round with its tree in the answer.
    json_schema, json_object, regex, ebnf: what the text is held to, at most one of them.
    template: arguments of the chat template.
    tools: what a chat's model may call; tool_choice is ``"none"``, ``"auto"``, ``"required"`` or
        one of the tools, which must be called then.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    n: int | None = None
    logprobs: bool = False
    top_logprobs: int | None = None
    speculation: str | Wish | None = None
    keep_special_tokens: bool = False
    cache_salt: str = ""
    accept_rule: str = ""
    threshold_single: float | None = None
    threshold_acc: float | None = None
    trace_rounds: bool = False
    prediction: str = ""
    json_object: bool = False
    json_schema: str | Mapping[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    template: Mapping[str, Any] | None = None
    tools: Sequence[Tool] = ()
    tool_choice: str | Tool | None = None
    parallel_tool_calls: bool | None = None

    def message(self) -> gateway_pb2.GenerationOptions:
        """The options as they are sent.

        Raises:
            ValueError: the text is to be held to two things at once.
        """
        grammars = (self.json_object or None, self.json_schema, self.regex, self.ebnf)
        if sum(grammar is not None for grammar in grammars) > 1:
            raise ValueError("give one of json_object, json_schema, regex and ebnf, not several")
        given = {name: getattr(self, name) for name in _PLAIN}
        message = gateway_pb2.GenerationOptions(
            **{name: value for name, value in given.items() if value is not None}
        )
        if self.json_object:
            message.json_object = True
        if self.json_schema is not None:
            message.json_schema = _written(self.json_schema)
        if isinstance(self.speculation, str):
            message.speculation_mode = self.speculation
        elif self.speculation is not None:
            wish = self.speculation
            message.speculation_tier.CopyFrom(
                gateway_pb2.TierWish(
                    proposer=wish.proposer,
                    num_steps=wish.num_steps,
                    topk=wish.topk,
                    num_draft_tokens=wish.num_draft_tokens,
                    lookahead=wish.lookahead,
                )
            )
        return message


def conversation(messages: str | Sequence[Message]) -> list[gateway_pb2.ChatMessage]:
    """The messages as they are sent; a text alone is one message of the user."""
    if isinstance(messages, str):
        messages = [Message("user", messages)]
    return [
        gateway_pb2.ChatMessage(
            role=one.role,
            content=one.content,
            tool_calls=[
                gateway_pb2.ToolCall(id=call.id, name=call.name, arguments=call.arguments)
                for call in one.calls
            ],
            tool_call_id=one.call_id,
            reasoning=one.reasoning,
            name=one.name,
        )
        for one in messages
    ]


def chat_fields(options: Options) -> dict[str, Any]:
    """What options say to chats alone, as the fields of their request."""
    choice = options.tool_choice
    fields: dict[str, Any] = {
        "tools": [tool.message() for tool in options.tools],
        "parallel_tool_calls": options.parallel_tool_calls,
    }
    if options.template is not None:
        fields["chat_template_kwargs"] = dict(options.template)
    if isinstance(choice, Tool):
        fields["named_tool"] = choice.name
    elif choice is not None:
        fields["tool_choice"] = choice
    return fields


def _written(schema: str | Mapping[str, Any]) -> str:
    return schema if isinstance(schema, str) else json.dumps(dict(schema))


def prompts(prompt: str | Sequence[str] | Sequence[int]) -> list[gateway_pb2.Prompt]:
    """One text, several texts, or one prompt of token ids, as they are sent."""
    if isinstance(prompt, str):
        return [gateway_pb2.Prompt(text=prompt)]
    texts = [one for one in prompt if isinstance(one, str)]
    if texts:
        return [gateway_pb2.Prompt(text=text) for text in texts]
    tokens = [one for one in prompt if isinstance(one, int)]
    return [gateway_pb2.Prompt(tokens=gateway_pb2.TokenList(tokens=tokens))]
