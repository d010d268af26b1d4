"""A stream that goes on over a lane, where it may, and how it ends: against a replica by hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from graft.common.channel import VERIFY_MESSAGE_BYTES, open_channel
from graft.common.errors import NoReplica, ProtocolBroken, Stalled
from graft.common.lane import Lane
from graft.common.relay import Relay
from graft.common.tier import tier_to_proto
from graft.draft.carrier import carrier_for
from graft.testing.drafting import NGRAM, Drafting, drafting
from graft.testing.fake_verify import WAIT_S, FakeRounds, fake_replica, welcome
from graft.testing.verify_client import eventually
from graft.v1.draft_pb2 import AttendSession
from graft.v1.error_reason_pb2 import ErrorReason
from graft.v1.verify_pb2 import Lane as Offer
from graft.v1.verify_pb2 import RoundsRequest, RoundsResponse, SessionClosed
from graft.v1.verify_pb2_grpc import VerifyServiceStub
from graft.verify.lanes import Lanes

LOOP = [1, 2, 3, 4, 5, 6, 1, 2, 3]


@asynccontextmanager
async def offering(
    change: Callable[[Offer], None] = lambda offer: None, **settings: Any
) -> AsyncIterator[Drafting]:
    """A draft service, and a replica that offers every stream a lane, after a change to it."""
    async with drafting(**settings) as it:
        lanes = Lanes()
        await lanes.open(it.replica.port)

        def greet(rounds: FakeRounds) -> None:
            offer = lanes.offer(rounds.carry)
            assert offer is not None
            change(offer)
            rounds.send(welcome=welcome(), lane=offer)

        it.replica.verify.greeting = greet
        try:
            yield it
        finally:
            lanes.close()


async def refusal(it: Drafting) -> tuple[ErrorReason.ValueType, str]:
    """What a session is told when its stream ended."""
    refused = await it.gateway.next("refused")
    return refused.reason, refused.detail


async def test_a_stream_goes_on_over_the_lane_of_a_replica_dialled_itself() -> None:
    async with offering() as it:
        rounds, session = await it.joined(5, LOOP)
        tree = await rounds.next("trees")
        assert (tree.session_id, tree.prefix_length) == (5, 9)
        for token in (4, 5, 6):
            session.commit(token)
            tree = await rounds.next("trees")
            assert tree.prefix_digest == session.prefix.digest
        assert rounds.carried.is_set() and rounds.num_called == 0
        assert rounds.pending() == []
        assert it.value("trees_total", proposer="ngram") == 4
        assert it.value("sent_bytes_total") > 0


async def test_sessions_that_come_and_go_keep_their_order_over_a_lane() -> None:
    async with offering() as it:
        rounds, _ = await it.joined(5, LOOP)
        for session_id in range(6, 26):
            await it.gateway.attend(it.replica.address, session_id)
            assert (await rounds.next("joins")).session_id == session_id
            rounds.prefix(session_id, LOOP)
            await it.gateway.next("attended")
            await it.gateway.send(release={"session_id": session_id})
            assert (await rounds.next("leaves")).session_id == session_id
        assert rounds.num_called == 0


async def test_a_relay_is_not_passed_by() -> None:
    async with offering() as it:
        relay = Relay(it.replica.address)
        try:
            await it.gateway.attend(await relay.start(), 5)
            rounds = await it.replica.verify.stream()
            assert (await rounds.next("joins")).session_id == 5
            assert not rounds.carried.is_set() and rounds.num_called == 1
        finally:
            await relay.stop()


@pytest.mark.parametrize("path", ["/nowhere/lane", "/" + "long" * 100, "/dev/null", ""])
async def test_a_lane_that_cannot_be_reached_leaves_the_stream_as_it_is(path: str) -> None:
    def elsewhere(offer: Offer) -> None:
        offer.path = path

    async with offering(elsewhere) as it:
        rounds, session = await it.joined(5, LOOP)
        session.commit(4)
        await rounds.next("trees")
        assert not rounds.carried.is_set() and rounds.num_called >= 2


async def test_a_lane_that_is_refused_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graft.draft.carrier._LAST_WORDS_S", 0.05)

    def wrong(offer: Offer) -> None:
        offer.token = b"x" * 16

    async with offering(wrong) as it:
        await it.gateway.attend(it.replica.address, 5)
        await it.replica.verify.stream()
        assert (await refusal(it))[0] == ErrorReason.ERROR_REASON_NO_REPLICA
        rounds, session = await it.joined(6, LOOP)
        session.commit(4)
        await rounds.next("trees")
        assert not rounds.carried.is_set()
        assert it.replica.verify.num_streams == 2


async def test_a_lane_that_is_lost_alone_is_not_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("graft.draft.carrier._LAST_WORDS_S", 0.05)
    async with offering() as it:
        rounds, _ = await it.joined(5, LOOP)
        assert rounds.lane is not None
        rounds.lane.close()
        reason, detail = await refusal(it)
        assert reason == ErrorReason.ERROR_REASON_NO_REPLICA
        assert "lane" in detail
        await asyncio.wait_for(rounds.ended.wait(), WAIT_S)
        rounds, session = await it.joined(6, LOOP)
        session.commit(4)
        await rounds.next("trees")
        assert not rounds.carried.is_set() and rounds.num_called >= 2


@pytest.mark.parametrize("writing", [False, True])
async def test_why_a_replica_ends_a_stream_is_told_though_its_lane_goes_first(
    writing: bool,
) -> None:
    async with offering() as it:
        rounds, _ = await it.joined(5, LOOP)
        await rounds.next("trees")
        assert rounds.lane is not None
        rounds.lane.close()
        if writing:
            # What is to be sent meanwhile must not cut the call short of its status.
            await it.gateway.attend(it.replica.address, 6)
            await eventually(lambda: it.server.num_sessions == 2)
            for _ in range(20):
                await asyncio.sleep(0)
        rounds.end(Stalled("nobody read"))
        assert await refusal(it) == (ErrorReason.ERROR_REASON_STALLED, "nobody read")


async def test_what_came_over_the_lane_before_the_end_is_heard() -> None:
    async with offering() as it:
        rounds, _ = await it.joined(5, LOOP)
        await rounds.next("trees")
        for session_id in range(6, 200):
            rounds.send(closed=[SessionClosed(session_id=session_id)])
        rounds.send(closed=[SessionClosed(session_id=5)])
        rounds.end()
        await eventually(lambda: it.value("link_losses_total") == 1)
        assert it.value("session_refusals_total", reason="no_replica") == 0
        assert it.server.num_sessions == 0


@pytest.mark.parametrize("fault", ["gap", "no message", "too long", "on the stream"])
async def test_what_breaks_the_order_over_a_lane_is_told(fault: str) -> None:
    async with offering() as it:
        rounds, _ = await it.joined(5, LOOP)
        await rounds.next("trees")
        assert rounds.lane is not None
        match fault:
            case "gap":
                rounds.send(sequence=7)
            case "no message":
                rounds.lane.put(b"\xff\xff\xff")
            case "too long":
                rounds.lane.put(bytes(VERIFY_MESSAGE_BYTES + 1))
            case "on the stream":
                lane, rounds.lane = rounds.lane, None
                rounds.send()
                lane.close()
        reason, detail = await refusal(it)
        assert reason == ErrorReason.ERROR_REASON_PROTOCOL
        words = {
            "gap": "expected 2",
            "no message": "no message",
            "too long": "the most is",
            "on the stream": "has a lane",
        }
        assert words[fault] in detail
        await asyncio.wait_for(rounds.ended.wait(), WAIT_S)
        # Only a lane that was to blame is given up.
        rounds, _ = await it.joined(6, LOOP)
        assert rounds.carried.is_set()


async def test_a_replica_that_is_back_offers_a_lane_that_is_taken() -> None:
    async with offering() as it:
        await it.joined(5, LOOP)
        await it.replica.stop()
        assert (await refusal(it))[0] == ErrorReason.ERROR_REASON_NO_REPLICA
        await it.replica.start()
        rounds, _ = await it.joined(6, LOOP)
        assert (await rounds.next("trees")).session_id == 6
        assert rounds.carried.is_set()


async def test_a_replica_that_does_not_read_its_lane_is_given_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("graft.draft.link._WRITE_TIMEOUT_S", 0.1)
    async with offering() as it:
        rounds, _ = await it.joined(5, LOOP)
        assert rounds.lane is not None
        rounds.lane.pause()
        long = AttendSession(
            session_id=6,
            ticket=bytes(2_000_000),
            verify_address=it.replica.address,
            tier=tier_to_proto(NGRAM),
        )
        await it.gateway.send(attend=long)
        assert (await refusal(it))[0] == ErrorReason.ERROR_REASON_NO_REPLICA
        await asyncio.wait_for(rounds.ended.wait(), WAIT_S)


async def test_a_draft_service_that_stops_ends_both() -> None:
    async with offering() as it:
        rounds, _ = await it.joined(5, LOOP)
        lane = rounds.lane
        assert lane is not None
        await it.server.stop(0)
        async with asyncio.timeout(WAIT_S):
            assert isinstance(await lane.lost, NoReplica)
            await rounds.ended.wait()


async def test_what_goes_wrong_on_taking_a_message_ends_the_stream() -> None:
    """Not one of our own errors: the loop would swallow it."""
    gone = KeyError("gone")

    def take(message: RoundsResponse) -> None:
        raise gone

    lanes, ends = Lanes(), asyncio.Queue[Lane]()
    await lanes.open(1)
    offer = lanes.offer(ends.put_nowait)
    assert offer is not None
    async with fake_replica() as replica, open_channel(replica.address) as channel:
        offer.port = replica.port
        stub: Any = VerifyServiceStub(channel)
        call = stub.Rounds()
        await call.write(RoundsRequest())
        carrier = await carrier_for(
            call, replica.address, RoundsResponse(welcome=welcome(), lane=offer), take
        )
        assert carrier is not None
        await replica.verify.stream()
        assert isinstance(await call.read(), RoundsResponse)
        far = await ends.get()
        far.put(RoundsResponse(sequence=1).SerializeToString())
        far.put(RoundsResponse(sequence=2).SerializeToString())
        with pytest.raises(KeyError) as caught:
            await asyncio.wait_for(carrier.follow(), WAIT_S)
        assert caught.value is gone
        assert not carrier.put(RoundsRequest())
        with pytest.raises(NoReplica):
            await carrier.write(RoundsRequest())
        far.close()
    lanes.close()


async def test_the_status_of_a_call_that_fails_first_is_told() -> None:
    async with offering() as it:
        rounds, _ = await it.joined(5, LOOP)
        rounds.end(ProtocolBroken("that was wrong"))
        assert await refusal(it) == (ErrorReason.ERROR_REASON_PROTOCOL, "that was wrong")
