"""The client API over real gRPC, beside REST: same text, same counts, same refusals."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from graft.common.errors import (
    GraftError,
    InvalidArgument,
    NumericFailure,
    Overloaded,
)
from graft.common.server import error_from_call
from graft.gateway.rpc import SERVICE_NAME
from graft.testing.front import PROMPT, Front, running_front
from graft.testing.scripted_draft import ScriptedDraft
from graft.testing.scripted_verify import Script
from graft.v1 import gateway_pb2 as pb
from graft.v1.gateway_pb2_grpc import GatewayServiceStub

SAY = list(b"abcdefghijklmnopqrstuvwxyz" * 20)
TIMEOUT_S = 20.0


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[Front]:
    async with running_front(tmp_path, [Script(SAY, widths=(4,))]) as running:
        yield running


def chat(**options: Any) -> pb.ChatRequest:
    message = pb.ChatMessage(role="user", content=PROMPT)
    return pb.ChatRequest(messages=[message], options=pb.GenerationOptions(**options))


def complete(*prompts: str, echo: bool = False, **options: Any) -> pb.CompleteRequest:
    return pb.CompleteRequest(
        prompts=[pb.Prompt(text=prompt) for prompt in prompts],
        echo=echo,
        options=pb.GenerationOptions(**options),
    )


async def test_both_surfaces_give_one_answer(front: Front) -> None:
    stub = GatewayServiceStub(front.channel)
    for options in ({"max_tokens": 9}, {"max_tokens": 30, "stop": ["k"]}, {"n": 2, "seed": 4}):
        answer = (await stub.Chat(chat(**{"max_tokens": 5, **options}), timeout=TIMEOUT_S)).answer
        body = (await front.chat(**{"max_tokens": 5, **options})).json()
        assert [choice.text for choice in answer.choices] == [
            choice["message"]["content"] for choice in body["choices"]
        ]
        assert answer.usage.completion_token_count == body["usage"]["completion_tokens"]
        assert answer.usage.prompt_token_count == body["usage"]["prompt_tokens"]
        record = body["metrics"]["speculative_decoding"]
        assert answer.speculation.round_count == record["num_rounds"]
        assert answer.speculation.accepted_count == record["num_accepted_draft_tokens"]


async def test_a_stream_ends_with_what_it_cost(front: Front) -> None:
    stub = GatewayServiceStub(front.channel)
    request = pb.ChatStreamRequest(
        messages=chat().messages, options=pb.GenerationOptions(max_tokens=9)
    )
    events = [response.event async for response in stub.ChatStream(request, timeout=TIMEOUT_S)]
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds == ["started", "delta", "delta", "delta", "finished", "completed"]
    assert "".join(event.delta.text for event in events) == "abcdefghi"
    tokens = [token for event in events for token in event.delta.tokens]
    assert [token.token for token in tokens] == SAY[:9]
    assert "".join(token.text for token in tokens) == "abcdefghi"
    assert tokens[1].origin == pb.TOKEN_ORIGIN_ACCEPTED
    assert events[-2].finished.reason == pb.END_REASON_LENGTH
    assert events[-1].completed.usage.completion_token_count == 9
    assert events[-1].completed.speculation.tree_round_count == 2


async def test_completions_echo_stop_and_score(front: Front) -> None:
    stub = GatewayServiceStub(front.channel)
    answer = (
        await stub.Complete(
            complete("x", "y", echo=True, max_tokens=9, stop=["d"], logprobs=True, top_logprobs=2),
            timeout=TIMEOUT_S,
        )
    ).answer
    assert [choice.text for choice in answer.choices] == ["xabc", "yabc"]
    first = answer.choices[0]
    assert (first.reason, first.stop_string) == (pb.END_REASON_STOP, "d")
    assert [token.logprob for token in first.tokens] == [-0.5] * 3
    assert [alternative.text for alternative in first.tokens[0].top] == ["a", "A"]


async def test_tokens_may_be_the_prompt(front: Front) -> None:
    stub = GatewayServiceStub(front.channel)
    tokens = pb.Prompt(tokens=pb.TokenList(tokens=[72, 105]))
    request = pb.CompleteStreamRequest(
        prompts=[tokens], echo=True, options=pb.GenerationOptions(max_tokens=2)
    )
    events = [event.event async for event in stub.CompleteStream(request, timeout=TIMEOUT_S)]
    assert "".join(event.delta.text for event in events) == "Hiab"


async def test_words_and_ids(front: Front) -> None:
    stub = GatewayServiceStub(front.channel)
    found = await stub.Tokenize(pb.TokenizeRequest(text="hé"), timeout=TIMEOUT_S)
    assert (list(found.tokens), found.context_length) == (list("hé".encode()), 512)
    back = await stub.Detokenize(pb.DetokenizeRequest(tokens=found.tokens), timeout=TIMEOUT_S)
    assert back.text == "hé"
    messages = await stub.Tokenize(pb.TokenizeRequest(messages=chat().messages), timeout=TIMEOUT_S)
    assert messages.tokens[0] == 257


async def test_models_and_server_info(tmp_path: Path) -> None:
    async with running_front(tmp_path, [Script(SAY)], [ScriptedDraft("ngram")]) as front:
        stub = GatewayServiceStub(front.channel)
        model = (await stub.ListModels(pb.ListModelsRequest(), timeout=TIMEOUT_S)).models[0]
        assert (model.id, model.context_length) == ("tiny", 512)
        assert [(tier.proposer, tier.num_draft_tokens) for tier in model.tiers] == [("ngram", 12)]
        info = await stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=TIMEOUT_S)
        assert (info.state, info.model) == ("ready", "tiny")
        assert {(replica.kind, replica.state) for replica in info.replicas} == {
            ("verify", "up"),
            ("draft", "up"),
        }


async def test_health_follows_the_replicas(front: Front) -> None:
    stub = health_pb2_grpc.HealthStub(front.channel)
    request = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
    assert (await stub.Check(request, timeout=TIMEOUT_S)).status == 1
    watching = stub.Watch(request, timeout=TIMEOUT_S)
    assert (await watching.read()).status == 1
    await front.verify.stop()
    assert (await watching.read()).status == 2
    watching.cancel()


async def test_a_cancelled_call_cancels_at_verify(tmp_path: Path) -> None:
    reached = asyncio.Event()

    async def pause(num_committed: int) -> None:
        if num_committed >= 3:
            reached.set()
            await asyncio.Event().wait()

    async with running_front(tmp_path, [Script(SAY, before_commit=pause)]) as front:
        stub = GatewayServiceStub(front.channel)
        unary = stub.Chat(chat(), timeout=TIMEOUT_S)
        await reached.wait()
        unary.cancel()
        await front.verify.until(lambda: front.verify.num_open == 0)
        reached.clear()
        stream = stub.ChatStream(pb.ChatStreamRequest(messages=chat().messages), timeout=TIMEOUT_S)
        await stream.read()
        await reached.wait()
        stream.cancel()
        await front.verify.until(lambda: len(front.verify.cancelled) == 2)
        assert front.verify.cancelled == ["client_gone", "client_gone"]
        assert front.server.gateway.num_in_flight == 0


async def test_a_deadline_reaches_verify(tmp_path: Path) -> None:
    async def pause(num_committed: int) -> None:
        await asyncio.Event().wait()

    async with running_front(tmp_path, [Script(SAY, before_commit=pause)]) as front:
        stub = GatewayServiceStub(front.channel)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await stub.Chat(chat(), timeout=0.3)
        assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await front.verify.until(lambda: len(front.verify.cancelled) == 1)


async def test_keys_are_asked_for(tmp_path: Path) -> None:
    async with running_front(tmp_path, [Script(SAY)], api_keys=["sesame"]) as front:
        stub = GatewayServiceStub(front.channel)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await stub.ListModels(pb.ListModelsRequest(), timeout=TIMEOUT_S)
        assert failure.value.code() is grpc.StatusCode.UNAUTHENTICATED
        metadata = (("authorization", "Bearer sesame"),)
        await stub.ListModels(pb.ListModelsRequest(), metadata=metadata, timeout=TIMEOUT_S)


Refuse = Callable[[Any], Awaitable[None]]


def refusing(error: GraftError) -> Refuse:
    async def refuse(_: Any) -> None:
        raise error

    return refuse


TABLE: list[tuple[dict[str, Any], GraftError | None, grpc.StatusCode, int, str]] = [
    ({"model": "other"}, None, grpc.StatusCode.NOT_FOUND, 404, "model_not_found"),
    (
        {"max_tokens": 9000},
        None,
        grpc.StatusCode.INVALID_ARGUMENT,
        400,
        "context_length_exceeded",
    ),
    ({"top_p": 7.0}, None, grpc.StatusCode.INVALID_ARGUMENT, 400, "invalid_argument"),
    (
        {},
        InvalidArgument("no", field="prompt"),
        grpc.StatusCode.INVALID_ARGUMENT,
        400,
        "invalid_argument",
    ),
    ({}, Overloaded("full"), grpc.StatusCode.RESOURCE_EXHAUSTED, 503, "overloaded"),
    ({}, NumericFailure("NaN"), grpc.StatusCode.INTERNAL, 500, "numeric"),
    ({}, GraftError("a bug"), grpc.StatusCode.INTERNAL, 500, "internal"),
]


@pytest.mark.parametrize("case", range(len(TABLE)))
async def test_errors_have_one_meaning_on_both_surfaces(front: Front, case: int) -> None:
    fields, error, code, status, reason = TABLE[case]
    front.verify.script.at_open = None if error is None else refusing(error)
    options = {name: value for name, value in fields.items() if name != "model"}
    request = complete(PROMPT, **options)
    request.model = fields.get("model", "")
    with pytest.raises(grpc.aio.AioRpcError) as failure:
        await GatewayServiceStub(front.channel).Complete(request, timeout=TIMEOUT_S)
    response = await front.complete(**fields)
    assert failure.value.code() is code
    assert (response.status_code, response.json()["error"]["code"]) == (status, reason)
    told = error_from_call(failure.value)
    assert told is not None and str(told) == response.json()["error"]["message"]
    param = response.json()["error"]["param"]
    assert told.field == {"prompt": "prompts"}.get(param, param)
