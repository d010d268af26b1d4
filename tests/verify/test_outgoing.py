"""What waits for one draft service: batched, in order, bounded."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from graft.common.errors import Stalled
from graft.common.sampling import Sampling
from graft.v1 import verify_pb2
from graft.v1.tree_pb2 import TreeRefusal
from graft.verify.events import (
    ClosedTold,
    CommitTold,
    FeaturesTold,
    PrefixTold,
    RefusalTold,
    Rows,
)
from graft.verify.outgoing import MAX_AGE_S, MAX_EVENTS, MAX_FEATURE_BYTES, Outgoing


def prefix(session_id: int) -> PrefixTold:
    tokens = np.asarray([1, 2], np.int32)
    return PrefixTold(1, session_id, tokens, 1, Sampling(seed=9), 5, "")


def commit(session_id: int, token: int = 3) -> CommitTold:
    return CommitTold(1, session_id, (token,), 3, 77, 0, 0)


async def test_what_happened_meanwhile_goes_out_in_one_message() -> None:
    outgoing = Outgoing()
    for event in (prefix(1), commit(1), commit(2), commit(1), ClosedTold(1, 2)):
        assert outgoing.add(event, 0.0)
    message = await outgoing.next()
    assert message is not None
    assert [told.session_id for told in message.prefixes] == [1]
    assert [told.session_id for told in message.commits] == [1, 2, 1]
    assert [told.session_id for told in message.closed] == [2]


async def test_a_prefix_after_a_commit_of_its_session_begins_a_new_message() -> None:
    outgoing = Outgoing()
    refusal = RefusalTold(1, 2, 3, TreeRefusal.TREE_REFUSAL_STALE)
    for event in (commit(1), prefix(1), refusal, commit(2)):
        outgoing.add(event, 0.0)
    parts = []
    for _ in range(3):
        message = await outgoing.next()
        assert message is not None
        parts.append((len(message.prefixes), len(message.commits), len(message.refusals)))
    assert parts == [(0, 1, 0), (1, 0, 1), (0, 1, 0)]


async def test_messages_are_numbered_from_the_welcome_on() -> None:
    outgoing = Outgoing()
    about = verify_pb2.VerifyServiceDescribeResponse(vocab_size=5)
    assert outgoing.welcome(about).sequence == 0
    outgoing.add(commit(1), 0.0)
    message = await outgoing.next()
    assert message is not None and message.sequence == 1
    assert not message.HasField("welcome")


async def test_next_waits_for_something_to_say() -> None:
    outgoing = Outgoing()
    waiting = asyncio.create_task(outgoing.next())
    await asyncio.sleep(0)
    assert not waiting.done()
    outgoing.add(commit(1), 0.0)
    assert (await waiting) is not None


async def test_a_peer_that_does_not_read_is_dropped_by_age() -> None:
    outgoing = Outgoing()
    assert outgoing.add(commit(1), 100.0)
    assert outgoing.add(commit(1), 100.0 + MAX_AGE_S)
    assert not outgoing.add(commit(1), 100.1 + MAX_AGE_S)
    with pytest.raises(Stalled):
        await outgoing.next()


async def test_a_peer_that_does_not_read_is_dropped_by_count() -> None:
    outgoing = Outgoing()
    assert all(outgoing.add(commit(1), 0.0) for _ in range(MAX_EVENTS))
    assert not outgoing.add(commit(1), 0.0)
    assert outgoing.add(commit(1), 0.0), "a dropped stream takes no more notice"
    with pytest.raises(Stalled):
        await outgoing.next()


async def test_a_closed_stream_ends_after_what_waits() -> None:
    outgoing = Outgoing()
    outgoing.add(commit(1), 0.0)
    outgoing.close()
    assert await outgoing.next() is not None
    assert await outgoing.next() is None


def features(start: int, num_bytes: int) -> FeaturesTold:
    return FeaturesTold(1, 1, Rows(start, 1, bytes(num_bytes)))


async def test_features_come_before_the_prefix_and_commits_of_their_session() -> None:
    outgoing = Outgoing()
    for event in (features(0, 8), prefix(1), commit(1), features(1, 8), commit(1)):
        outgoing.add(event, 0.0)
    first, second = await outgoing.next(), await outgoing.next()
    assert first is not None and second is not None
    assert [len(part) for part in (first.features, first.prefixes, first.commits)] == [1, 1, 1]
    assert [len(part) for part in (second.features, second.prefixes, second.commits)] == [1, 0, 1]


async def test_many_features_go_out_in_several_messages_below_the_cap() -> None:
    outgoing = Outgoing()
    for start in range(40):
        assert outgoing.add(features(start, 1 << 20), 0.0)
    sizes: list[int] = []
    starts: list[int] = []
    while len(starts) < 40:
        message = await outgoing.next()
        assert message is not None
        sizes.append(message.ByteSize())
        starts += [sent.rows.start_position for sent in message.features]
    assert starts == list(range(40))
    assert max(sizes) < 5 << 20


async def test_a_peer_that_leaves_too_many_features_unread_is_of_no_use() -> None:
    outgoing = Outgoing()
    size = MAX_FEATURE_BYTES // 4
    assert all(outgoing.add(features(start, size), 0.0) for start in range(4))
    assert await outgoing.next() is not None
    assert outgoing.add(features(4, size), 0.0)
    assert outgoing.add(features(5, size + 1), 0.0)
    assert not outgoing.add(features(6, 1), 0.0)
    with pytest.raises(Stalled):
        await outgoing.next()
