"""Candidate trees by prefix: bounded, newest wins, dead ones leave."""

from __future__ import annotations

from graft.common.tree import chain
from graft.v1.tree_pb2 import TreeRefusal
from graft.verify.shelf import Proposal, Room, Shelf

CURRENT = (10, 111)


def proposal(token: int = 1) -> Proposal:
    return Proposal(chain([0, token]))


def test_a_tree_is_found_by_length_and_digest_only() -> None:
    shelf = Shelf(2)
    held = proposal()
    assert shelf.put(CURRENT, held, CURRENT) is None
    assert shelf.get(CURRENT) is held
    assert shelf.get((10, 112)) is None
    assert shelf.get((11, 111)) is None


def test_the_newest_tree_for_a_prefix_wins() -> None:
    shelf = Shelf(2)
    first, second = proposal(1), proposal(2)
    shelf.put(CURRENT, first, CURRENT)
    assert shelf.put(CURRENT, second, CURRENT) == (
        CURRENT,
        first,
        TreeRefusal.TREE_REFUSAL_REPEATED,
    )
    assert shelf.get(CURRENT) is second
    assert len(shelf) == 1


def test_the_oldest_tree_goes_when_the_shelf_is_full() -> None:
    shelf = Shelf(2)
    oldest = proposal()
    shelf.put((11, 1), oldest, CURRENT)
    shelf.put((11, 2), proposal(), CURRENT)
    assert shelf.put((11, 3), proposal(), CURRENT) == (
        (11, 1),
        oldest,
        TreeRefusal.TREE_REFUSAL_NO_CREDIT,
    )
    assert len(shelf) == 2


def test_the_tree_that_fits_now_is_never_the_one_to_go() -> None:
    shelf = Shelf(2)
    shelf.put(CURRENT, proposal(), CURRENT)
    shelf.put((11, 1), proposal(), CURRENT)
    shelf.put((11, 2), proposal(), CURRENT)
    assert shelf.get(CURRENT) is not None
    alone = Shelf(1)
    alone.put(CURRENT, proposal(), CURRENT)
    newcomer = proposal()
    assert alone.put((11, 1), newcomer, CURRENT) == (
        (11, 1),
        newcomer,
        TreeRefusal.TREE_REFUSAL_NO_CREDIT,
    )


def test_a_commit_drops_what_can_no_longer_come_true() -> None:
    shelf = Shelf(8)
    for name in [(10, 111), (11, 1), (12, 2), (12, 3), (13, 4)]:
        shelf.put(name, proposal(), CURRENT)
    dead = shelf.advance((12, 3))
    assert [name for name, _ in dead] == [(10, 111), (11, 1), (12, 2)]
    assert shelf.get((12, 3)) is not None
    assert shelf.get((13, 4)) is not None


def test_shelves_share_a_room_and_make_place_on_their_own() -> None:
    room = Room(3)
    first, second = Shelf(4, room), Shelf(4, room)
    first.put((11, 1), proposal(), CURRENT)
    first.put((12, 1), proposal(), CURRENT)
    second.put((11, 2), proposal(), CURRENT)
    gone = second.put((12, 2), proposal(), CURRENT)
    assert gone is not None and gone[0] == (11, 2)
    assert (len(first), len(second), room.num_held) == (2, 1, 3)


def test_a_tree_for_the_committed_prefix_finds_a_place_in_a_full_room() -> None:
    room = Room(1)
    first, second = Shelf(4, room), Shelf(4, room)
    first.put((11, 1), proposal(), CURRENT)
    assert second.put(CURRENT, proposal(), CURRENT) is None
    assert second.put((11, 2), proposal(), CURRENT) is not None


def test_a_session_that_ends_leaves_its_room() -> None:
    room = Room(2)
    shelf = Shelf(4, room)
    shelf.put(CURRENT, proposal(), CURRENT)
    shelf.put((11, 1), proposal(), CURRENT)
    shelf.advance((11, 1))
    assert room.num_held == 1
    shelf.clear()
    assert room.num_held == 0
