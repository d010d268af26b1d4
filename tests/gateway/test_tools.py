"""Function calls and reasoning over REST, said by a scripted verify service."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from graft.gateway.forced import forced_schema
from graft.gateway.functions import FunctionDefinition, FunctionUse
from graft.testing.actor import actor
from graft.testing.front import Front, running_front
from graft.testing.models import IM_END
from graft.testing.scripted_verify import Script

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
ASK: list[Any] = [{"role": "user", "content": "Weather?"}]
CHAT = "/v1/chat/completions"


def said(text: str, width: int = 4) -> Script:
    """A script that says a text and ends."""
    return Script([*text.encode(), IM_END], widths=(width,), describe={"context_length": 4096})


def prompt_of(front: Front) -> str:
    """What the model was asked last, as text."""
    return front.server.gateway.tokenizer.decode(list(front.verify.opened[-1].prompt_tokens))


TWO_CALLS = (
    "One moment ☂\n<tool_call>\n"
    '{"name": "weather", "arguments": {"city": "Zürich 😀"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": "東京"}}\n</tool_call>'
)


async def test_calls_come_whole(tmp_path: Path) -> None:
    async with running_front(tmp_path, [said(TWO_CALLS)]) as front:
        body = (await front.client.post(CHAT, json={"messages": ASK, "tools": [WEATHER]})).json()
    choice = body["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "One moment ☂"
    calls = choice["message"]["tool_calls"]
    assert [call["function"]["name"] for call in calls] == ["weather", "weather"]
    cities = [json.loads(call["function"]["arguments"])["city"] for call in calls]
    assert cities == ["Zürich 😀", "東京"]
    assert len({call["id"] for call in calls}) == 2


async def test_calls_are_streamed_as_deltas(tmp_path: Path) -> None:
    script = said(TWO_CALLS)
    async with running_front(tmp_path, [script]) as front:
        for width in range(1, 9):
            script.widths = (width,)
            chunks = await front.stream(CHAT, messages=ASK, tools=[WEATHER])
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
            assert "".join(delta.get("content", "") for delta in deltas) == "One moment ☂"
            assert arguments_of(deltas) == ['{"city": "Zürich 😀"}', '{"city": "東京"}']
            assert sum(len(delta.get("tool_calls", ())) for delta in deltas) > 4
            assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def arguments_of(deltas: list[dict[str, Any]]) -> list[str]:
    """The arguments of the calls in a stream; id and name come once, with the first piece."""
    arguments: list[str] = []
    for piece in [piece for delta in deltas for piece in delta.get("tool_calls", ())]:
        first = piece["index"] == len(arguments)
        assert ("id" in piece) is first and ("name" in piece["function"]) is first
        if first:
            arguments.append("")
        arguments[piece["index"]] += piece["function"]["arguments"]
    return arguments


async def test_only_one_call_comes_where_they_may_not_be_parallel(tmp_path: Path) -> None:
    async with running_front(tmp_path, [said(TWO_CALLS)]) as front:
        answer = await front.chat(tools=[WEATHER], parallel_tool_calls=False)
    assert len(answer.json()["choices"][0]["message"]["tool_calls"]) == 1


async def test_without_tools_marks_are_text(tmp_path: Path) -> None:
    async with running_front(tmp_path, [said(TWO_CALLS)]) as front:
        for fields in ({}, {"tools": [WEATHER], "tool_choice": "none"}, {"tools": []}):
            choice = (await front.chat(**fields)).json()["choices"][0]
            assert choice["message"]["content"] == TWO_CALLS
            assert choice["finish_reason"] == "stop"
            assert "weather" not in prompt_of(front)


async def test_a_template_without_tools_is_told_in_plain_words(tmp_path: Path) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "weather", "arguments": '{"city": "Bern"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "Rain."},
    ]
    async with running_front(tmp_path, [said("Rain in Bern.")]) as front:
        answer = await front.client.post(CHAT, json={"messages": messages, "tools": [WEATHER]})
        assert answer.json()["choices"][0]["message"]["content"] == "Rain in Bern."
        prompt = prompt_of(front)
    assert prompt.startswith("<|im_start|>system\nYou can call functions")
    assert '<tools>\n{"name": "weather"' in prompt and "Be brief.<|im_end|>" in prompt
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{call}<|im_end|>" in prompt
    result = "<tool_response>\nRain.\n</tool_response>"
    assert f"<|im_start|>user\n{result}<|im_end|>" in prompt


KNOWING = (
    "{% if tools is not none %}TOOLS{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}[{{ message.role }}]{{ message.content }}"
    "{% for call in message.tool_calls %}<|python_tag|>{{ call.function.arguments.city }}"
    "{% endfor %}{% endfor %}"
)


async def test_a_template_with_tools_gets_them(tmp_path: Path) -> None:
    call = {"function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    messages = [*ASK, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "x"}]
    answer = '{"name": "weather", "parameters": {"city": "Bern"}}'
    script = said(answer)
    async with running_front(tmp_path, [script], chat_template=KNOWING) as front:
        body = (
            await front.client.post(CHAT, json={"messages": messages, "tools": [WEATHER]})
        ).json()
        told = json.loads(prompt_of(front).removeprefix("TOOLS").split("[user]")[0])
        assert told == [WEATHER]
        assert "[assistant]<|python_tag|>Bern[tool]x" in prompt_of(front)
        await front.chat()
        assert prompt_of(front).startswith("[user]")
    called = body["choices"][0]["message"]["tool_calls"][0]["function"]
    assert called == {"name": "weather", "arguments": '{"city": "Bern"}'}


async def test_reasoning_is_split_off(tmp_path: Path) -> None:
    text = "<think>\nHm, 东京?\n</think>\n\nTokyo."
    async with running_front(tmp_path, [said(text, 3)], reasoning_parser="think") as front:
        choice = (await front.chat()).json()["choices"][0]
        assert choice["message"]["content"] == "Tokyo."
        assert choice["message"]["reasoning_content"] == "Hm, 东京?"
        chunks = await front.stream(CHAT, messages=ASK)
        deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
        assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm, 东京?"
        assert "".join(delta.get("content", "") for delta in deltas) == "Tokyo."
        plain = (await front.complete(max_tokens=60)).json()["choices"][0]["text"]
        assert plain == text


async def test_a_prompt_may_have_opened_the_reasoning(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.content }}{% endfor %}<think>\n{# </think> #}"
    async with running_front(tmp_path, [said("so\n</think>yes")], chat_template=template) as front:
        message = (await front.chat()).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("so", "yes")


async def test_a_stop_string_ends_a_call_and_never_leaks(tmp_path: Path) -> None:
    script = said(TWO_CALLS)
    async with running_front(tmp_path, [script]) as front:
        for width in range(1, 9):
            script.widths = (width,)
            chunks = await front.stream(CHAT, messages=ASK, tools=[WEATHER], stop="rich")
            pieces = [
                piece["function"]["arguments"]
                for chunk in chunks
                for piece in chunk["choices"][0]["delta"].get("tool_calls", ())
            ]
            assert "".join(pieces) == '{"city": "Zü'


async def test_logprobs_are_of_all_tokens(tmp_path: Path) -> None:
    async with running_front(tmp_path, [said(TWO_CALLS)]) as front:
        choice = (await front.chat(tools=[WEATHER], logprobs=True)).json()["choices"][0]
        entries = choice["logprobs"]["content"]
        assert "".join(entry["token"] for entry in entries) == TWO_CALLS
        chunks = await front.stream(CHAT, messages=ASK, tools=[WEATHER], logprobs=True)
    streamed = [
        entry["token"]
        for chunk in chunks
        for entry in (chunk["choices"][0]["logprobs"] or {"content": []})["content"]
    ]
    assert "".join(streamed) == TWO_CALLS


async def test_a_call_can_be_forced(tmp_path: Path) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    async with running_front(tmp_path, [actor()]) as front:
        for choice in ("required", named):
            fields = {"tools": [WEATHER], "tool_choice": choice}
            body = (await front.chat(**fields)).json()["choices"][0]
            assert body["finish_reason"] == "tool_calls" and body["message"]["content"] is None
            (call,) = body["message"]["tool_calls"]
            assert json.loads(call["function"]["arguments"]) == {"city": "Something"}
            chunks = await front.stream(CHAT, messages=ASK, **fields)
            deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
            assert arguments_of(deltas) == [call["function"]["arguments"]]
            assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
        both = {"tools": [WEATHER], "tool_choice": "required", "regex": "a"}
        assert (await front.chat(**both)).json()["error"]["param"] == "regex"


async def test_without_grammars_a_call_cannot_be_forced(tmp_path: Path) -> None:
    async with running_front(tmp_path, [said("x")]) as front:
        answer = await front.chat(tools=[WEATHER], tool_choice="required")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools"


def test_schemas_of_forced_calls_keep_their_references() -> None:
    parameters: Any = {
        "type": "object",
        "properties": {"to": {"$ref": "#/$defs/X"}, "again": {"$ref": "#"}},
        "$defs": {"X": {"enum": [1]}},
    }
    functions = (
        FunctionDefinition(name="f", parameters=parameters),
        FunctionDefinition(name="g"),
    )
    one = json.loads(forced_schema(FunctionUse(functions, named="f")))
    assert one["properties"]["name"] == {"const": "f"} and list(one["$defs"]) == ["f0"]
    moved = one["$defs"]["f0"]["properties"]
    assert (moved["to"]["$ref"], moved["again"]["$ref"]) == ("#/$defs/f0/$defs/X", "#/$defs/f0")
    several = json.loads(forced_schema(FunctionUse(functions, required=True)))
    assert (several["type"], several["minItems"]) == ("array", 1)
    single = json.loads(forced_schema(FunctionUse(functions, required=True, parallel=False)))
    names = [call["properties"]["name"]["const"] for call in single["anyOf"]]
    assert names == ["f", "g"]
