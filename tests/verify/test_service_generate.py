"""The gateway's side of a replica over real sockets: open, cancel, replay, limits and errors."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from graft.common.channel import open_channel
from graft.common.errors import (
    ContextLengthExceeded,
    GraftError,
    InvalidArgument,
    Overloaded,
    ProtocolBroken,
    Unsupported,
)
from graft.common.server import error_from_call
from graft.testing.gate import Gated
from graft.testing.plain import Plain
from graft.testing.verify_client import VerifyBench, eventually, running_verify, sampled
from graft.v1 import verify_pb2
from graft.v1.sampling_pb2 import Sampling, StopRule
from graft.v1.verify_pb2 import FinishReason

PROMPT = list(b"a prompt of more than two pages, to be reused later")
ENDLESS = StopRule(max_tokens=400, ignore_eos=True)


@pytest_asyncio.fixture
async def bench(tiny_model: Path) -> AsyncIterator[VerifyBench]:
    async with running_verify(tiny_model) as running:
        yield running


def opening(**fields: Any) -> verify_pb2.GenerateRequest:
    values: dict[str, Any] = {"prompt_tokens": PROMPT, "stop": ENDLESS, **fields}
    return verify_pb2.GenerateRequest(open=verify_pb2.OpenSession(**values))


async def failure_of(bench: VerifyBench, *messages: verify_pb2.GenerateRequest) -> GraftError:
    call = bench.generate_call()
    for message in messages:
        await call.write(message)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    error = error_from_call(caught.value)
    assert error is not None
    return error


async def test_describe_says_what_a_peer_must_know(bench: VerifyBench) -> None:
    about = await bench.stub.Describe(verify_pb2.VerifyServiceDescribeRequest())
    assert about.protocol_revision == 1
    assert about.incarnation_id != 0
    assert (about.vocab_size, about.context_length) == (320, 512)
    assert list(about.eos_token_ids) == [258, 256]
    assert (about.max_nodes, about.max_depth, about.max_trees) == (32, 16, 32)
    assert (about.kv_page_count, about.kv_page_free_count, about.kv_page_tokens) == (128, 128, 16)
    assert (about.hidden_size, about.layer_count) == (64, 2)
    assert len(about.tokenizer_digest) == 64
    assert about.last_progress_micros == 0


async def test_a_session_is_opened_commits_and_finishes_in_sequence(
    bench: VerifyBench, plain: Plain
) -> None:
    generation = await bench.generate(PROMPT, 10)
    assert generation.tokens == plain.text(PROMPT, 10)
    assert generation.sequences == list(range(12))
    assert generation.opened is not None and len(generation.opened.ticket) == 16
    lengths = [commit.prefix_length for commit in generation.commits]
    assert lengths == [len(PROMPT) + i for i in range(1, 11)]
    assert generation.finished is not None
    assert generation.finished.reason == FinishReason.FINISH_REASON_LENGTH
    assert generation.finished.round_count == 9


async def test_a_repeated_prompt_reuses_all_but_its_last_page(bench: VerifyBench) -> None:
    first = await bench.generate(PROMPT, 4)
    second = await bench.generate(PROMPT, 4)
    other = await bench.generate(PROMPT, 4, cache_salt="another tenant")
    assert first.opened is not None and first.opened.cached_token_count == 0
    assert second.opened is not None and second.opened.cached_token_count == 48
    assert other.opened is not None and other.opened.cached_token_count == 0
    assert first.tokens == second.tokens == other.tokens


async def test_equal_seeds_write_equal_texts_and_other_seeds_others(bench: VerifyBench) -> None:
    texts = {
        seed: [(await bench.generate(PROMPT, 12, sampling=sampled(seed))).tokens for _ in range(3)]
        for seed in (1, 2, 3)
    }
    assert all(len({tuple(text) for text in same}) == 1 for same in texts.values())
    assert len({tuple(same[0]) for same in texts.values()}) == 3


async def test_a_replay_on_another_replica_writes_the_rest(
    bench: VerifyBench, tiny_model: Path
) -> None:
    whole = await bench.generate(PROMPT, 16, sampling=sampled(5))
    for kept in (1, 9, 15):
        rest = await bench.generate(
            PROMPT, 16, sampling=sampled(5), committed_tokens=whole.tokens[:kept]
        )
        assert rest.tokens == whole.tokens[kept:]
    ended = await bench.generate(PROMPT, 16, sampling=sampled(5), committed_tokens=whole.tokens)
    assert ended.tokens == []
    assert ended.finished is not None
    assert ended.finished.reason == FinishReason.FINISH_REASON_LENGTH


async def test_stop_ids_end_a_session_with_the_id_itself(bench: VerifyBench, plain: Plain) -> None:
    truth = plain.text(PROMPT, 20)
    stop = truth[5]
    end = truth.index(stop) + 1
    generation = await bench.generate(
        PROMPT, 0, stop=StopRule(max_tokens=20, stop_token_ids=[stop])
    )
    assert generation.tokens == truth[:end]
    assert generation.finished is not None
    assert generation.finished.reason == FinishReason.FINISH_REASON_STOP_ID
    assert generation.finished.stop_token == stop


async def test_prompt_and_budget_may_fill_the_context_to_the_last_token(
    bench: VerifyBench, plain: Plain
) -> None:
    prompt = [(3 * i) % 256 for i in range(500)]
    generation = await bench.generate(prompt, 12)
    assert generation.tokens == plain.text(prompt, 12)


@pytest.mark.parametrize(
    ("fields", "kind", "field"),
    [
        ({"prompt_tokens": []}, InvalidArgument, "prompt_tokens"),
        ({"prompt_tokens": [1, 320]}, InvalidArgument, "prompt_tokens"),
        ({"committed_tokens": [4000]}, InvalidArgument, "committed_tokens"),
        ({"stop": StopRule()}, InvalidArgument, "max_tokens"),
        ({"stop": StopRule(max_tokens=9, stop_token_ids=[999])}, InvalidArgument, "stop_token_ids"),
        ({"stop": StopRule(max_tokens=512)}, ContextLengthExceeded, "max_tokens"),
        ({"prompt_tokens": [1] * 512}, ContextLengthExceeded, "prompt_tokens"),
        ({"sampling": Sampling(temperature=-1)}, InvalidArgument, "temperature"),
        ({"sampling": Sampling(logit_bias={777: 1.0})}, InvalidArgument, "logit_bias"),
        ({"sampling": Sampling(threshold_acc=0.5)}, InvalidArgument, "threshold_acc"),
        ({"sampling": Sampling(rule=99)}, Unsupported, "rule"),  # type: ignore[arg-type]
        ({"tree_deadline_micros": 4_000_000_000}, InvalidArgument, "tree_deadline_micros"),
        ({"top_logprobs": 65}, InvalidArgument, "top_logprobs"),
    ],
)
async def test_a_bad_opening_is_refused_by_name_and_disturbs_nobody(
    bench: VerifyBench, fields: dict[str, Any], kind: type[GraftError], field: str
) -> None:
    running = asyncio.create_task(bench.generate(PROMPT, 30))
    error = await failure_of(bench, opening(**fields))
    assert type(error) is kind
    assert error.field == field
    assert len((await running).tokens) == 30


async def test_the_first_message_must_open(bench: VerifyBench) -> None:
    cancel = verify_pb2.GenerateRequest(cancel=verify_pb2.CancelSession())
    assert isinstance(await failure_of(bench, cancel), ProtocolBroken)


async def test_opening_twice_ends_the_session(bench: VerifyBench) -> None:
    assert isinstance(await failure_of(bench, opening(), opening()), ProtocolBroken)
    await eventually(bench.idle_pages)


async def test_a_huge_new_deadline_ends_the_session(bench: VerifyBench) -> None:
    deadline = verify_pb2.SetTreeDeadline(tree_deadline_micros=4_000_000_000)
    huge = verify_pb2.GenerateRequest(set_deadline=deadline)
    assert isinstance(await failure_of(bench, opening(), huge), InvalidArgument)


@pytest.mark.parametrize("how", ["message", "half-close"])
async def test_a_cancelled_session_finishes_as_such(bench: VerifyBench, how: str) -> None:
    call = bench.generate_call()
    await call.write(opening())
    responses = aiter(call)
    heard = [await anext(responses) for _ in range(4)]
    assert heard[-1].HasField("committed")
    if how == "message":
        await call.write(verify_pb2.GenerateRequest(cancel=verify_pb2.CancelSession(reason="x")))
    else:
        await call.done_writing()
    last = [message async for message in responses][-1]
    assert last.finished.reason == FinishReason.FINISH_REASON_CANCELLED
    await eventually(bench.idle_pages)


async def test_a_disconnect_cancels_within_a_round(bench: VerifyBench) -> None:
    call = bench.generate_call()
    await call.write(opening())
    await call.read()
    call.cancel()
    await eventually(bench.idle_pages)
    assert bench.metric("graft_sessions_finished_total", reason="cancelled") == 1


async def test_a_full_replica_says_when_to_come_back(tiny_model: Path) -> None:
    loader = Gated()
    async with running_verify(tiny_model, loader=loader, max_running=1, max_waiting=1) as bench:
        assert loader.gate is not None
        engine = bench.server.engine
        assert engine is not None
        loader.gate.close()
        calls = [bench.generate_call() for _ in range(2)]
        await calls[0].write(opening())
        await asyncio.to_thread(loader.gate.reached.wait, 5)
        await calls[1].write(opening())
        await eventually(lambda: engine.num_unapplied == 1)
        refused = asyncio.create_task(failure_of(bench, opening()))
        await eventually(lambda: engine.num_unapplied == 2)
        loader.gate.open.set()
        error = await refused
        assert isinstance(error, Overloaded)
        assert error.retry_after_s is not None and error.retry_after_s >= 1
        for call in calls:
            call.cancel()
        await eventually(bench.idle_pages)


async def test_a_waiting_session_is_served_when_a_place_comes_free(
    tiny_model: Path, plain: Plain
) -> None:
    async with running_verify(tiny_model, max_running=2) as bench:
        generations = await asyncio.gather(*(bench.generate([i, 7], 9) for i in range(7)))
    assert [g.tokens for g in generations] == [plain.text([i, 7], 9) for i in range(7)]


async def test_a_pool_too_small_for_all_serves_all_the_same(tiny_model: Path, plain: Plain) -> None:
    prompts = [[i] * 20 for i in range(6)]
    async with running_verify(tiny_model, kv_tokens=160) as bench:
        about = await bench.stub.Describe(verify_pb2.VerifyServiceDescribeRequest())
        assert about.context_length == 160
        generations = await asyncio.gather(*(bench.generate(p, 40) for p in prompts))
        assert bench.metric("graft_preemptions_total") > 0
        await eventually(bench.idle_pages)
    assert [g.tokens for g in generations] == [plain.text(p, 40) for p in prompts]


async def test_two_hundred_random_requests_leave_nothing_behind(bench: VerifyBench) -> None:
    chance = random.Random(7)
    gate = asyncio.Semaphore(12)

    async def one(number: int) -> None:
        async with gate:
            call = bench.generate_call()
            budget = chance.randint(1, 12)
            stop = StopRule(max_tokens=budget, ignore_eos=True)
            prompt = [number % 5] * chance.randint(1, 40)
            await call.write(opening(prompt_tokens=prompt, stop=stop))
            leave_after = chance.choice([None, None, 0, 1, 3])
            heard = 0
            async for message in call:
                heard += message.HasField("committed")
                if leave_after is not None and heard >= leave_after:
                    call.cancel()
                    return
            assert heard == budget

    results = await asyncio.gather(*(one(i) for i in range(200)), return_exceptions=True)
    failed = [r for r in results if isinstance(r, Exception)]
    assert not failed
    await eventually(bench.idle_pages)
    assert bench.server.engine is not None
    bench.server.engine.submit(lambda scheduler, _: scheduler.check())
    after = await bench.generate(PROMPT, 3)
    assert len(after.tokens) == 3
    engine = bench.server.engine
    assert engine.scheduler.num_sessions == 0


async def test_logprobs_have_one_entry_a_token(bench: VerifyBench) -> None:
    generation = await bench.generate(
        PROMPT, 6, want_logprobs=True, top_logprobs=5, want_prompt_logprobs=True
    )
    entries = [entry for commit in generation.commits for entry in commit.logprobs]
    assert [entry.token for entry in entries] == generation.tokens
    assert all(len(entry.top_tokens) == 5 for entry in entries)
    prompt = generation.commits[0].prompt_logprobs
    assert [entry.token for entry in prompt] == PROMPT[1:]


async def test_a_message_that_is_none_ends_its_session_only(bench: VerifyBench) -> None:
    other = asyncio.create_task(bench.generate([4, 5, 6], 50))
    async with open_channel(bench.address) as channel:
        call: Any = channel.stream_stream("/graft.v1.VerifyService/Generate")(timeout=20)
        await call.write(opening().SerializeToString())
        await call.read()
        await call.write(b"\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await call.read() is not grpc.aio.EOF:
                pass
    assert isinstance(error_from_call(caught.value), ProtocolBroken)
    assert len((await other).tokens) == 50
    await eventually(lambda: bench.server.engine.snapshot().num_running == 0)
