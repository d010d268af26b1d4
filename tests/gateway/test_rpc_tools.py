"""Function calls and reasoning over gRPC, said by a scripted verify service: as REST says them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from graft.client import Call, CallFailed, Client, Message, Options, Tool
from graft.client.options import conversation
from graft.common.errors import InvalidArgument
from graft.gateway.rpc_message import message_fields
from graft.gateway.rpc_names import rename
from graft.testing.actor import KINDS
from graft.testing.front import PROMPT, Front, running_front
from graft.testing.models import IM_END
from graft.testing.scripted_verify import Script
from graft.v1 import gateway_pb2 as pb
from graft.v1.gateway_pb2_grpc import GatewayServiceStub

CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = Tool("weather", "Tells the weather.", CITY)
NAMED = {"type": "function", "function": {"name": "weather"}}
SAID = (
    "<think>\nWhere? 東京!\n</think>\n\nOne moment ☂\n<tool_call>\n"
    '{"name": "weather", "arguments": {"city": "Zürich 😀"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "東京"}}\n</tool_call>'
)


@pytest.fixture
def script() -> Script:
    described = {"context_length": 4096, "grammar_kinds": KINDS}
    return Script([*SAID.encode(), IM_END], widths=(4,), describe=described)


@pytest.fixture
async def front(script: Script, tmp_path: Path) -> AsyncIterator[Front]:
    async with running_front(tmp_path, [script], reasoning_parser="think") as running:
        yield running


@pytest.fixture
async def client(front: Front) -> AsyncIterator[Client]:
    async with Client(f"127.0.0.1:{front.server.grpc_port}", timeout_s=20) as running:
        yield running


def prompt_of(front: Front) -> str:
    """What the model was asked last, as text."""
    return front.server.gateway.tokenizer.decode(list(front.verify.opened[-1].prompt_tokens))


async def rest(front: Front, **fields: Any) -> dict[str, Any]:
    """The body of the same question over REST."""
    function = {"name": "weather", "description": "Tells the weather.", "parameters": CITY}
    body = {
        "messages": [{"role": "user", "content": PROMPT}],
        "tools": [{"type": "function", "function": function}],
        **fields,
    }
    found: dict[str, Any] = (await front.client.post("/v1/chat/completions", json=body)).json()
    return found


async def test_a_whole_answer_is_that_of_rest(front: Front, client: Client) -> None:
    answer = await client.chat(PROMPT, Options(tools=[WEATHER]))
    asked = prompt_of(front)
    body = await rest(front)
    assert prompt_of(front) == asked
    (choice,), (other,) = answer.choices, body["choices"]
    assert choice.reason == other["finish_reason"] == "tool_calls"
    assert choice.text == other["message"]["content"] == "One moment ☂"
    assert choice.reasoning == other["message"]["reasoning_content"] == "Where? 東京!"
    told = [call["function"] for call in other["message"]["tool_calls"]]
    assert [{"name": one.name, "arguments": one.arguments} for one in choice.calls] == told
    assert len({call.id for call in answer.calls}) == 2
    assert "".join(token.text for token in choice.tokens) == SAID
    details = body["usage"]["completion_tokens_details"]
    assert answer.usage.num_reasoning == details["reasoning_tokens"] > 0


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8])
async def test_a_stream_joins_to_the_whole(width: int, client: Client, script: Script) -> None:
    script.widths = (width,)
    pieces = [one async for one in client.chat_stream(PROMPT, Options(tools=[WEATHER]))]
    assert "".join(one.text for one in pieces) == "One moment ☂"
    assert "".join(one.reasoning for one in pieces) == "Where? 東京!"
    arguments: list[str] = []
    for call in [call for one in pieces for call in one.calls]:
        first = call.index == len(arguments)
        assert bool(call.id) is bool(call.name) is first
        if first:
            arguments.append("")
        arguments[call.index] += call.arguments
    assert arguments == ['{"city": "Zürich 😀"}', '{"city": "東京"}']
    assert [one.reason for one in pieces if one.reason] == ["tool_calls"]
    usage = pieces[-1].usage
    assert usage is not None and usage.num_reasoning > 0


async def test_one_call_is_made_where_several_may_not_be(client: Client) -> None:
    options = Options(tools=[WEATHER], parallel_tool_calls=False)
    assert len((await client.chat(PROMPT, options)).calls) == 1


@pytest.mark.parametrize("choice", ["required", WEATHER])
async def test_a_call_that_must_be_made_is_held_to_its_schema(
    choice: str | Tool, front: Front, client: Client, script: Script
) -> None:
    call = '{"name": "weather", "arguments": {"city": "Rome"}}'
    script.tokens = [*(f"[{call}]" if choice == "required" else call).encode(), IM_END]
    answer = await client.chat(PROMPT, Options(tools=[WEATHER], tool_choice=choice))
    asked = front.verify.opened[-1].grammar.text
    await rest(front, tool_choice=choice if isinstance(choice, str) else NAMED)
    assert front.verify.opened[-1].grammar.text == asked != ""
    called = [(one.name, json.loads(one.arguments)) for one in answer.calls]
    assert called == [("weather", {"city": "Rome"})]


async def test_a_conversation_goes_on_after_a_call(front: Front, client: Client) -> None:
    first = (await client.chat(PROMPT, Options(tools=[WEATHER]))).choices[0]
    results = [Message("tool", "Rain.", call_id=call.id) for call in first.calls]
    messages = [Message("user", PROMPT), Message.of(first), *results]
    await client.chat(messages, Options(tools=[WEATHER]))
    asked = prompt_of(front)
    calls = [
        {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
        for call in first.calls
    ]
    told: list[dict[str, Any]] = [
        {"role": "user", "content": PROMPT},
        {"role": "assistant", "content": first.text, "tool_calls": calls},
        *({"role": "tool", "content": "Rain.", "tool_call_id": call.id} for call in first.calls),
    ]
    await rest(front, messages=told)
    assert prompt_of(front) == asked
    assert "Zürich" in asked and "Rain." in asked


def test_a_message_says_what_it_says_over_rest() -> None:
    messages = [
        Message("assistant", "So.", calls=[Call("1", "f", "{}")], reasoning="Why?"),
        Message("tool", "4", call_id="1", name="f"),
    ]
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert message_fields(conversation(messages)) == [
        {"role": "assistant", "content": "So.", "tool_calls": [call], "reasoning_content": "Why?"},
        {"role": "tool", "content": "4", "tool_call_id": "1", "name": "f"},
    ]


async def test_none_leaves_calls_alone(front: Front, client: Client) -> None:
    answer = await client.chat(PROMPT, Options(tools=[WEATHER], tool_choice="none"))
    assert not answer.calls and "<tool_call>" in answer.text
    assert "weather" not in prompt_of(front)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (Options(tool_choice="required"), "tool_choice"),
        (Options(tools=[WEATHER], tool_choice="perhaps"), "tool_choice"),
        (Options(tools=[WEATHER], tool_choice=Tool("sun")), "named_tool"),
        (Options(tools=[WEATHER, WEATHER]), "tools"),
        (Options(tools=[Tool("f", parameters="{")]), "tools[0].parameters"),
        (Options(tools=[Tool("f", parameters="7")]), "tools[0].parameters"),
        (Options(tools=[WEATHER], json_object=True), "json_object"),
        (Options(json_schema="{"), "json_schema"),
        (Options(json_schema="[]"), "json_schema"),
        (Options(json_schema='{"a": "' + "x" * 300_000 + '"}'), "json_schema"),
        (Options(json_schema="{}", ignore_eos=True), "ignore_eos"),
        (Options(speculation='{"topk": 0}'), "speculation_mode"),
        (Options(max_tokens=1 << 20), "messages"),
    ],
)
async def test_a_refusal_names_the_field_of_the_proto(
    options: Options, field: str, client: Client
) -> None:
    with pytest.raises(CallFailed) as raised:
        await client.chat(PROMPT, options)
    assert raised.value.code == "INVALID_ARGUMENT"
    assert raised.value.field == field
    assert "response_format" not in str(raised.value)


def test_words_of_a_sentence_are_renamed_with_the_field() -> None:
    error = InvalidArgument("prompt: there is none", field="prompt")
    rename(error, pb.CompleteRequest())
    assert (error.field, str(error)) == ("prompts", "prompts: there is none")


@pytest.mark.parametrize(("choice", "named"), [("auto", "tools[0].strict"), ("none", None)])
async def test_strict_is_named_as_ignored_where_no_call_must_be_made(
    choice: str, named: str | None, front: Front
) -> None:
    stub: Any = GatewayServiceStub(front.channel)
    request = pb.ChatRequest(
        messages=[pb.ChatMessage(role="user", content=PROMPT)],
        tools=[pb.Tool(name="weather", strict=True)],
        tool_choice=choice,
    )
    call = stub.Chat(request)
    assert dict(await call.initial_metadata()).get("x-ignored-params") == named
    await call
    function = {"name": "weather", "strict": True}
    body = {"tools": [{"type": "function", "function": function}], "tool_choice": choice}
    headers = (await front.chat(**body)).headers
    assert headers.get("x-ignored-params") == (named and "tools[0].function.strict")
