"""The REST surface over real sockets: shapes, streams, headers, refusals."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from graft.testing.front import PROMPT, Front, running_front
from graft.testing.scripted_verify import Script

SAY = list(b"abcdefghijklmnopqrstuvwxyz" * 20)
EMOJI = [*"né 😀!".encode(), *SAY]
MESSAGES: list[Any] = [{"role": "user", "content": PROMPT}]


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[Front]:
    async with running_front(tmp_path, [Script(SAY, widths=(4,))]) as running:
        yield running


@pytest.fixture
async def openai(front: Front) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(
        base_url=str(front.client.base_url) + "/v1/", api_key="none", max_retries=0
    ) as client:
        yield client


async def test_the_openai_client_reads_a_chat(openai: AsyncOpenAI) -> None:
    answer = await openai.chat.completions.create(
        model="tiny", messages=MESSAGES, max_tokens=6, temperature=0, logprobs=True, top_logprobs=2
    )
    message = answer.choices[0].message
    assert (message.role, message.content) == ("assistant", "abcdef")
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.completion_tokens == 6
    content = answer.choices[0].logprobs
    assert content is not None and content.content is not None
    assert "".join(entry.token for entry in content.content) == "abcdef"
    assert all(len(entry.top_logprobs) == 2 for entry in content.content)


async def test_the_openai_client_reads_a_chat_stream(openai: AsyncOpenAI) -> None:
    stream = await openai.chat.completions.create(
        model="tiny",
        messages=MESSAGES,
        max_tokens=9,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    texts = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(texts) == "abcdefghi"
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    usage = chunks[-1].usage
    assert chunks[-1].choices == []
    assert usage is not None and (usage.completion_tokens, usage.total_tokens) == (
        9,
        9 + usage.prompt_tokens,
    )


async def test_the_openai_stream_helper_reads_a_chat(openai: AsyncOpenAI) -> None:
    async with openai.chat.completions.stream(
        model="tiny", messages=MESSAGES, max_tokens=9, stop="f"
    ) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_completion()
    assert "content.delta" in kinds
    assert final.choices[0].message.content == "abcde"


async def test_the_openai_client_reads_completions(openai: AsyncOpenAI) -> None:
    answer = await openai.completions.create(
        model="tiny", prompt=["one", "two"], max_tokens=3, n=2, echo=True, logprobs=1
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == ["oneabc", "oneabc", "twoabc", "twoabc"]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.tokens is not None
    assert "".join(logprobs.tokens) == "oneabc"
    assert logprobs.text_offset == [0, 1, 2, 3, 4, 5]
    assert logprobs.token_logprobs == [None, -0.5, -0.5, -0.5, -0.5, -0.5]
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 12)


async def test_a_chat_stream_is_right_byte_for_byte(front: Front) -> None:
    chunks = await front.stream(
        "/v1/chat/completions", messages=MESSAGES, max_tokens=9, n=2, seed=1
    )
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    for index in (0, 1):
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(one["delta"].get("content", "") for one in mine) == "abcdefghi"
        assert [one["finish_reason"] for one in mine] == [None] * (len(mine) - 1) + ["length"]
        assert mine[-1]["delta"] == {}


async def test_a_round_is_one_event(front: Front) -> None:
    chunks = await front.stream("/v1/completions", prompt=PROMPT, max_tokens=9)
    assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "bcde", "fghi", ""]


async def test_a_stream_interval_joins_rounds(tmp_path: Path) -> None:
    async with running_front(tmp_path, [Script(SAY)], stream_interval=3) as front:
        chunks = await front.stream("/v1/completions", prompt=PROMPT, max_tokens=9)
        assert [chunk["choices"][0]["text"] for chunk in chunks] == ["a", "bcd", "efg", "hi", ""]


async def test_emoji_arrive_whole_at_every_width(tmp_path: Path) -> None:
    script = Script(EMOJI)
    async with running_front(tmp_path, [script]) as front:
        for width in range(1, 9):
            script.widths = (width,)
            chunks = await front.stream(
                "/v1/chat/completions", messages=MESSAGES, max_tokens=len("né 😀!".encode())
            )
            parts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
            assert "".join(parts) == "né 😀!"
            cut = await front.chat(max_tokens=6, logprobs=True)
            assert cut.json()["choices"][0]["message"]["content"] == "né "
            assert cut.json()["usage"]["completion_tokens"] == 6
            assert len(cut.json()["choices"][0]["logprobs"]["content"]) == 6


async def test_usage_can_come_with_every_chunk(front: Front) -> None:
    chunks = await front.stream(
        "/v1/completions",
        prompt=PROMPT,
        max_tokens=9,
        stream_options={"include_usage": True, "continuous_usage_stats": True},
    )
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == [1, 5, 9, 9, 9]
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["metrics"]["speculative_decoding"]["num_rounds"] == 2


async def test_keep_alives_come_while_nothing_else_does(tmp_path: Path) -> None:
    go = asyncio.Event()

    async def wait(_: Any) -> None:
        await go.wait()

    script = Script(SAY, at_open=wait)
    async with running_front(tmp_path, [script], keepalive_s=0.05) as front:
        body = {"prompt": PROMPT, "stream": True, "max_tokens": 2}
        async with front.client.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            assert await anext(lines) == ": keep-alive"
            go.set()
            rest = [line async for line in lines if line.startswith("data: ")]
        assert rest[-1] == "data: [DONE]"


async def test_keep_alives_come_between_pieces(tmp_path: Path) -> None:
    go = asyncio.Event()

    async def wait(num_committed: int) -> None:
        if num_committed == 2:
            await go.wait()

    script = Script(SAY, before_commit=wait)
    async with running_front(tmp_path, [script], keepalive_s=0.05) as front:
        body = {"prompt": PROMPT, "stream": True, "max_tokens": 4}
        async with front.client.stream("POST", "/v1/completions", json=body) as response:
            seen: list[str] = []
            async for line in response.aiter_lines():
                seen += [line] if line else []
                if seen[-2:] == [": keep-alive"] * 2:
                    go.set()
        assert [json.loads(one[6:])["choices"][0]["text"] for one in seen[:2]] == ["a", "b"]
        assert seen[2:4] == [": keep-alive"] * 2
        assert seen[-1] == "data: [DONE]"


async def test_a_client_that_does_not_read_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its sockets do not take waits in the gateway no longer than the limit."""
    monkeypatch.setattr("graft.gateway.rest.sse._SEND_TIMEOUT_S", 0.2)
    script = Script(SAY * 1000, widths=(8,), describe={"context_length": 1 << 20})
    async with running_front(tmp_path, [script], keepalive_s=0.1) as front:
        url = front.client.base_url
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect((url.host, url.port))
        fields = {"prompt": PROMPT, "stream": True, "max_tokens": 400_000, "logprobs": 20}
        body = json.dumps(fields).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
        client.sendall(head.encode() + body)
        await front.verify.until(lambda: front.verify.num_open == 1)
        # The session ends although nothing was read, and the client is told no end.
        await front.verify.until(lambda: front.verify.num_open == 0)
        metrics = (await front.client.get("/metrics")).text
        assert 'graft_requests_total{code="499",route="/v1/completions"} 1.0' in metrics
        client.close()


async def test_token_origins_come_when_asked_for(front: Front) -> None:
    body = (await front.chat(max_tokens=6, return_token_ids=True)).json()
    choice = body["choices"][0]
    assert choice["token_ids"] == SAY[:6]
    assert choice["token_texts"] == list("abcdef")
    assert "".join(origin[0] for origin in choice["token_origins"]) == "paaaba"


async def test_echo_without_tokens_scores_the_prompt(front: Front) -> None:
    body = (await front.complete(max_tokens=0, echo=True, logprobs=1)).json()
    choice = body["choices"][0]
    assert choice["text"] == PROMPT
    assert choice["logprobs"]["tokens"] == list(PROMPT)
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert body["usage"]["completion_tokens"] == 0
    assert choice["finish_reason"] == "length"


async def test_echo_is_streamed_before_the_text(front: Front) -> None:
    chunks = await front.stream("/v1/completions", prompt=[72, 105], max_tokens=3, echo=True)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hiabc"


async def test_models_may_be_asked_for_by_any_path(front: Front) -> None:
    for path in ("/v1/models", "/v1//models", "/v1///models/"):
        body = (await front.client.get(path)).json()
        assert body["object"] == "list"
        assert body["data"][0]["max_model_len"] == 512
    one = (await front.client.get("/v1/models/tiny")).json()
    assert (one["id"], one["object"], one["owned_by"]) == ("tiny", "model", "graft")
    assert one["speculation"]["default"] == "auto"
    missing = await front.client.get("/v1/models/some/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_a_served_name_may_hold_slashes(tmp_path: Path) -> None:
    async with running_front(tmp_path, [Script(SAY)], served_name="org/model") as front:
        assert (await front.client.get("/v1/models/org/model")).json()["id"] == "org/model"
        assert (await front.complete(model="org/model", max_tokens=1)).status_code == 200


async def test_tokenize_and_back(front: Front) -> None:
    for prefix in ("", "/v1"):
        tokens = (await front.client.post(f"{prefix}/tokenize", json={"prompt": "né 😀"})).json()
        assert tokens["count"] == len("né 😀".encode()) == len(tokens["tokens"])
        assert tokens["max_model_len"] == 512
        text = await front.client.post(f"{prefix}/detokenize", json={"tokens": tokens["tokens"]})
        assert text.json() == {"prompt": "né 😀"}
    chat = (await front.client.post("/tokenize", json={"messages": MESSAGES})).json()
    assert chat["tokens"][0] == 257


async def test_unknown_fields_are_named_and_counted(front: Front) -> None:
    response = await front.complete(max_tokens=1, frobnicate=1, **{"x\r\ny": 2, "é": None})
    assert response.status_code == 200
    assert response.headers["x-ignored-params"] == "frobnicate,x%0D%0Ay"
    assert "graft_ignored_params_total 2.0" in (await front.client.get("/metrics")).text


REFUSED: list[tuple[str, str, Any]] = [
    ("chat", "tools", [{"type": "web_search", "function": {"name": "f"}}]),
    ("chat", "tools", [{"type": "function", "function": {"name": "a b"}}]),
    ("chat", "tools", [{"type": "function", "function": {"name": "f"}}] * 2),
    ("chat", "tool_choice", "required"),
    ("chat", "tool_choice", "sometimes"),
    ("chat", "response_format", {"type": "json_object"}),
    ("chat", "response_format", {"type": "json_schema", "json_schema": {}}),
    ("chat", "regex", "a+"),
    ("chat", "ebnf", "root ::= 'a'"),
    ("chat", "prediction", {"type": "content", "content": 3}),
    ("completions", "suffix", "x"),
    ("completions", "best_of", 2),
    ("chat", "temperature", -1),
    ("chat", "temperature", "warm"),
    ("chat", "top_p", 0),
    ("chat", "top_p", 1.5),
    ("chat", "top_k", -2),
    ("chat", "min_p", 2),
    ("chat", "n", 0),
    ("chat", "n", 129),
    ("chat", "max_tokens", 0),
    ("chat", "max_completion_tokens", 0),
    ("chat", "seed", 1 << 64),
    ("chat", "seed", 1.5),
    ("chat", "stop", ["a", "b", "c", "d", "e"]),
    ("chat", "stop", [""]),
    ("chat", "stop", 5),
    ("chat", "stop_token_ids", [320]),
    ("chat", "stop_token_ids", [-1]),
    ("chat", "min_tokens", 513),
    ("chat", "presence_penalty", 3),
    ("chat", "frequency_penalty", -3),
    ("chat", "repetition_penalty", 0),
    ("chat", "logit_bias", {"x": 1}),
    ("chat", "logit_bias", {"320": 1}),
    ("chat", "logit_bias", {"1": 101}),
    ("chat", "logprobs", 3),
    ("chat", "top_logprobs", 21),
    ("chat", "top_logprobs", 1),
    ("completions", "logprobs", 21),
    ("completions", "max_tokens", 0),
    ("completions", "prompt", []),
    ("completions", "prompt", [[]]),
    ("completions", "prompt", [320]),
    ("completions", "prompt", [-1]),
    ("completions", "prompt", {"a": 1}),
    ("chat", "messages", []),
    ("chat", "messages", "hello"),
    ("chat", "stream_options", {"include_usage": True}),
    ("chat", "speculation", {"depth": 3}),
    ("chat", "speculation", 3),
    ("chat", "stream", "yes"),
]


async def test_a_value_that_cannot_be_honoured_is_refused_by_name(front: Front) -> None:
    for route, field, value in REFUSED:
        body: dict[str, Any] = {"messages": MESSAGES} if route == "chat" else {"prompt": PROMPT}
        path = "/v1/chat/completions" if route == "chat" else "/v1/completions"
        response = await front.client.post(path, json={**body, field: value})
        case = (route, field, value)
        assert response.status_code == 400, case
        error = response.json()["error"]
        assert re.split(r"[.\[]", error["param"])[0] == field, case
        assert isinstance(error["code"], str) and error["type"] == "invalid_request_error"
        assert response.headers["x-should-retry"] == "false"


async def test_an_empty_prompt_begins_with_the_models_own_start(front: Front) -> None:
    assert (await front.complete(prompt="", max_tokens=1)).status_code == 200
    assert list(front.verify.opened[-1].prompt_tokens) == [256]


async def test_image_parts_are_refused_with_a_sentence(front: Front) -> None:
    content = [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": {"url": "x"}}]
    response = await front.client.post(
        "/v1/chat/completions", json={"messages": [{"role": "user", "content": content}]}
    )
    error = response.json()["error"]
    assert response.status_code == 400
    assert "image_url" in error["message"] and error["param"] == "messages[0].content"


async def test_text_parts_and_developers_are_understood(front: Front) -> None:
    messages = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
    ]
    body = {"messages": messages, "max_tokens": 1}
    assert (await front.client.post("/v1/chat/completions", json=body)).status_code == 200
    prompt = bytes(token for token in front.verify.opened[-1].prompt_tokens if token < 256)
    assert prompt == b"system\nBe brief.\nuser\na\nb\nassistant\n"


async def test_a_prompt_over_the_context_is_refused(front: Front) -> None:
    for fields in ({"prompt": "x" * 513}, {"prompt": "x" * 500, "max_tokens": 13}):
        response = await front.client.post("/v1/completions", json=fields)
        error = response.json()["error"]
        assert (response.status_code, error["code"]) == (400, "context_length_exceeded")
        assert error["param"] == "prompt"
    fits = await front.client.post("/v1/completions", json={"prompt": "x" * 500, "max_tokens": 12})
    assert fits.status_code == 200
    chat = await front.chat(max_tokens=5000)
    assert (chat.status_code, chat.json()["error"]["code"]) == (400, "context_length_exceeded")


async def test_a_chat_may_use_the_whole_context(front: Front) -> None:
    front.verify.script.tokens = SAY
    await front.chat()
    opened = front.verify.opened[-1]
    assert opened.stop.max_tokens == 512 - len(opened.prompt_tokens)
    await front.complete()
    assert front.verify.opened[-1].stop.max_tokens == 16


@pytest.mark.parametrize(
    ("content", "kind", "status", "code"),
    [
        (b"{", "application/json", 400, "invalid_json"),
        (b"[1]", "application/json", 400, "invalid_argument"),
        (b"", "application/json", 400, "invalid_argument"),
        (b'{"prompt": "\\ud800"}', "application/json", 400, "invalid_argument"),
        (b'{"prompt": "a", "temperature": NaN}', "application/json", 400, "invalid_argument"),
        (b"[" * 100_000, "application/json", 400, "invalid_json"),
        (b'{"prompt": "\xff"}', "application/json", 400, "invalid_json"),
        (b'{"prompt": "a", "speculation": "{"}', "application/json", 400, "invalid_argument"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "application/json", 400, "invalid_json"),
        (b"prompt=x", "application/x-www-form-urlencoded", 415, "unsupported_media_type"),
        (b'{"prompt": "' + b"x" * 70_000 + b'"}', "application/json", 413, "request_too_large"),
    ],
)
async def test_bodies_that_are_no_request(
    tmp_path: Path, content: bytes, kind: str, status: int, code: str
) -> None:
    limit = 64 << 10 if status == 413 else 1 << 20
    async with running_front(tmp_path, [Script(SAY)], max_body_bytes=limit) as front:
        response = await front.client.post(
            "/v1/completions", content=content, headers={"content-type": kind}
        )
        assert (response.status_code, response.json()["error"]["code"]) == (status, code)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "the body is empty"),
        (b'{"prompt": "\xff"}', "not UTF-8"),
        (b"[" * 100_000, "nested too deeply"),
        (b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", "too many digits"),
        (b'{"prompt": "a", "speculation": "{"}', "speculation is neither"),
        (b'{"prompt": "a", "speculation": "{\\"topk\\": 0}"}', "speculation is neither"),
    ],
)
async def test_a_bad_body_is_told_what_is_wrong_with_it(
    front: Front, content: bytes, words: str
) -> None:
    headers = {"content-type": "application/json"}
    response = await front.client.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == 400
    assert words in response.json()["error"]["message"]


@pytest.mark.parametrize("name", ["messages", "add_generation_prompt"])
async def test_a_template_gets_its_messages_from_the_request_only(front: Front, name: str) -> None:
    response = await front.chat(chat_template_kwargs={name: True, "self": 1})
    assert response.status_code == 400
    assert response.json()["error"]["message"] == f"chat_template_kwargs may not set {name}"
    assert (await front.chat(chat_template_kwargs={"self": 1}, max_tokens=1)).status_code == 200


async def test_a_body_without_a_length_is_bounded_too(tmp_path: Path) -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(100):
            yield b"x" * 1024

    async with running_front(tmp_path, [Script(SAY)], max_body_bytes=4096) as front:
        try:
            response = await front.client.post(
                "/v1/completions",
                content=endless(),
                headers={"content-type": "application/json"},
            )
        except httpx.TransportError:
            return
        assert response.status_code == 413


async def test_routes_that_are_not_there(front: Front) -> None:
    missing = await front.client.get("/v1/nothing")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    wrong = await front.client.get("/v1/completions")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")


async def test_request_ids_are_echoed_when_they_are_words(front: Front) -> None:
    good = await front.client.get("/version", headers={"x-request-id": "abc-1.2_3"})
    assert good.headers["x-request-id"] == "abc-1.2_3"
    for bad in (b"has space", b"x" * 129, "ü".encode()):
        headers = [(b"x-request-id", bad)]
        response = await front.client.get("/version", headers=headers)
        assert len(response.headers["x-request-id"]) == 32


async def test_keys_are_asked_for(tmp_path: Path) -> None:
    async with running_front(tmp_path, [Script(SAY)], api_keys=["sesame", "schlüssel"]) as front:
        for header in (None, "Bearer wrong", "Basic sesame", "Bearer", "Bearer schlussel"):
            headers = {} if header is None else {"authorization": header}
            response = await front.client.get("/v1/models", headers=headers)
            error = response.json()["error"]
            assert (response.status_code, error["code"]) == (401, "invalid_api_key")
        for key in ("sesame", "schlüssel"):
            raw = [(b"authorization", b"Bearer " + key.encode())]
            assert (await front.client.get("/v1/models", headers=raw)).status_code == 200
        for path in ("/health", "/ready", "/version", "/metrics"):
            assert (await front.client.get(path)).status_code == 200


async def test_callers_with_different_keys_share_no_cache(tmp_path: Path) -> None:
    async with running_front(tmp_path, [Script(SAY)], api_keys=["a", "b"]) as front:
        for key in ("a", "b"):
            await front.client.post(
                "/v1/completions",
                json={"prompt": PROMPT, "max_tokens": 1, "cache_salt": "s"},
                headers={"authorization": f"Bearer {key}"},
            )
        salts = {opened.cache_salt for opened in front.verify.opened}
        assert len(salts) == 2 and all(salt.endswith(":s") for salt in salts)


async def test_health_tells_starting_from_lost_and_degraded(tmp_path: Path) -> None:
    async with running_front(
        tmp_path, [], wait=False, verify=["127.0.0.1:1"], draft=["127.0.0.1:1"]
    ) as front:
        health = await front.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "starting")
        ready = await front.client.get("/ready")
        assert (ready.status_code, ready.json()["state"], ready.json()["percent"]) == (
            503,
            "starting",
            0,
        )
        refused = await front.complete()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_replica")
    async with running_front(tmp_path, [Script(SAY)], draft=["127.0.0.1:1"]) as front:
        health = await front.client.get("/health")
        assert (health.status_code, health.json()["status"]) == (200, "degraded")
        body = (await front.complete(max_tokens=2)).json()
        record = body["metrics"]["speculative_decoding"]
        assert not record["active"] and "127.0.0.1:1" in record["inactive_reason"]
        await front.verify.stop()
        await front.until(False)
        assert (await front.client.get("/health")).status_code == 503


async def test_metrics_equal_the_sum_over_responses(front: Front) -> None:
    drafted = accepted = rounds = 0
    for budget in (3, 8, 20):
        body = (await front.complete(max_tokens=budget)).json()
        record = body["metrics"]["speculative_decoding"]
        drafted += record["num_draft_tokens"]
        accepted += record["num_accepted_draft_tokens"]
        rounds += record["num_spec_steps"]
    text = (await front.client.get("/metrics")).text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    for prefix in ("graft_", "vllm:spec_decode_num_"):
        assert float(lines[f"{prefix}draft_tokens_total"]) == drafted
        assert float(lines[f"{prefix}accepted_tokens_total"]) == accepted
    assert float(lines["vllm:spec_decode_num_drafts_total"]) == rounds
    at_first = lines['vllm:spec_decode_num_accepted_tokens_per_pos_total{position="0"}']
    assert float(at_first) == rounds
    assert lines['graft_kv_pages{state="free"}'] == "60.0"
    assert not any(line.startswith("vllm:") and "_created" in line for line in lines)


async def test_server_info_keeps_the_numbers_load_testers_read(front: Front) -> None:
    await front.complete(max_tokens=9)
    info = (await front.client.get("/server_info")).json()
    state = info["internal_states"][0]
    assert state["avg_spec_accept_length"] == 4.0
    assert "speculative_num_steps" in state
    assert info["verify"][0]["state"] == "up"


async def test_every_sampling_field_reaches_verify(front: Front) -> None:
    await front.chat(
        max_tokens=5,
        max_completion_tokens=4,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        seed=-1,
        stop_token_ids=[9],
        ignore_eos=True,
        min_tokens=2,
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=1.5,
        logit_bias={"3": -100},
        logprobs=True,
        top_logprobs=3,
        user="someone",
    )
    opened = front.verify.opened[-1]
    sampling, stop = opened.sampling, opened.stop
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.25, 7)
    assert (sampling.min_p, sampling.seed) == (0.125, (1 << 64) - 1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, 0.25)
    assert (sampling.repetition_penalty, dict(sampling.logit_bias)) == (1.5, {3: -100.0})
    assert (stop.max_tokens, stop.min_tokens, list(stop.stop_token_ids)) == (4, 2, [9])
    assert stop.ignore_eos and opened.want_logprobs and opened.top_logprobs == 3


async def test_null_is_the_default_of_every_field(front: Front) -> None:
    fields = (
        "temperature",
        "top_p",
        "n",
        "stop",
        "seed",
        "stream",
        "logprobs",
        "tools",
        "max_tokens",
    )
    response = await front.chat(**dict.fromkeys(fields), max_completion_tokens=2)
    assert response.status_code == 200
    assert front.verify.opened[-1].sampling.temperature == 1.0


async def test_the_openapi_document_names_the_routes(front: Front) -> None:
    document = json.loads((await front.client.get("/openapi.json")).text)
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models"} <= set(document["paths"])
