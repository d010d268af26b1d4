"""The official Python client in all its ways, against a scripted model that does as it is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI, OpenAI
from pydantic import BaseModel

from graft.testing.actor import actor
from graft.testing.front import Front, running_front

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
TEXT = "Hello! I have read what you said, and I am glad to be of help. 😀"


class Joke(BaseModel):
    """A joke in two parts."""

    setup: str
    punchline: str


class AddTo(BaseModel):
    """Adds to a number."""

    number: int


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[Front]:
    async with running_front(tmp_path, [actor()], silent_s=20.0) as running:
        yield running


@pytest.fixture
async def client(front: Front) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(**settings(front)) as made:
        yield made


def settings(front: Front) -> dict[str, Any]:
    return {"base_url": f"{front.client.base_url}/v1", "api_key": "none", "max_retries": 0}


def blocking(front: Front) -> None:
    """What a program without asyncio does."""
    with OpenAI(**settings(front)) as client:
        whole = client.chat.completions.create(model="tiny", messages=HELLO)
        assert whole.choices[0].message.content == TEXT
        with client.chat.completions.stream(model="tiny", messages=HELLO) as stream:
            for _ in stream:
                pass
            assert stream.get_final_completion().choices[0].message.content == TEXT
        parsed = client.chat.completions.parse(model="tiny", messages=HELLO, response_format=Joke)
        assert parsed.choices[0].message.parsed == Joke(setup="Something", punchline="Something")
        assert client.responses.create(model="tiny", input="hello").output_text == TEXT
        assert [model.id for model in client.models.list()] == ["tiny"]
        with pytest.raises(openai.NotFoundError):
            client.chat.completions.create(model="other", messages=HELLO)


async def test_the_blocking_client(front: Front) -> None:
    await asyncio.to_thread(blocking, front)


async def test_structured_answers_are_parsed(client: AsyncOpenAI) -> None:
    async with client.chat.completions.stream(
        model="tiny", messages=HELLO, response_format=Joke
    ) as stream:
        snapshots = [event async for event in stream if event.type == "content.delta"]
        final = await stream.get_final_completion()
    assert len(snapshots) > 2
    assert final.choices[0].message.parsed == Joke(setup="Something", punchline="Something")
    response = await client.responses.parse(model="tiny", input="hello", text_format=Joke)
    assert response.output_parsed == Joke(setup="Something", punchline="Something")


@pytest.mark.parametrize("choice", ["auto", "required"])
async def test_calls_are_parsed(client: AsyncOpenAI, choice: Any) -> None:
    ask: list[Any] = [{"role": "user", "content": "Add to 41."}]
    tools = [openai.pydantic_function_tool(AddTo)]
    async with client.chat.completions.stream(
        model="tiny", messages=ask, tools=tools, tool_choice=choice
    ) as stream:
        kinds = {event.type async for event in stream}
        streamed = await stream.get_final_completion()
    whole = await client.chat.completions.parse(
        model="tiny", messages=ask, tools=tools, tool_choice=choice
    )
    assert "tool_calls.function.arguments.delta" in kinds
    for answer in (streamed, whole):
        assert answer.choices[0].finish_reason == "tool_calls"
        (call,) = answer.choices[0].message.tool_calls or []
        assert call.function.parsed_arguments == AddTo(number=41)


async def test_a_conversation_goes_on_after_a_call(client: AsyncOpenAI) -> None:
    ask: list[Any] = [{"role": "user", "content": "Add to 41."}]
    tools: Any = [openai.pydantic_function_tool(AddTo)]
    called = await client.chat.completions.create(model="tiny", messages=ask, tools=tools)
    message = called.choices[0].message
    assert message.tool_calls
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "42"}
    done = await client.chat.completions.create(
        model="tiny", messages=[*ask, message.model_dump(), result], tools=tools
    )
    assert done.choices[0].message.content == TEXT
