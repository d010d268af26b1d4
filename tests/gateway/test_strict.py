"""Functions to be followed strictly though no call is forced, and what the session is held to."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from graft.common.grammar import GRAMMAR_KINDS
from graft.gateway.strict import KIND
from graft.testing.front import Front, running_front
from graft.testing.scripted_verify import Script

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
STRICT = {"name": "weather", "parameters": SCHEMA, "strict": True}
LOOSE = {"name": "time", "parameters": SCHEMA}
SAID = 'I look.<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def script(kinds: tuple[int, ...] = GRAMMAR_KINDS) -> Script:
    described = {"grammar_kinds": kinds, "context_length": 4096}
    return Script([*SAID.encode(), 258], widths=(3,), describe=described)


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[Front]:
    async with running_front(tmp_path, [script()]) as running:
        yield running


async def asked(front: Front, *functions: dict[str, Any], **fields: Any) -> httpx.Response:
    tools = [{"type": "function", "function": function} for function in functions]
    return await front.chat(tools=tools, **fields)


async def test_a_strict_function_holds_the_calls_of_a_free_text(front: Front) -> None:
    response = await asked(front, STRICT, LOOSE)
    grammar = front.verify.opened[-1].grammar
    assert grammar.kind == KIND
    form = json.loads(grammar.text)
    assert form["trigger"] == "<tool_call>"
    assert [tag["schema"] for tag in form["tags"]] == [SCHEMA, {"type": "object"}]
    first = form["tags"][0]
    assert first["begin"] + '{"city": "Rome"}' + first["end"] == SAID.removeprefix("I look.")
    assert "x-ignored-params" not in response.headers
    message = response.json()["choices"][0]["message"]
    assert message["content"] == "I look."
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Rome"}


async def test_responses_are_held_as_chats_are(front: Front) -> None:
    tools = [{"type": "function", **STRICT}]
    response = await front.client.post("/v1/responses", json={"input": "Go.", "tools": tools})
    assert response.status_code == 200, response.text
    assert front.verify.opened[-1].grammar.kind == KIND
    assert "x-ignored-params" not in response.headers


@pytest.mark.parametrize(
    ("functions", "fields"),
    [
        ([LOOSE], {}),
        ([STRICT], {"tool_choice": "none"}),
        ([], {}),
    ],
)
async def test_a_text_without_strict_functions_is_free(
    functions: list[dict[str, Any]], fields: dict[str, Any], front: Front
) -> None:
    await asked(front, *functions, **fields)
    assert not front.verify.opened[-1].HasField("grammar")


async def test_a_forced_call_keeps_its_own_grammar(front: Front) -> None:
    await asked(front, STRICT, tool_choice="required")
    assert front.verify.opened[-1].grammar.kind != KIND


@pytest.mark.parametrize(
    ("kinds", "parser"), [((), "hermes"), (GRAMMAR_KINDS, "mistral"), (GRAMMAR_KINDS, "json")]
)
async def test_strict_is_named_as_ignored_where_nothing_can_hold_it(
    kinds: tuple[int, ...], parser: str, tmp_path: Path
) -> None:
    async with running_front(tmp_path, [script(kinds)], tool_call_parser=parser) as front:
        response = await asked(front, STRICT)
        assert response.status_code == 200
        assert response.headers["x-ignored-params"] == "tools[0].function.strict"
        assert not front.verify.opened[-1].HasField("grammar")


async def test_going_on_past_the_end_is_refused_beside_strict_functions(front: Front) -> None:
    response = await asked(front, STRICT, ignore_eos=True)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "ignore_eos"
