"""Every field of REST has its place over gRPC, and means the same there."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from graft.common.channel import open_channel
from graft.gateway.chat_request import ChatMessage, ChatRequest
from graft.gateway.functions import FunctionDefinition
from graft.gateway.request import CompletionRequest, SpeculationField
from graft.gateway.rpc_fields import option_fields
from graft.testing import scripted
from graft.testing.baseline import plain_tokens
from graft.testing.cluster import Cluster, running_cluster
from graft.testing.models import write_tiny_model
from graft.v1 import gateway_pb2 as pb
from graft.v1.gateway_pb2_grpc import GatewayServiceStub

PROMPT = list(b"Write about a tree.")
NUM_TOKENS = 16
TIMEOUT_S = 30.0

# Where a field of REST goes: its name over gRPC, where that is another.
RENAMED = {
    "max_completion_tokens": "max_tokens",
    "include_stop_str_in_output": "include_stop",
    "skip_special_tokens": "keep_special_tokens",
    "speculation": "speculation_mode",
    "speculation_trace": "trace_rounds",
    "prompt": "prompts",
    "response_format": "json_schema",
}
# What needs no field, and why.
NEEDLESS = {
    "stream": "the stream is a method of its own",
    "stream_options": "the last event of a stream always tells the usage",
    "return_token_ids": "token ids are always there",
    "user": "accepted for REST clients and read by nothing",
    "best_of": "refused unless it equals n",
    **dict.fromkeys(
        ["guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"],
        "vLLM's names for what the options of the grammar say",
    ),
}


@pytest.mark.parametrize(
    ("model", "message"), [(ChatRequest, pb.ChatRequest), (CompletionRequest, pb.CompleteRequest)]
)
def test_every_field_of_rest_has_its_place(model: type[ChatRequest], message: Any) -> None:
    known = {*message.DESCRIPTOR.fields_by_name, *pb.GenerationOptions.DESCRIPTOR.fields_by_name}
    excused = NEEDLESS.keys() | model.not_offered.keys()
    wanted = {RENAMED.get(name, name) for name in model.model_fields if name not in excused}
    assert wanted - known == set()


def test_every_field_of_a_tier_has_its_place() -> None:
    assert set(SpeculationField.model_fields) == set(pb.TierWish.DESCRIPTOR.fields_by_name)


def test_every_field_of_a_message_has_its_place() -> None:
    assert set(ChatMessage.model_fields) <= set(pb.ChatMessage.DESCRIPTOR.fields_by_name)


def test_every_field_of_a_function_has_its_place() -> None:
    assert set(FunctionDefinition.model_fields) == set(pb.Tool.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize(
    ("one", "other"),
    [(pb.ChatRequest, pb.ChatStreamRequest), (pb.CompleteRequest, pb.CompleteStreamRequest)],
)
def test_a_streamed_request_has_the_fields_of_one_that_is_not(one: Any, other: Any) -> None:
    def shape(message: Any) -> list[tuple[str, int]]:
        return [(field.name, field.number) for field in message.DESCRIPTOR.fields]

    assert shape(one) == shape(other)


def test_a_prediction_and_a_tier_mean_what_they_mean_over_rest() -> None:
    wish = pb.TierWish(proposer="ngram", lookahead=2)
    fields = option_fields(pb.GenerationOptions(prediction="so it goes", speculation_tier=wish))
    assert fields["prediction"] == {"content": "so it goes"}
    assert fields["speculation"] == {"proposer": "ngram", "lookahead": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
async def cluster(model: Path) -> AsyncIterator[Cluster]:
    """The drafter guesses the next three tokens, and is right."""
    async with running_cluster(model, num_draft=0) as plain:
        truth = PROMPT + await plain_tokens(plain.verify_addresses[0], PROMPT, NUM_TOKENS + 8)
    proposers = [scripted.perfect(scripted.replay([truth]), 3)]
    async with running_cluster(model, proposers=proposers) as running:
        yield running


@pytest.fixture
async def stub(cluster: Cluster) -> AsyncIterator[Any]:
    channel: grpc.aio.Channel = open_channel(f"127.0.0.1:{cluster.gateway.grpc_port}")
    yield GatewayServiceStub(channel)
    await channel.close(None)


def request(kind: Any, **options: Any) -> Any:
    prompt = pb.Prompt(tokens=pb.TokenList(tokens=PROMPT))
    return kind(
        prompts=[prompt],
        options=pb.GenerationOptions(
            max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, **options
        ),
    )


async def test_a_trace_shows_the_rounds_that_rest_shows(cluster: Cluster, stub: Any) -> None:
    body = await cluster.complete(
        PROMPT, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, speculation_trace=True
    )
    answer = (await stub.Complete(request(pb.CompleteRequest, trace_rounds=True))).answer
    told, shown = body["choices"][0]["speculation_trace"], answer.choices[0].rounds
    assert [token for one in shown for token in one.tokens] == [
        token.token for token in answer.choices[0].tokens
    ]
    assert [token for one in told for token in one["tokens"]] == [
        token for one in shown for token in one.tokens
    ]
    assert shown[0].plain_reason == "prefill"
    by_root = {one["tree"]["tokens"][0]: one["tree"] for one in told if one["tree"]}
    seen = [one.tree for one in shown if one.HasField("tree")]
    assert seen
    for tree in seen:
        other = by_root.get(tree.tokens[0])
        if other is not None and other["tokens"] == list(tree.tokens):
            assert [-1, *tree.parents] == other["parents"]
            assert list(tree.texts) == other["texts"]
            assert list(tree.choices) == other["choices"]
            assert tree.probabilities[:] == pytest.approx(other["probabilities"][1:], abs=1e-4)


async def test_a_stream_carries_its_rounds_beside_their_text(stub: Any) -> None:
    call = stub.CompleteStream(request(pb.CompleteStreamRequest, trace_rounds=True))
    rounds, tokens = [], []
    async for response in call:
        rounds += response.event.delta.rounds
        tokens += [token.token for token in response.event.delta.tokens]
    assert [token for one in rounds for token in one.tokens] == tokens
    assert [one.number for one in rounds] == list(range(len(rounds)))


async def test_nobody_is_shown_rounds_unasked(stub: Any) -> None:
    answer = (await stub.Complete(request(pb.CompleteRequest))).answer
    assert not answer.choices[0].rounds


async def test_an_echoed_prompt_has_the_logprobs_of_rest(cluster: Cluster, stub: Any) -> None:
    asked = request(pb.CompleteRequest, logprobs=True, top_logprobs=2)
    asked.echo = True
    choice = (await stub.Complete(asked)).answer.choices[0]
    body = await cluster.complete(
        PROMPT, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True, logprobs=2, echo=True
    )
    told = body["choices"][0]["logprobs"]
    assert choice.text == body["choices"][0]["text"]
    assert [one.token for one in choice.prompt] == PROMPT
    assert not choice.prompt[0].HasField("logprob") and told["token_logprobs"][0] is None
    seen = [one.logprob for one in (*choice.prompt[1:], *choice.tokens)]
    assert seen == pytest.approx(told["token_logprobs"][1:], abs=1e-4)
    assert all(len(one.top) == 2 for one in choice.prompt[1:])


async def test_the_chat_template_gets_its_arguments(cluster: Cluster, stub: Any) -> None:
    asked = pb.ChatRequest(
        messages=[pb.ChatMessage(role="user", content="a")],
        options=pb.GenerationOptions(max_tokens=1),
    )
    asked.chat_template_kwargs.update({"enable_thinking": True, "deep": {"list": [1, "x"]}})
    answer = (await stub.Chat(asked)).answer
    body = await cluster.chat("a", max_tokens=1)
    assert answer.usage.prompt_token_count == body["usage"]["prompt_tokens"]
