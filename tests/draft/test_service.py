"""Describe and Attend, as a gateway sees them."""

from __future__ import annotations

import asyncio

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from graft.common.channel import PROTOCOL_REVISION
from graft.common.errors import InvalidArgument
from graft.common.tier import Tier, tier_to_proto
from graft.draft.server import DraftServer
from graft.draft.settings import DraftSettings
from graft.testing.drafting import FakeGateway, drafting
from graft.testing.fake_verify import WAIT_S
from graft.testing.scripted import Hang, Scripted, failing, perfect, replay, wrong_vocab
from graft.v1.draft_pb2 import (
    AttendRequest,
    AttendSession,
    DraftServiceDescribeRequest,
    ReleaseSession,
    SetTier,
)
from graft.v1.error_reason_pb2 import ErrorReason
from graft.v1.tree_pb2 import Tier as TierMessage

LOOP = [1, 2, 3, 4, 5, 6, 1, 2, 3]


async def test_describe_names_the_proposers_and_their_default_tiers() -> None:
    async with drafting(num_draft_tokens=10) as it:
        described = await it.stub.Describe(DraftServiceDescribeRequest())
        assert described.protocol_revision == PROTOCOL_REVISION
        assert described.incarnation_id != 0
        (proposer,) = described.proposers
        assert proposer.name == "ngram"
        assert proposer.default_tier == TierMessage(
            proposer="ngram", num_steps=9, topk=10, num_draft_tokens=10
        )
        assert described.max_sessions == 1024
        assert described.session_count == 0


async def test_a_tier_without_a_name_means_the_first_proposer() -> None:
    async with drafting() as it:
        await it.gateway.attend(it.replica.address, 5, Tier("", 2, 1, 3))
        rounds = await it.replica.verify.stream()
        await rounds.next("joins")
        rounds.prefix(5, LOOP)
        assert (await it.gateway.next("attended")).tier.proposer == "ngram"
        await rounds.next("trees")


@pytest.mark.parametrize(
    ("tier", "reason"),
    [
        (TierMessage(proposer="oracle"), ErrorReason.ERROR_REASON_UNKNOWN_PROPOSER),
        (TierMessage(num_draft_tokens=99_999), ErrorReason.ERROR_REASON_INVALID_ARGUMENT),
    ],
)
async def test_a_tier_that_cannot_be_is_refused_and_disturbs_nobody(
    tier: TierMessage, reason: ErrorReason.ValueType
) -> None:
    async with drafting() as it:
        rounds, session = await it.joined(5, LOOP)
        await it.gateway.send(
            attend={"session_id": 6, "verify_address": it.replica.address, "tier": tier}
        )
        refused = await it.gateway.next("refused")
        assert (refused.session_id, refused.reason) == (6, reason)
        await rounds.next("trees")
        session.commit(4)
        assert (await rounds.next("trees")).session_id == 5


@pytest.mark.parametrize("address", ["", "203.0.113.7:7001"])
async def test_an_address_that_may_not_be_used_is_refused(address: str) -> None:
    async with drafting() as it:
        await it.gateway.attend(address, 5)
        refused = await it.gateway.next("refused")
        assert refused.reason == ErrorReason.ERROR_REASON_INVALID_ARGUMENT


async def test_more_sessions_than_there_are_places_are_refused() -> None:
    async with drafting(max_sessions=1) as it:
        await it.joined(5, LOOP)
        await it.gateway.attend(it.replica.address, 6)
        refused = await it.gateway.next("refused")
        assert (refused.session_id, refused.reason) == (6, ErrorReason.ERROR_REASON_OVERLOADED)


async def test_a_new_tier_holds_from_the_next_tree_on() -> None:
    async with drafting() as it:
        rounds, session = await it.joined(5, LOOP)
        assert len((await rounds.next("trees")).tokens) > 2
        await it.gateway.send(
            set_tier=SetTier(session_id=5, tier=tier_to_proto(Tier("ngram", 1, 1, 2)))
        )
        # Attending another session tells when the service has read the new tier.
        await it.gateway.attend(it.replica.address, 6)
        await rounds.next("joins")
        session.commit(4)
        assert len((await rounds.next("trees")).tokens) == 2


async def test_tier_zero_keeps_the_session_in_silence_and_drafts_again_when_told() -> None:
    async with drafting() as it:
        rounds, session = await it.joined(5, LOOP, Tier("ngram"))
        await it.gateway.attend(it.replica.address, 6)
        await rounds.next("joins")
        assert [name for name, _ in rounds.pending()] == []
        await it.gateway.send(
            set_tier=SetTier(session_id=5, tier=tier_to_proto(Tier("ngram", 1, 1, 2)))
        )
        assert (await rounds.next("trees")).prefix_length == 9
        session.commit(4)
        assert (await rounds.next("trees")).prefix_length == 10


async def test_a_released_session_leaves() -> None:
    async with drafting() as it:
        rounds, _ = await it.joined(5, LOOP)
        await it.gateway.send(release=ReleaseSession(session_id=5))
        assert (await rounds.next("leaves")).session_id == 5
        assert it.server.num_sessions == 0


@pytest.mark.parametrize("how", ["half-close", "cancel"])
async def test_the_end_of_the_stream_releases_its_sessions(how: str) -> None:
    async with drafting() as it:
        rounds, _ = await it.joined(5, LOOP)
        if how == "cancel":
            it.gateway.call.cancel()
        else:
            await it.gateway.call.done_writing()
            await it.gateway.ended()
        assert (await rounds.next("leaves")).session_id == 5
        assert it.server.num_sessions == 0


async def test_a_session_attended_anew_belongs_to_the_newest_stream() -> None:
    async with drafting() as it:
        rounds, _ = await it.joined(5, LOOP)
        await rounds.next("trees")
        newer = FakeGateway(it.stub.Attend())
        await newer.attend(it.replica.address, 5)
        assert (await rounds.next("leaves")).session_id == 5
        await rounds.next("joins")
        session = rounds.prefix(5, LOOP)
        assert (await newer.next("attended")).session_id == 5
        await rounds.next("trees")
        await it.gateway.call.done_writing()
        await it.gateway.ended()
        session.commit(4)
        assert (await rounds.next("trees")).prefix_length == 10
        newer.call.cancel()


async def test_status_comes_at_once_and_says_how_many_sessions_there_are() -> None:
    async with drafting() as it:
        assert (await it.gateway.next("status")).session_count == 0
        await it.joined(5, LOOP)
        status = await it.gateway.next("status")
        assert status.session_count == 1
        assert 0 <= status.busy_share <= 1


async def test_a_proposer_that_fails_costs_one_tree() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    drafter = failing(perfect(replay([text])), frozenset({1}))
    async with drafting([drafter]) as it:
        rounds, session = await it.joined(5, text[:3], Tier("failing", 2, 1, 3))
        await rounds.next("empties")
        session.commit(4)
        assert (await rounds.next("trees")).prefix_length == 4
        assert it.value("proposer_failures_total", proposer="failing") == 1


async def test_sessions_of_a_stuck_proposer_are_handed_back_until_it_returns() -> None:
    drafter = Hang()
    async with drafting([drafter], stall_s=0.2) as it:
        rounds, _ = await it.joined(5, LOOP, Tier("hang", 2, 1, 3))
        refused = await it.gateway.next("refused")
        assert (refused.session_id, refused.reason) == (5, ErrorReason.ERROR_REASON_STALLED)
        assert (await rounds.next("leaves")).session_id == 5
        await it.gateway.attend(it.replica.address, 6, Tier("hang", 2, 1, 3))
        assert (await it.gateway.next("refused")).reason == ErrorReason.ERROR_REASON_STALLED
        health = health_pb2_grpc.HealthStub(it.channel)
        watch = health.Watch(health_pb2.HealthCheckRequest(service="graft.v1.DraftService"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        drafter.released.set()
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
        # The service is willing again within the same step of its loop.
        await it.gateway.next("status")
        await it.gateway.attend(it.replica.address, 7, Tier("hang", 2, 1, 3))
        assert (await rounds.next("joins")).session_id == 7


async def test_stopping_refuses_what_is_left_and_ends_the_streams() -> None:
    async with drafting() as it:
        rounds, _ = await it.joined(5, LOOP)
        stopping = asyncio.create_task(it.server.stop(0))
        refused = await it.gateway.next("refused")
        assert (refused.session_id, refused.reason) == (5, ErrorReason.ERROR_REASON_DRAINING)
        await it.gateway.ended()
        await stopping
        await asyncio.wait_for(rounds.ended.wait(), WAIT_S)


async def test_draining_takes_no_new_session_and_waits_for_the_old_ones() -> None:
    async with drafting() as it:
        rounds, session = await it.joined(5, LOOP)
        await rounds.next("trees")
        stopping = asyncio.create_task(it.server.stop(30))
        await asyncio.sleep(0)
        await it.gateway.attend(it.replica.address, 6)
        refused = await it.gateway.next("refused")
        assert (refused.session_id, refused.reason) == (6, ErrorReason.ERROR_REASON_DRAINING)
        session.commit(4)
        assert (await rounds.next("trees")).prefix_length == 10
        await it.gateway.send(release=ReleaseSession(session_id=5))
        await asyncio.wait_for(stopping, WAIT_S)


async def test_a_message_that_is_none_ends_its_own_stream_only() -> None:
    async with drafting() as it:
        rounds, _ = await it.joined(5, LOOP)
        call = it.channel.stream_stream("/graft.v1.DraftService/Attend")(timeout=WAIT_S)
        await call.read()
        await call.write(b"\xff\xff")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            while await call.read() is not grpc.aio.EOF:
                pass
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert it.server.num_sessions == 1
        assert not rounds.ended.is_set()


async def test_wishes_stay_in_the_socket_while_their_refusals_are_not_read() -> None:
    num_wishes, name = 4000, "x" * 10_000
    async with drafting() as it:
        call = it.stub.Attend()

        async def flood() -> None:
            for session_id in range(num_wishes):
                wish = AttendSession(session_id=session_id, tier=TierMessage(proposer=name))
                await call.write(AttendRequest(attend=wish))

        def refused() -> float:
            return it.value("session_refusals_total", reason="unknown_proposer")

        flooding = asyncio.create_task(flood())
        before = -1.0
        while refused() > before:
            before = refused()
            await asyncio.sleep(0.3)
        assert 0 < before < num_wishes * 3 / 4
        heard = 0
        async with asyncio.timeout(WAIT_S):
            while heard < num_wishes:
                heard += (await call.read()).HasField("refused")
        await flooding
        call.cancel()


async def test_health_says_serving() -> None:
    async with drafting() as it:
        stub = health_pb2_grpc.HealthStub(it.channel)
        for service in ("", "graft.v1.DraftService"):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=service))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_a_port_in_use_is_named() -> None:
    async with drafting() as it:
        second = DraftServer(DraftSettings.load(None, {"port": it.port}))
        with pytest.raises(InvalidArgument, match=str(it.port)):
            await second.start()


@pytest.mark.parametrize("names", [["ngrma"], ["ngram", "ngram"]])
def test_proposers_that_are_not_there_or_there_twice_are_refused(names: list[str]) -> None:
    with pytest.raises(InvalidArgument, match="ngram"):
        DraftServer(DraftSettings.load(None, {"proposers": names}))


def test_proposers_for_different_vocabularies_do_not_go_together() -> None:
    one = wrong_vocab(lambda prefix: [], vocab_size=7)
    two = Scripted("other", lambda seat: None, vocab_size=8)
    with pytest.raises(InvalidArgument, match="vocabularies"):
        DraftServer(DraftSettings.load(None, {}), [one, two])
