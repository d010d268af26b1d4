"""POST /v1/responses over real sockets, mostly as the official client sees it."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from graft.testing.front import PROMPT, Front, running_front
from graft.testing.models import IM_END
from graft.testing.scripted_verify import Script

SAY = [*"Héllo 😀 there.".encode(), IM_END]
CALL = '<think>Hm.</think>Well.<tool_call>{"name": "look", "arguments": {"at": "東京"}}</tool_call>'
LOOK = {"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": None}


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[Front]:
    async with running_front(
        tmp_path, [Script(SAY, widths=(4,), describe={"context_length": 4096})]
    ) as running:
        yield running


def client_of(front: Front) -> AsyncOpenAI:
    return AsyncOpenAI(
        base_url=f"{front.client.base_url}/v1", api_key="none", max_retries=0, timeout=20
    )


async def create(front: Front, **fields: Any) -> httpx.Response:
    return await front.client.post("/v1/responses", json={"input": PROMPT, **fields})


def asked(front: Front) -> str:
    return front.server.gateway.tokenizer.decode(list(front.verify.opened[-1].prompt_tokens))


async def test_a_response_is_written(front: Front) -> None:
    async with client_of(front) as client:
        response = await client.responses.create(
            model="tiny", input=PROMPT, instructions="Be kind.", metadata={"a": "b"}, store=False
        )
    assert response.output_text == "Héllo 😀 there."
    assert (response.status, response.store if hasattr(response, "store") else False) == (
        "completed",
        False,
    )
    assert response.metadata == {"a": "b"}
    usage = response.usage
    assert usage is not None and usage.output_tokens == len(SAY) - 1
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    prompt = asked(front)
    assert prompt.startswith("<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nSay it.")


async def test_a_response_is_streamed_as_the_client_expects(front: Front) -> None:
    async with client_of(front) as client:
        events = [
            event
            async for event in await client.responses.create(
                model="tiny", input=PROMPT, stream=True
            )
        ]
        async with client.responses.stream(model="tiny", input=PROMPT) as stream:
            async for _ in stream:
                pass
            final = await stream.get_final_response()
    kinds = [event.type for event in events]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert "".join(deltas) == "Héllo 😀 there." and len(deltas) > 2
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert final.output_text == "Héllo 😀 there."


async def test_reasoning_and_calls_are_items(tmp_path: Path) -> None:
    script = Script([*CALL.encode(), IM_END], widths=(3,), describe={"context_length": 4096})
    async with (
        running_front(tmp_path, [script], reasoning_parser="think") as front,
        client_of(front) as client,
    ):
        tools: Any = [LOOK]
        async with client.responses.stream(model="tiny", input=PROMPT, tools=tools) as stream:
            kinds = [event.type async for event in stream]
            streamed = await stream.get_final_response()
        whole = (await create(front, tools=tools)).json()
    for output in (streamed.model_dump()["output"], whole["output"]):
        assert [item["type"] for item in output] == ["reasoning", "message", "function_call"]
        assert output[0]["content"][0]["text"] == "Hm."
        assert output[1]["content"][0]["text"] == "Well."
        assert json.loads(output[2]["arguments"]) == {"at": "東京"}
    assert "response.function_call_arguments.delta" in kinds
    assert "response.reasoning_text.delta" in kinds
    assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


async def test_items_become_the_conversation(front: Front) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "Where?"}]},
        {
            "type": "message",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "Um."}],
        },
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": '{"at": "Bern"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "A bear."},
    ]
    assert (await create(front, input=items, tools=[LOOK])).status_code == 200
    prompt = asked(front)
    assert "<|im_start|>user\nWhere?<|im_end|>" in prompt
    assert 'assistant\nUm.\n<tool_call>\n{"name": "look", "arguments": {"at": "Bern"}}' in prompt
    assert "<tool_response>\nA bear.\n</tool_response>" in prompt


async def test_a_budget_leaves_a_response_incomplete(front: Front) -> None:
    body = (await create(front, max_output_tokens=3)).json()
    assert (body["status"], body["incomplete_details"]) == (
        "incomplete",
        {"reason": "max_output_tokens"},
    )
    events = await stream(front, max_output_tokens=3)
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["output"][0]["status"] == "incomplete"


async def test_logprobs_join_to_the_text(front: Front) -> None:
    body = (await create(front, include=["message.output_text.logprobs"], top_logprobs=2)).json()
    part = body["output"][0]["content"][0]
    assert "".join(entry["token"] for entry in part["logprobs"]) == part["text"]
    events = await stream(front, top_logprobs=2)
    found = [
        e for event in events if event["type"].endswith("text.delta") for e in event["logprobs"]
    ]
    done = next(e for e in events if e["type"] == "response.output_text.done")
    assert found == done["logprobs"] == part["logprobs"]


REFUSED: list[tuple[str, Any]] = [
    ("previous_response_id", "resp_1"),
    ("store", True),
    ("background", True),
    ("conversation", "conv_1"),
    ("prompt", {"id": "p"}),
    ("truncation", "auto"),
    ("include", ["file_search_call.results"]),
    ("n", 2),
    ("tools", [{"type": "web_search"}]),
    ("tools", [{"type": "function"}]),
    ("tool_choice", {"type": "file_search"}),
    ("input", []),
    ("input", [{"type": "item_reference", "id": "x"}]),
    ("input", [{"role": "king", "content": "x"}]),
    ("input", [{"role": "user", "content": [{"type": "input_image"}]}]),
    ("input", 3),
    ("max_output_tokens", 0),
    ("text", {"format": {"type": "poem"}}),
    ("temperature", -1),
]


@pytest.mark.parametrize(("field", "value"), REFUSED)
async def test_what_needs_a_store_is_refused_by_name(front: Front, field: str, value: Any) -> None:
    response = await create(front, **{field: value})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"].split("[")[0].split(".")[0] == field


async def test_half_characters_are_not_echoed(front: Front) -> None:
    for field, value in (("metadata", {"a": "\ud83d"}), ("user", "\ud83d")):
        content = json.dumps({"input": PROMPT, field: value}).encode()
        response = await front.client.post("/v1/responses", content=content)
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == field


async def test_a_failure_after_the_first_byte_is_an_error_event(tmp_path: Path) -> None:
    async def fail(done: int) -> None:
        if done > 4:
            raise RuntimeError("the model broke")

    script = Script(SAY, widths=(2,), before_commit=fail)
    async with (
        running_front(tmp_path, [script], replay_timeout_s=0.2) as front,
        client_of(front) as client,
    ):
        kinds = []
        with pytest.raises(openai.APIError):
            async for event in await client.responses.create(
                model="tiny", input=PROMPT, stream=True
            ):
                kinds.append(event.type)
    assert kinds[0] == "response.created" and kinds[-1] == "response.failed"


async def stream(front: Front, **fields: Any) -> list[dict[str, Any]]:
    """The events of a stream; every one is named as its type says, and none is [DONE]."""
    response = await create(front, stream=True, **fields)
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events
