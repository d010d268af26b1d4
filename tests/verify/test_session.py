"""When a session's next round may start, and what its drafters' silence costs."""

from __future__ import annotations

import numpy as np

from graft.common.tree import chain
from graft.testing.shadow import new_session, right_tree
from graft.v1.tree_pb2 import TreeRefusal
from graft.v1.verify_pb2 import PlainReason
from graft.verify.session import Session
from graft.verify.shelf import Proposal


def decoding(*, speculate: bool = True, deadline_s: float = 0.05) -> Session:
    """A session whose first token was just decided, at time 100, with one drafter joined."""
    session = new_session(7, [1, 2, 3], speculate=speculate, deadline_s=deadline_s, max_tokens=50)
    if speculate:
        session.streams.add(1)
    session.commit((4,), 0, 100.0)
    return session


def offer(session: Session, tokens: list[int], now: float, depth: int = 2) -> object:
    session_prefix = new_session(0, tokens).name
    proposal = Proposal(right_tree(tokens, depth), arrived=now, stream=1)
    return session.offer(session_prefix, proposal, now)


def tokens_of(session: Session) -> list[int]:
    return list(np.asarray(session.prefix.tokens).tolist())


def test_a_round_waits_for_its_tree_until_the_deadline() -> None:
    session = decoding()
    assert session.turn(100.049) is None
    turn = session.turn(100.05)
    assert turn is not None
    assert (turn.tree, turn.plain_reason) == (None, PlainReason.PLAIN_REASON_LATE)
    assert turn.decided == 100.05


def test_a_fitting_tree_starts_the_round_at_once() -> None:
    session = decoding()
    assert offer(session, tokens_of(session), 100.01) is None
    turn = session.turn(100.01)
    assert turn is not None and turn.tree is not None
    assert turn.tree.num_nodes == 3
    assert turn.decided == 100.01


def test_an_empty_proposal_ends_the_wait() -> None:
    session = decoding()
    session.offer(session.name, Proposal(None, arrived=100.01, stream=1), 100.01)
    turn = session.turn(100.01)
    assert turn is not None
    assert turn.plain_reason == PlainReason.PLAIN_REASON_EMPTY


def test_a_drafter_that_is_behind_is_not_waited_for_until_it_shows_up() -> None:
    session = decoding()
    behind = Proposal(None, behind=True, arrived=100.01, stream=1)
    session.offer(session.name, behind, 100.01)
    for now in (100.01, 100.03, 100.05):
        turn = session.turn(now)
        assert turn is not None
        assert turn.plain_reason == PlainReason.PLAIN_REASON_EMPTY
        passed = session.name
        session.commit((5,), 0, now)
    session.offer(passed, Proposal(None, arrived=100.06, stream=1), 100.06)
    assert session.turn(100.06) is None


def test_a_refused_tree_ends_the_wait() -> None:
    session = decoding()
    session.offer(session.name, Proposal(None, refused=True, stream=1), 100.01)
    turn = session.turn(100.01)
    assert turn is not None
    assert turn.plain_reason == PlainReason.PLAIN_REASON_REFUSED


def test_a_refused_tree_does_not_displace_a_good_one() -> None:
    session = decoding()
    offer(session, tokens_of(session), 100.01)
    session.offer(session.name, Proposal(None, refused=True, stream=1), 100.02)
    turn = session.turn(100.02)
    assert turn is not None and turn.tree is not None


def test_a_silent_drafter_costs_one_deadline_then_nothing() -> None:
    session = decoding()
    turn = session.turn(100.05)
    assert turn is not None and session.give_up(turn)
    session.commit((5,), 0, 100.06)
    turn = session.turn(100.06)
    assert turn is not None
    assert turn.plain_reason == PlainReason.PLAIN_REASON_LATE
    assert not session.give_up(turn)


def test_a_tree_that_was_in_time_for_a_passed_prefix_earns_the_wait_again() -> None:
    session = decoding()
    turn = session.turn(100.05)
    assert turn is not None and session.give_up(turn)
    session.commit((5,), 0, 100.06)
    former = tokens_of(session)
    session.commit((6,), 0, 100.07)
    dropped = offer(session, former, 100.08)
    assert isinstance(dropped, tuple) and dropped[2] == TreeRefusal.TREE_REFUSAL_STALE
    assert session.turn(100.08) is None


def test_a_tree_that_was_late_for_a_passed_prefix_does_not() -> None:
    session = decoding()
    turn = session.turn(100.05)
    assert turn is not None and session.give_up(turn)
    former = tokens_of(session)
    session.commit((5,), 0, 100.06)
    offer(session, former, 100.2)
    assert session.turn(100.2) is not None


def test_without_a_drafter_the_first_round_waits_once() -> None:
    session = decoding()
    session.streams.clear()
    assert session.turn(100.04) is None
    turn = session.turn(100.05)
    assert turn is not None
    assert turn.plain_reason == PlainReason.PLAIN_REASON_NO_DRAFTER


def test_nothing_is_waited_for_once_the_last_drafter_left() -> None:
    session = decoding()
    session.leave(1)
    turn = session.turn(100.0)
    assert turn is not None
    assert turn.plain_reason == PlainReason.PLAIN_REASON_NO_DRAFTER


def test_a_session_without_speculation_never_waits() -> None:
    turn = decoding(speculate=False).turn(100.0)
    assert turn is not None
    assert turn.plain_reason == PlainReason.PLAIN_REASON_OFF


def test_a_drafter_that_joins_unannounced_is_waited_for_once_it_shows_a_tree() -> None:
    session = decoding(speculate=False)
    session.streams.add(1)
    turn = session.turn(100.0)
    assert turn is not None
    assert turn.plain_reason == PlainReason.PLAIN_REASON_LATE
    former = tokens_of(session)
    session.commit((5,), 0, 100.02)
    offer(session, former, 100.03)
    assert session.turn(100.03) is None


def test_a_deadline_of_zero_never_waits_but_takes_what_is_there() -> None:
    session = decoding(deadline_s=0.0)
    turn = session.turn(100.0)
    assert turn is not None and turn.tree is None
    offer(session, tokens_of(session), 100.0)
    turn = session.turn(100.0)
    assert turn is not None and turn.tree is not None


def test_a_tree_pushed_ahead_is_used_when_its_prefix_comes_true() -> None:
    session = decoding()
    ahead = [*tokens_of(session), 9, 8]
    assert offer(session, ahead, 100.01) is None
    session.commit((9, 8), 1, 100.03)
    turn = session.turn(100.03)
    assert turn is not None and turn.tree is not None
    assert int(turn.tree.tokens[0]) == 8
    assert turn.decided == 100.03


def test_a_session_that_is_looked_ahead_of_goes_on_without_late_trees() -> None:
    """They come a second after their turn; a round takes a hundredth of that."""
    session = decoding(deadline_s=2.0)
    now, missing = 100.0, 0
    for _ in range(12):
        here = tokens_of(session)
        offer(session, [*here, 5, 6], now)  # for a prefix that never comes true
        turn = session.turn(now)
        if turn is None:
            offer(session, here, now + 1.0)
            turn = session.turn(now + 1.0)
            assert turn is not None
        else:
            missing += 1
        start = now if turn.tree is None else now + 1.0
        drafted = turn.tree is not None
        session.give_up(turn)
        session.patience.ran(2 if drafted else 1, drafted, 0.01, start + 0.01 - now)
        now = start + 0.01
        session.commit((7, 8) if drafted else (7,), int(drafted), now)
        offer(session, here, now + 0.99)
    assert missing >= 6
    assert session.expecting


def test_a_look_ahead_tree_gets_the_root_it_could_not_know() -> None:
    session = decoding()
    ahead = new_session(0, [*tokens_of(session), 9]).name
    session.offer(ahead, Proposal(chain([0, 3]), arrived=100.0, stream=1), 100.0)
    session.commit((9,), 0, 100.03)
    turn = session.turn(100.03)
    assert turn is not None and turn.tree is not None
    assert turn.tree.tokens.tolist() == [9, 3]


def test_a_tree_for_a_prefix_of_equal_length_and_other_digest_is_stale() -> None:
    session = decoding()
    dropped = offer(session, [1, 2, 3, 5], 100.0)
    assert isinstance(dropped, tuple) and dropped[2] == TreeRefusal.TREE_REFUSAL_STALE


def test_the_expected_arrival_follows_what_drafters_did_before() -> None:
    session = decoding()
    assert session.tree_due() == 100.0
    offer(session, tokens_of(session), 100.02)
    session.commit((5,), 0, 100.1)
    assert abs(session.tree_due() - 100.12) < 1e-9


def test_min_tokens_forbids_ends_by_tokens_not_by_rounds() -> None:
    session = new_session(7, [1, 2, 3], max_tokens=50, eos=frozenset({9}))
    session.ending = type(session.ending)(frozenset({9}), frozenset(), 3, 50)
    history = session.history()
    assert history is not None
    assert (history.forbidden, history.forbidden_depth) == ((9,), 3)
    session.commit((4, 5), 1, 0.0)
    history = session.history()
    assert history is not None and history.forbidden_depth == 1
    session.commit((6,), 0, 0.0)
    assert session.history() is None


def test_a_session_whose_deadline_is_taken_away_is_never_late() -> None:
    session = decoding()
    session.wait_at_most(0.0)
    turn = session.turn(100.0)
    assert turn is not None and not session.give_up(turn)


def test_a_deadline_that_is_given_back_is_worth_one_wait() -> None:
    session = decoding()
    session.wait_at_most(0.0)
    session.commit((5,), 0, 100.1)
    session.wait_at_most(0.05)
    assert session.turn(100.12) is None
    turn = session.turn(100.15)
    assert turn is not None and session.give_up(turn)
