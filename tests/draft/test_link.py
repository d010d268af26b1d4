"""One Rounds stream on a real socket, against a verify replica played by the test."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from graft.common.channel import PROTOCOL_REVISION
from graft.common.tier import Tier
from graft.common.tree import Tree, TreeLimits
from graft.common.tree_codec import decode
from graft.draft.proposers.base import chain
from graft.testing.drafting import Drafting, drafting
from graft.testing.fake_verify import FakeRounds, welcome
from graft.testing.scripted import Scripted, double, wrong_vocab
from graft.testing.verify_client import eventually
from graft.v1.draft_pb2 import DraftServiceDescribeRequest
from graft.v1.error_reason_pb2 import ErrorReason
from graft.v1.tree_pb2 import CandidateTree, TreeRefusal
from graft.v1.verify_pb2 import SessionClosed, TreeRefused

LOOP = [1, 2, 3, 4, 5, 6, 1, 2, 3]


def read(message: CandidateTree, root: int) -> Tree:
    return decode(root, message.shape, message.tokens, message.scores, TreeLimits(16, 8, 320))


async def test_hello_names_the_service_and_joins_show_the_ticket() -> None:
    async with drafting() as it:
        await it.gateway.attend(it.replica.address, 5)
        rounds = await it.replica.verify.stream()
        described = await it.stub.Describe(DraftServiceDescribeRequest())
        assert rounds.hello.protocol_revision == PROTOCOL_REVISION
        assert rounds.hello.incarnation_id == described.incarnation_id
        join = await rounds.next("joins")
        assert (join.session_id, join.ticket) == (5, b"ticket")


async def test_every_commit_is_answered_by_one_tree_that_names_its_prefix() -> None:
    async with drafting() as it:
        rounds, session = await it.joined(5, LOOP)
        tree = await rounds.next("trees")
        assert (tree.prefix_length, tree.prefix_digest) == (9, session.prefix.digest)
        assert read(tree, 3).tokens.tolist()[:5] == [3, 4, 5, 6, 1]
        for tokens in ((4, 5), (6,), (1, 2, 3)):
            session.commit(*tokens)
            tree = await rounds.next("trees")
            assert (tree.session_id, tree.prefix_length) == (5, len(session.prefix))
            assert tree.prefix_digest == session.prefix.digest
        assert rounds.pending() == []
        assert it.value("trees_total", proposer="ngram") == 4
        assert it.value("committed_tokens_total") == 6


async def test_a_prefix_without_a_match_gets_an_empty_proposal() -> None:
    async with drafting() as it:
        rounds, session = await it.joined(5, [1, 2, 3])
        empty = await rounds.next("empties")
        assert (empty.session_id, empty.prefix_length) == (5, 3)
        assert empty.prefix_digest == session.prefix.digest


async def test_one_stream_carries_all_sessions_of_a_replica() -> None:
    async with drafting() as it:
        rounds, _ = await it.joined(1, LOOP)
        await it.gateway.attend(it.replica.address, 2)
        await rounds.next("joins")
        rounds.prefix(2, [7, 8, 9, 7, 8])
        trees = {
            tree.session_id: tree
            for tree in (await rounds.next("trees"), await rounds.next("trees"))
        }
        assert read(trees[1], 3).tokens[1] == 4
        assert read(trees[2], 8).tokens[1] == 9
        assert it.replica.verify.num_streams == 1


async def test_the_tier_is_cut_to_what_verify_allows_and_no_tree_exceeds_it() -> None:
    async with drafting() as it:
        await it.gateway.attend(it.replica.address, 5, Tier("ngram", 60, 4, 64, lookahead=3))
        rounds = await it.replica.verify.stream()
        await rounds.next("joins")
        rounds.prefix(5, [*range(20, 60), *range(20, 30)])
        tier = (await it.gateway.next("attended")).tier
        assert (tier.num_steps, tier.num_draft_tokens, tier.lookahead) == (8, 16, 1)
        assert read(await rounds.next("trees"), 29).max_depth == 8


async def test_a_join_that_verify_refuses_is_told_with_its_reason() -> None:
    async with drafting() as it:
        await it.gateway.attend(it.replica.address, 5)
        rounds = await it.replica.verify.stream()
        await rounds.next("joins")
        rounds.send(closed=[SessionClosed(session_id=5, error=ErrorReason.ERROR_REASON_BAD_TICKET)])
        refused = await it.gateway.next("refused")
        assert (refused.session_id, refused.reason) == (5, ErrorReason.ERROR_REASON_BAD_TICKET)
        assert it.server.num_sessions == 0


async def test_a_session_that_verify_closes_is_forgotten() -> None:
    async with drafting() as it:
        rounds, _ = await it.joined(5, LOOP)
        await rounds.next("trees")
        rounds.send(closed=[SessionClosed(session_id=5)])
        await it.gateway.attend(it.replica.address, 6)
        assert (await rounds.next("joins")).session_id == 6
        await eventually(lambda: it.server.num_sessions == 1)
        assert rounds.pending() == []


@pytest.mark.parametrize("fault", ["digest", "length"])
async def test_a_broken_chain_makes_the_session_leave_and_join_again(fault: str) -> None:
    async with drafting() as it:
        rounds, session = await it.joined(5, LOOP)
        await rounds.next("trees")
        if fault == "digest":
            session.commit(4, digest=1)
        else:
            session.prefix.extend([9])
            session.commit(4)
        assert (await rounds.next("leaves")).session_id == 5
        # What is under way when a session leaves is of no use to it.
        session.commit(5)
        assert (await rounds.next("joins")).ticket == b"ticket"
        session = rounds.prefix(5, [*LOOP, 4])
        tree = await rounds.next("trees")
        assert (tree.prefix_length, tree.prefix_digest) == (10, session.prefix.digest)
        assert it.value("rejoins_total") == 1


async def test_a_chain_that_breaks_again_and_again_is_given_up() -> None:
    async with drafting() as it:
        rounds, session = await it.joined(5, LOOP)
        for _ in range(3):
            session.commit(4, digest=1)
            await rounds.next("joins")
            session = rounds.prefix(5, LOOP)
        session.commit(4, digest=1)
        refused = await it.gateway.next("refused")
        assert refused.reason == ErrorReason.ERROR_REASON_PROTOCOL
        assert it.server.num_sessions == 0


async def test_a_gap_in_the_numbers_ends_the_stream_and_its_sessions() -> None:
    async with drafting() as it:
        rounds, _ = await it.joined(5, LOOP)
        rounds.send(sequence=7)
        refused = await it.gateway.next("refused")
        assert refused.reason == ErrorReason.ERROR_REASON_PROTOCOL
        assert "expected 2" in refused.detail
        await asyncio.wait_for(rounds.ended.wait(), 10)


async def test_a_lost_replica_costs_its_sessions_and_is_found_again_when_it_is_back() -> None:
    async with drafting() as it:
        await it.joined(5, LOOP)
        await it.replica.stop()
        refused = await it.gateway.next("refused")
        assert (refused.session_id, refused.reason) == (5, ErrorReason.ERROR_REASON_NO_REPLICA)
        await it.replica.start()
        rounds, _ = await it.joined(6, LOOP)
        assert (await rounds.next("trees")).session_id == 6


async def test_other_replicas_do_not_notice_a_lost_one() -> None:
    async with drafting() as one, drafting() as other:
        rounds, session = await one.joined(5, LOOP)
        await rounds.next("trees")
        await one.gateway.attend(other.replica.address, 6)
        lost = await other.replica.verify.stream()
        await lost.next("joins")
        lost.prefix(6, LOOP)
        assert (await one.gateway.next("attended")).session_id == 6
        await other.replica.stop()
        assert (await one.gateway.next("refused")).session_id == 6
        session.commit(4)
        assert (await rounds.next("trees")).prefix_length == 10


async def test_a_session_attended_before_the_replica_is_up_joins_when_it_is() -> None:
    async with drafting() as it:
        await it.replica.stop()
        await it.gateway.attend(it.replica.address, 5)
        await it.gateway.next("status")
        await it.replica.start()
        rounds = await it.replica.verify.stream()
        assert (await rounds.next("joins")).session_id == 5


async def test_a_replica_that_never_comes_is_told_within_the_time_allowed() -> None:
    async with drafting(connect_timeout_s=0.3) as it:
        await it.replica.stop()
        await it.gateway.attend(it.replica.address, 5)
        refused = await it.gateway.next("refused")
        assert refused.reason == ErrorReason.ERROR_REASON_NO_REPLICA
        assert it.replica.address in refused.detail


async def test_an_address_where_nobody_answers_is_not_dialled_for_ever() -> None:
    dialled = 0

    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal dialled
        dialled += 1
        writer.close()

    other = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    address = f"127.0.0.1:{other.sockets[0].getsockname()[1]}"
    async with other, drafting(connect_timeout_s=0.3) as it:
        await it.gateway.attend(address, 5)
        await it.gateway.next("refused")
        await asyncio.sleep(0.3)
        known = dialled
        assert known
        await asyncio.sleep(1.5)
        assert dialled == known


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"protocol_revision": 9}, "revision 9"),
        ({"vocab_size": 321}, "321"),
        ({"tokenizer_digest": "bb" * 32}, "bbbbbbbbbbbb"),
        ({"max_nodes": 0}, "max_nodes"),
    ],
)
async def test_a_replica_that_does_not_fit_is_refused_in_words(
    changes: dict[str, Any], words: str
) -> None:
    drafter = wrong_vocab(lambda prefix: [], vocab_size=320, tokenizer_digest="")
    if "tokenizer_digest" in changes:
        drafter = wrong_vocab(lambda prefix: [], vocab_size=320, tokenizer_digest="aa" * 32)
    async with drafting([drafter]) as it:
        it.replica.verify.greeting = lambda rounds: rounds.send(welcome=welcome(**changes))
        await it.gateway.attend(it.replica.address, 5, Tier("wrong_vocab", 2, 1, 3))
        refused = await it.gateway.next("refused")
        assert refused.reason == ErrorReason.ERROR_REASON_MISMATCH
        assert words in refused.detail


async def test_a_vocabulary_that_is_only_padded_differently_fits() -> None:
    drafter = wrong_vocab(lambda prefix: [], vocab_size=300, tokenizer_digest="aa" * 32)
    async with drafting([drafter]) as it:
        await it.joined(5, LOOP, Tier("wrong_vocab", 2, 1, 3))


async def test_a_first_message_without_a_welcome_is_no_pairing() -> None:
    async with drafting() as it:
        it.replica.verify.greeting = lambda rounds: rounds.send()
        await it.gateway.attend(it.replica.address, 5)
        assert (await it.gateway.next("refused")).reason == ErrorReason.ERROR_REASON_PROTOCOL


async def test_a_replica_that_stays_silent_is_given_up() -> None:
    async with drafting(connect_timeout_s=0.3) as it:
        it.replica.verify.greeting = lambda rounds: None
        await it.gateway.attend(it.replica.address, 5)
        assert (await it.gateway.next("refused")).reason == ErrorReason.ERROR_REASON_NO_REPLICA


async def test_refusals_are_counted_by_reason() -> None:
    async with drafting() as it:
        rounds, session = await it.joined(5, LOOP)
        await rounds.next("trees")
        rounds.send(
            refusals=[
                TreeRefused(session_id=5, prefix_length=9, refusal=TreeRefusal.TREE_REFUSAL_STALE)
            ]
        )
        session.commit(4)
        await rounds.next("trees")
        assert it.value("tree_refusals_total", reason="stale") == 1


async def test_what_a_drafter_wrote_itself_is_sent_as_it_is() -> None:
    async with drafting([double(lambda prefix: [4, 5])]) as it:
        rounds, session = await it.joined(5, LOOP, Tier("double", 2, 1, 3))
        first, second = await rounds.next("trees"), await rounds.next("trees")
        assert first == second
        assert first.prefix_digest == session.prefix.digest


async def test_a_tree_that_is_ready_after_the_next_commit_is_not_sent() -> None:
    """The engine works on a prefix while verify, tired of waiting, commits the next one."""
    working, go = threading.Event(), threading.Event()

    def guess(seat: Any) -> Any:
        if len(seat.mirror.prefix) == 9:
            working.set()
            assert go.wait(10)
        return chain(seat, [4])

    async with drafting([Scripted("gated", guess)]) as it:
        rounds, session = await it.joined(5, LOOP, Tier("gated", 2, 1, 3))
        assert await asyncio.to_thread(working.wait, 10)
        session.commit(4)
        await _seen(it, rounds)
        go.set()
        # Verify hears that it is here, and so how long to wait for the next one.
        assert (await rounds.next("empties")).prefix_length == 9
        assert (await rounds.next("trees")).prefix_length == 10
        assert it.value("withheld_total", reason="stale") == 1


async def _seen(it: Drafting, rounds: FakeRounds) -> None:
    """Returns once the service has read all that was sent: it says so of a session sent later."""
    await it.gateway.attend(it.replica.address, 99, Tier())
    await rounds.next("joins")
    rounds.prefix(99, [1])
    await it.gateway.next("attended")
