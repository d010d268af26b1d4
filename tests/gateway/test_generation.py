"""Sessions over real gRPC against scripted verify replicas: following, replaying, ending."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from graft.common.errors import Draining, NumericFailure, Overloaded
from graft.testing.front import PROMPT, events, running_front
from graft.testing.scripted_verify import Script
from graft.v1.verify_pb2 import FinishReason

SAY = list(b"abcdefghijklmnopqrstuvwxyz" * 20)
EOS = 258


def choice(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = body["choices"][0]
    return found


async def test_max_tokens_is_exact_for_every_width(tmp_path: Path) -> None:
    script = Script(SAY)
    async with running_front(tmp_path, [script]) as front:
        for width in range(1, 9):
            script.widths = (width,)
            for budget in range(1, 21):
                response = await front.complete(
                    max_tokens=budget, logprobs=0, return_token_ids=True
                )
                body = response.json()
                assert choice(body)["text"].encode() == bytes(SAY[:budget])
                assert choice(body)["finish_reason"] == "length"
                assert body["usage"]["completion_tokens"] == budget
                assert choice(body)["token_ids"] == SAY[:budget]
                assert len(choice(body)["logprobs"]["tokens"]) == budget


@pytest.mark.parametrize("size", [1, 2, 5])
async def test_a_stop_string_ends_the_text_at_every_index_of_a_block(
    tmp_path: Path, size: int
) -> None:
    end = 0

    async def pause(num_committed: int) -> None:
        if num_committed >= end:
            await asyncio.Event().wait()

    script = Script(SAY, widths=(8,), before_commit=pause)
    async with running_front(tmp_path, [script]) as front:
        for index in range(10):
            end = index + size
            stop = bytes(SAY[index : index + size]).decode()
            response = await front.complete(
                max_tokens=40, stop=stop, logprobs=1, return_token_ids=True
            )
            body = response.json()
            assert choice(body)["text"].encode() == bytes(SAY[:index])
            assert (choice(body)["finish_reason"], choice(body)["stop_reason"]) == ("stop", stop)
            assert choice(body)["token_ids"] == SAY[:index]
            assert body["usage"]["completion_tokens"] == index
            assert choice(body)["logprobs"]["tokens"] == [chr(token) for token in SAY[:index]]
            await front.verify.until(lambda: front.verify.num_open == 0)
        assert front.verify.cancelled == ["stop_string"] * 10


@pytest.mark.parametrize("kind", ["eos", "stop_id"])
async def test_an_end_id_stops_at_every_index_and_is_not_text(tmp_path: Path, kind: str) -> None:
    script = Script(SAY, widths=(6,))
    async with running_front(tmp_path, [script]) as front:
        for index in range(8):
            end = EOS if kind == "eos" else 90
            script.tokens = [*SAY[:index], end, *SAY]
            fields = {} if kind == "eos" else {"stop_token_ids": [90]}
            body = (await front.complete(max_tokens=30, return_token_ids=True, **fields)).json()
            assert choice(body)["token_ids"] == SAY[:index]
            assert body["usage"]["completion_tokens"] == index
            assert choice(body)["finish_reason"] == "stop"
            assert choice(body)["stop_reason"] == (None if kind == "eos" else 90)


async def test_the_earliest_of_stop_string_and_budget_wins(tmp_path: Path) -> None:
    async with running_front(tmp_path, [Script(SAY, widths=(6,))]) as front:
        early = (await front.complete(max_tokens=5, stop="d")).json()
        assert (choice(early)["text"], choice(early)["finish_reason"]) == ("abc", "stop")
        late = (await front.complete(max_tokens=5, stop="g")).json()
        assert (choice(late)["text"], choice(late)["finish_reason"]) == ("abcde", "length")


async def test_an_included_stop_is_text_and_counts(tmp_path: Path) -> None:
    async with running_front(tmp_path, [Script(SAY, widths=(6,))]) as front:
        fields = {"max_tokens": 20, "include_stop_str_in_output": True, "return_token_ids": True}
        by_string = (await front.complete(stop="cd", **fields)).json()
        assert (choice(by_string)["text"], by_string["usage"]["completion_tokens"]) == ("abcd", 4)
        by_id = (await front.complete(stop_token_ids=[SAY[3]], **fields)).json()
        assert (choice(by_id)["text"], choice(by_id)["token_ids"]) == ("abcd", SAY[:4])


async def test_acceptance_counts_only_what_was_kept(tmp_path: Path) -> None:
    async with running_front(tmp_path, [Script(SAY, widths=(4,), extra_nodes=1)]) as front:
        body = (await front.complete(max_tokens=40, stop="g")).json()
        record = body["metrics"]["speculative_decoding"]
        assert record["num_rounds"] == record["num_spec_steps"] == 2
        assert record["num_draft_tokens"] == 8
        assert record["num_accepted_draft_tokens"] == 5
        assert record["acceptance_histogram"] == {"2": 1, "3": 1}
        assert record["accepted_per_position"] == [2, 2, 1]
        assert record["mean_acceptance_length"] == 3.5


async def test_a_session_goes_on_at_another_replica_from_where_it_was_lost(tmp_path: Path) -> None:
    reached = asyncio.Event()

    async def hold(num_committed: int) -> None:
        if num_committed >= 9:
            reached.set()
            await asyncio.Event().wait()

    scripts = [Script(SAY, widths=(4,)), Script(SAY, widths=(4,))]
    async with running_front(tmp_path, scripts) as front:
        for script in scripts:
            script.before_commit = hold
        first, second = front.verifiers
        task = asyncio.create_task(front.complete(max_tokens=30, seed=5))
        await reached.wait()
        scripts[1 if first.opened else 0].before_commit = None
        await (first if first.opened else second).stop()
        body = (await task).json()
        assert choice(body)["text"].encode() == bytes(SAY[:30])
        assert body["usage"]["completion_tokens"] == 30
        opened = sorted(first.opened + second.opened, key=lambda one: len(one.committed_tokens))
        assert [len(one.committed_tokens) for one in opened] == [0, 9]
        assert [one.sampling.seed for one in opened] == [5, 5]
        text = (await front.client.get("/metrics")).text
        assert "graft_verify_replays_total 1.0" in text


async def test_a_restarted_replica_takes_its_sessions_up_again(tmp_path: Path) -> None:
    reached, go = asyncio.Event(), asyncio.Event()

    async def pause(num_committed: int) -> None:
        if num_committed >= 5:
            reached.set()
            await go.wait()

    async with running_front(tmp_path, [Script(SAY, before_commit=pause)]) as front:
        task = asyncio.create_task(
            front.stream("/v1/completions", prompt=PROMPT, max_tokens=20, seed=1)
        )
        await reached.wait()
        port = front.verify.port
        await front.verify.stop()
        await front.until(False)
        front.verify.script.before_commit = None
        front.verify.incarnation += 1
        await front.verify.start(port)
        chunks = await task
        text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert text.encode() == bytes(SAY[:20])
        reasons = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
        assert reasons == [None] * (len(chunks) - 1) + ["length"]
        assert list(front.verify.opened[1].committed_tokens) == SAY[:5]


@pytest.mark.parametrize(
    ("tokens", "reason"), [([*SAY[:4], EOS], "stop"), ([*SAY[:4], 90], "stop"), (SAY, "length")]
)
async def test_an_end_whose_message_was_lost_is_read_off_the_tokens(
    tmp_path: Path, tokens: list[int], reason: str
) -> None:
    async def crash() -> None:
        raise grpc.aio.UsageError("broken")

    async with running_front(tmp_path, [Script(tokens, before_finish=crash)]) as front:
        body = (await front.complete(max_tokens=9, stop_token_ids=[90])).json()
        assert choice(body)["text"].encode() == bytes(SAY[: 4 if reason == "stop" else 9])
        assert choice(body)["finish_reason"] == reason
        assert len(front.verify.opened) == 1


async def test_a_session_that_verify_gave_up_is_an_error(tmp_path: Path) -> None:
    script = Script(SAY, finish=FinishReason.FINISH_REASON_CANCELLED)
    async with running_front(tmp_path, [script]) as front:
        assert (await front.complete(max_tokens=4)).status_code == 500
        chunks = await front.stream("/v1/completions", prompt=PROMPT, max_tokens=4)
        assert chunks[-1]["error"]["code"] == "internal"


async def test_a_replica_that_drains_mid_session_is_replaced(tmp_path: Path) -> None:
    async def leave(num_committed: int) -> None:
        if num_committed == 5:
            script.before_commit = None
            raise Draining("going")

    script = Script(SAY, before_commit=leave)
    async with running_front(tmp_path, [script]) as front:
        body = (await front.complete(max_tokens=9)).json()
        assert choice(body)["text"].encode() == bytes(SAY[:9])
        assert list(front.verify.opened[1].committed_tokens) == SAY[:5]


async def test_no_replica_within_the_replay_time_is_one_error_object(tmp_path: Path) -> None:
    reached = asyncio.Event()

    async def pause(num_committed: int) -> None:
        if num_committed >= 5:
            reached.set()
            await asyncio.Event().wait()

    script = Script(SAY, before_commit=pause)
    async with running_front(tmp_path, [script], replay_timeout_s=0.3) as front:
        task = asyncio.create_task(front.stream("/v1/chat/completions", messages=[_user()]))
        await reached.wait()
        await front.verify.stop()
        chunks = await task
        assert chunks[-1]["error"]["code"] == "no_replica"
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])
        refused = await front.complete()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_replica")
        assert refused.headers["retry-after"] == "1"


async def test_a_stalled_session_is_an_error_and_lets_its_slot_go(tmp_path: Path) -> None:
    async def stall(num_committed: int) -> None:
        if num_committed >= 3:
            await asyncio.Event().wait()

    script = Script(SAY, before_commit=stall)
    async with running_front(tmp_path, [script], progress_timeout_s=0.2) as front:
        response = await front.complete(max_tokens=20)
        assert (response.status_code, response.json()["error"]["code"]) == (504, "stalled")
        await front.verify.until(lambda: front.verify.num_open == 0)
        assert front.server.gateway.num_in_flight == 0


async def test_a_full_replica_is_passed_by(tmp_path: Path) -> None:
    async def full(_: Any) -> None:
        raise Overloaded("full", retry_after_s=3)

    scripts = [Script(SAY, at_open=full), Script(SAY)]
    async with running_front(tmp_path, scripts) as front:
        for number in range(4):
            response = await front.client.post(
                "/v1/completions", json={"prompt": f"{number}", "max_tokens": 3}
            )
            assert response.status_code == 200
        scripts[1].at_open = full
        response = await front.complete()
        assert response.status_code == 503
        assert response.headers["retry-after"] == "3"
        assert "x-should-retry" not in response.headers


@pytest.mark.parametrize("skew", [1, -1])
async def test_messages_out_of_order_fail_that_request_only(tmp_path: Path, skew: int) -> None:
    script = Script(SAY, skew=skew)
    async with running_front(tmp_path, [script]) as front:
        broken = await front.complete(max_tokens=9)
        assert broken.status_code == 500
        assert broken.headers["x-should-retry"] == "false"
        script.skew = 0
        assert (await front.complete(max_tokens=9)).status_code == 200


async def test_an_error_of_the_target_is_an_error_of_the_request(tmp_path: Path) -> None:
    async def nan(num_committed: int) -> None:
        if num_committed >= 3:
            raise NumericFailure("the target produced NaN")

    async with running_front(tmp_path, [Script(SAY, before_commit=nan)]) as front:
        response = await front.complete(max_tokens=9)
        assert (response.status_code, response.json()["error"]["code"]) == (500, "numeric")
        chunks = await front.stream("/v1/completions", prompt=PROMPT, max_tokens=9)
        assert chunks[-1]["error"]["code"] == "numeric"


async def test_a_leaving_client_cancels_at_verify(tmp_path: Path) -> None:
    reached = asyncio.Event()

    async def pause(num_committed: int) -> None:
        if num_committed >= 3:
            reached.set()
            await asyncio.Event().wait()

    async with running_front(tmp_path, [Script(SAY, before_commit=pause)]) as front:
        for path in ("/v1/completions", "/v1/chat/completions"):
            for stream in (False, True):
                reached.clear()
                body = {"prompt": PROMPT, "messages": [_user()], "stream": stream, "n": 2}
                task = asyncio.create_task(front.client.post(path, json=body))
                await reached.wait()
                task.cancel()
                await asyncio.wait([task])
                await front.verify.until(lambda: front.verify.num_open == 0)
        # A call that is cut before its cancel was written ends by its half-close alone.
        assert "client_gone" in front.verify.cancelled
        assert set(front.verify.cancelled) <= {"client_gone", "half-close"}
        assert front.server.gateway.num_in_flight == 0


async def test_a_frozen_replica_loses_its_sessions_to_another(tmp_path: Path) -> None:
    reached = asyncio.Event()

    async def freeze(num_committed: int) -> None:
        if num_committed >= 3:
            reached.set()
            await asyncio.Event().wait()

    scripts = [Script(SAY, before_commit=freeze), Script(SAY, before_commit=freeze)]
    async with running_front(tmp_path, scripts, silent_s=0.2) as front:
        task = asyncio.create_task(front.complete(max_tokens=10))
        await reached.wait()
        frozen = 0 if front.verifiers[0].opened else 1
        scripts[1 - frozen].before_commit = None
        scripts[frozen].describe = {"last_progress_micros": 60_000_000}
        body = (await task).json()
        assert choice(body)["text"].encode() == bytes(SAY[:10])
        info = (await front.client.get("/server_info")).json()
        states = {one["address"]: one["state"] for one in info["verify"]}
        assert states[front.verifiers[frozen].address] == "stalled"


async def test_a_silent_replica_is_not_ready(tmp_path: Path) -> None:
    script = Script(SAY)
    async with running_front(tmp_path, [script], silent_s=0.2) as front:
        script.hang_describe = True
        await front.until(False)
        ready = (await front.client.get("/ready")).json()
        assert ready["state"] == "unavailable" and "no answer for" in ready["detail"]
        assert (await front.client.get("/health")).status_code == 503
        script.hang_describe = False
        await front.until(True)


async def test_choices_have_their_own_seeds_and_one_prompt(tmp_path: Path) -> None:
    async with running_front(tmp_path, [Script(SAY)]) as front:
        body = (await front.complete(n=3, max_tokens=4, seed=9)).json()
        assert [one["index"] for one in body["choices"]] == [0, 1, 2]
        assert body["usage"]["completion_tokens"] == 12
        assert body["usage"]["prompt_tokens"] == len(PROMPT)
        seeds = {opened.sampling.seed for opened in front.verify.opened}
        assert len(seeds) == 3 and 9 in seeds


async def test_unseeded_requests_get_seeds_of_their_own(tmp_path: Path) -> None:
    async with running_front(tmp_path, [Script(SAY)]) as front:
        for _ in range(20):
            await front.complete(max_tokens=1)
        assert len({opened.sampling.seed for opened in front.verify.opened}) == 20


async def test_draining_lets_streams_finish_and_takes_no_more(tmp_path: Path) -> None:
    reached, go = asyncio.Event(), asyncio.Event()

    async def pause(num_committed: int) -> None:
        if num_committed >= 3:
            reached.set()
            await go.wait()

    async with running_front(tmp_path, [Script(SAY, before_commit=pause)]) as front:
        task = asyncio.create_task(front.complete(max_tokens=10))
        await reached.wait()
        stopping = asyncio.create_task(front.server.stop(10))
        await front.until(False)
        assert (await front.client.get("/ready")).json()["state"] == "draining"
        refused = await front.complete()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        go.set()
        assert choice((await task).json())["text"].encode() == bytes(SAY[:10])
        await stopping


async def test_what_outlives_the_drain_ends_with_an_error_object(tmp_path: Path) -> None:
    reached = asyncio.Event()

    async def pause(num_committed: int) -> None:
        if num_committed >= 3:
            reached.set()
            await asyncio.Event().wait()

    async with running_front(tmp_path, [Script(SAY, before_commit=pause)]) as front:
        request = front.client.stream(
            "POST", "/v1/completions", json={"prompt": PROMPT, "stream": True}
        )
        async with request as response:
            await reached.wait()
            stopping = asyncio.create_task(front.server.stop(0.1))
            text = (await response.aread()).decode()
            await stopping
        assert events(text)[-1]["error"]["code"] == "draining"


async def test_the_queue_is_bounded(tmp_path: Path) -> None:
    reached = asyncio.Event()

    async def pause(num_committed: int) -> None:
        reached.set()
        await asyncio.Event().wait()

    async with running_front(tmp_path, [Script(SAY, before_commit=pause)], max_queue=2) as front:
        task = asyncio.create_task(front.complete(n=2))
        await reached.wait()
        refused = await front.complete()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert refused.headers["retry-after"] == "1"
        task.cancel()
        await asyncio.wait([task])


async def test_a_hundred_cancels_leave_nothing_behind(tmp_path: Path) -> None:
    async def pause(num_committed: int) -> None:
        if num_committed >= 3:
            await asyncio.Event().wait()

    async with running_front(tmp_path, [Script(SAY, before_commit=pause)]) as front:
        tasks = [asyncio.create_task(front.complete(max_tokens=9)) for _ in range(100)]
        await front.verify.until(lambda: len(front.verify.opened) == 100)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await front.verify.until(lambda: front.verify.num_open == 0)
        gateway = front.server.gateway
        await gateway.closings.drain()
        assert (gateway.num_in_flight, gateway.closings.num_pending) == (0, 0)
        assert all(replica.num_sessions == 0 for replica in gateway.verify)


async def test_an_unknown_status_is_a_lost_replica_and_gives_up_after_a_few(
    tmp_path: Path,
) -> None:
    async def crash(num_committed: int) -> None:
        raise grpc.aio.UsageError("broken")

    async with running_front(tmp_path, [Script(SAY, before_commit=crash)]) as front:
        response = await front.complete()
        assert response.status_code == 500
        assert len(front.verify.opened) == 6


def _user() -> dict[str, str]:
    return {"role": "user", "content": PROMPT}
