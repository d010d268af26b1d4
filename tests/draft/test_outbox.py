"""The outbox gathers what waits and never lets verify see it out of order."""

from __future__ import annotations

from graft.draft.outbox import Outbox
from graft.v1.tree_pb2 import CandidateTree


async def test_what_waits_goes_out_as_one_message() -> None:
    outbox = Outbox()
    outbox.join(1, b"a")
    outbox.join(2, b"b")
    outbox.tree(CandidateTree(session_id=3))
    outbox.empty(4, 10, 99)
    message = await outbox.next()
    assert [join.session_id for join in message.joins] == [1, 2]
    assert [tree.session_id for tree in message.trees] == [3]
    assert [(empty.session_id, empty.prefix_length) for empty in message.empties] == [(4, 10)]


async def test_a_session_that_leaves_and_joins_again_does_so_in_two_messages() -> None:
    outbox = Outbox()
    outbox.leave(1)
    outbox.join(1, b"a")
    first, second = await outbox.next(), await outbox.next()
    assert [left.session_id for left in first.leaves] == [1] and not first.joins
    assert [join.session_id for join in second.joins] == [1] and not second.leaves


async def test_a_tree_waits_for_its_session_to_have_joined() -> None:
    outbox = Outbox()
    outbox.tree(CandidateTree(session_id=1))
    outbox.join(2, b"b")
    outbox.tree(CandidateTree(session_id=2))
    messages = [await outbox.next(), await outbox.next()]
    assert [tree.session_id for tree in messages[0].trees] == [1]
    assert [tree.session_id for tree in messages[1].trees] == [2]
