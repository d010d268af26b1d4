"""The client against a real gateway: what it returns, what it raises, when it asks again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from graft.client import CallFailed, Client, Message, Options, Wish
from graft.client.options import prompts
from graft.common.errors import Overloaded
from graft.testing.front import PROMPT, Front, running_front
from graft.testing.scripted_verify import Script

SAY = list(b"abcdefghijklmnopqrstuvwxyz" * 20)


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[Front]:
    async with running_front(tmp_path, [Script(SAY, widths=(4,))]) as running:
        yield running


@pytest.fixture
async def client(front: Front) -> AsyncIterator[Client]:
    async with Client(f"127.0.0.1:{front.server.grpc_port}", timeout_s=20) as running:
        yield running


async def test_a_chat_is_answered_in_one_call(client: Client) -> None:
    answer = await client.chat(PROMPT, Options(max_tokens=9))
    assert answer.text == "abcdefghi"
    assert answer.choices[0].reason == "length"
    assert [token.id for token in answer.choices[0].tokens] == SAY[:9]
    assert answer.choices[0].tokens[1].origin == "accepted"
    assert answer.usage.num_completion == 9
    assert answer.speculation.num_rounds == 2


async def test_a_stream_joins_to_the_answer_and_ends_with_its_usage(client: Client) -> None:
    options = Options(max_tokens=30, stop=["k"], n=2, seed=4)
    answer = await client.chat([Message("user", PROMPT)], options)
    pieces = [piece async for piece in client.chat_stream(PROMPT, options)]
    for choice in answer.choices:
        own = [piece for piece in pieces if piece.index == choice.index and piece.usage is None]
        assert "".join(piece.text for piece in own) == choice.text == "abcdefghij"
        assert [(piece.reason, piece.stop) for piece in own if piece.reason] == [("stop", "k")]
    assert [piece.usage for piece in pieces if piece.usage] == [answer.usage]
    assert pieces[-1].usage == answer.usage


async def test_a_completion_takes_texts_or_tokens(client: Client) -> None:
    answer = await client.complete(["one", "two"], Options(max_tokens=3), echo=True)
    assert [choice.text for choice in answer.choices] == ["oneabc", "twoabc"]
    pieces = [p async for p in client.complete_stream([1, 2, 3], Options(max_tokens=3))]
    assert "".join(piece.text for piece in pieces) == "abc"


async def test_it_tells_tokens_models_and_the_state(client: Client, front: Front) -> None:
    tokens = await client.tokenize("hello")
    assert await client.detokenize(tokens) == "hello"
    conversation = await client.tokenize([Message("user", "hello")])
    assert len(conversation) > len(tokens)
    (model,) = await client.models()
    assert (model.id, model.context_length) == ("tiny", 512)
    info = await client.server_info()
    assert (info.state, info.model) == ("ready", "tiny")
    assert [(one.kind, one.address) for one in info.replicas] == [("verify", front.verify.address)]


async def test_a_refusal_says_what_and_where(client: Client) -> None:
    with pytest.raises(CallFailed, match="temperature") as raised:
        await client.chat(PROMPT, Options(temperature=-1))
    failure = raised.value
    assert (failure.code, failure.reason) == ("INVALID_ARGUMENT", "invalid_argument")
    assert failure.field == "temperature"
    assert failure.retry_after_s is None and not failure.not_admitted
    with pytest.raises(CallFailed) as raised:
        async for _ in client.chat_stream(PROMPT, model="another"):
            pass
    assert raised.value.reason == "model_not_found"


async def test_a_wrong_key_is_refused_and_the_right_one_is_not(tmp_path: Path) -> None:
    async with running_front(tmp_path, [Script(SAY)], wait=False, api_keys=["k"]) as front:
        address = f"127.0.0.1:{front.server.grpc_port}"
        await front.until(True)
        async with Client(address, api_key="wrong") as client:
            with pytest.raises(CallFailed) as raised:
                await client.models()
        assert raised.value.code == "UNAUTHENTICATED"
        async with Client(address, api_key="k") as client:
            assert (await client.chat(PROMPT, Options(max_tokens=2))).text == "ab"


async def test_what_was_not_admitted_is_asked_again(tmp_path: Path) -> None:
    asked: list[str] = []

    async def full_at_first(_: Any) -> None:
        asked.append("open")
        if len(asked) < 3:
            raise Overloaded("no room", retry_after_s=0.01)

    script = Script(SAY, at_open=full_at_first)
    async with running_front(tmp_path, [script], replay_timeout_s=0.0) as front:
        async with Client(f"127.0.0.1:{front.server.grpc_port}") as client:
            answer = await client.chat(PROMPT, Options(max_tokens=2))
            assert answer.text == "ab"
            asked.clear()
            pieces = [piece async for piece in client.chat_stream(PROMPT, Options(max_tokens=2))]
            assert "".join(piece.text for piece in pieces) == "ab"
        assert len(asked) == 3


async def test_the_last_refusal_is_raised_when_no_try_is_left(tmp_path: Path) -> None:
    async def full(_: Any) -> None:
        raise Overloaded("no room", retry_after_s=0.01)

    script = Script(SAY, at_open=full)
    async with running_front(tmp_path, [script], replay_timeout_s=0.0) as front:
        async with Client(f"127.0.0.1:{front.server.grpc_port}", retries=1) as client:
            with pytest.raises(CallFailed) as raised:
                await client.chat(PROMPT, Options(max_tokens=2))
    assert raised.value.not_admitted


async def test_a_stream_that_has_begun_is_never_begun_again(tmp_path: Path) -> None:
    async def breaks(committed: int) -> None:
        if committed:
            raise Overloaded("gone", retry_after_s=0.01)

    script = Script(SAY, before_commit=breaks)
    async with running_front(tmp_path, [script], replay_timeout_s=0.0) as front:
        async with Client(f"127.0.0.1:{front.server.grpc_port}") as client:
            texts = []
            with pytest.raises(CallFailed):
                async for piece in client.complete_stream(PROMPT, Options(max_tokens=9)):
                    texts.append(piece.text)
        assert "".join(texts) == "a"


async def test_nothing_at_the_address_is_unreachable() -> None:
    async with Client("127.0.0.1:1", retries=0, timeout_s=5) as client:
        with pytest.raises(CallFailed) as raised:
            await client.chat("x")
    assert raised.value.unreachable and raised.value.reason == ""


async def test_leaving_a_stream_ends_the_work(front: Front, client: Client) -> None:
    stream = client.complete_stream(PROMPT, Options(max_tokens=400))
    assert (await anext(stream)).text
    await stream.aclose()
    await front.verify.until(lambda: front.verify.num_open == 0)


async def test_calls_run_side_by_side(client: Client) -> None:
    answers = await asyncio.gather(
        *(client.complete(PROMPT, Options(max_tokens=length)) for length in range(1, 9))
    )
    assert [len(answer.text) for answer in answers] == [*range(1, 9)]


async def test_a_client_that_is_not_open_says_so() -> None:
    with pytest.raises(RuntimeError, match="async with"):
        await Client().models()


def test_every_option_reaches_the_wire() -> None:
    options = Options(
        max_tokens=3,
        temperature=0.0,
        top_k=4,
        stop=["x"],
        logit_bias={5: 1.5},
        logprobs=True,
        speculation=Wish("ngram", num_steps=2),
        trace_rounds=True,
        json_schema={"type": "object"},
    )
    message = options.message()
    assert (message.max_tokens, message.top_k, message.stop[:]) == (3, 4, ["x"])
    assert message.HasField("temperature") and not message.HasField("top_p")
    assert dict(message.logit_bias) == {5: 1.5}
    assert message.speculation_tier.proposer == "ngram"
    assert message.speculation_tier.num_steps == 2
    assert message.json_schema == '{"type": "object"}'
    with pytest.raises(ValueError, match="one of"):
        Options(regex="a", ebnf="root ::= 'a'").message()


def test_prompts_are_told_apart() -> None:
    assert [one.text for one in prompts("a")] == ["a"]
    assert [one.text for one in prompts(["a", "b"])] == ["a", "b"]
    assert [one.tokens.tokens[:] for one in prompts([1, 2])] == [[1, 2]]


def test_options_are_the_options_of_the_proto() -> None:
    from dataclasses import fields

    from graft.v1 import gateway_pb2

    known = set(gateway_pb2.GenerationOptions.DESCRIPTOR.fields_by_name)
    ours = {field.name for field in fields(Options)}
    assert known - ours == {"speculation_mode", "speculation_tier"}
    of_chats = {"template", "tools", "tool_choice", "parallel_tool_calls"}
    assert ours - known == {"speculation", *of_chats}


async def test_a_trace_has_rounds_with_their_times(client: Client) -> None:
    answer = await client.complete(PROMPT, Options(max_tokens=9, trace_rounds=True))
    rounds = answer.choices[0].rounds
    assert [one.number for one in rounds] == [0, 1, 2]
    assert [token for one in rounds for token in one.tokens] == SAY[:9]
    with contextlib.suppress(StopIteration):
        assert next(one for one in rounds if one.tree) is not None
