from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from graft.common.tier import OFF, Tier
from graft.gateway.placement import (
    AFFINITY_SLACK,
    Action,
    Attend,
    Attendance,
    ChangeTier,
    Release,
    VerifyLoad,
    Wish,
    affinity_key,
    choose_verify,
)

NGRAM = Tier("ngram", 4, 1, 5)
EAGLE = Tier("eagle", 4, 1, 5)


def wish(number: int, tier: Tier = NGRAM) -> Wish:
    return Wish(number, b"t", "verify:1", tier)


def test_equal_starts_go_to_one_replica_while_loads_are_near() -> None:
    loads = [VerifyLoad(f"v{i}", 0) for i in range(4)]
    key = affinity_key("", range(100))
    first = choose_verify(loads, key)
    assert first is not None
    near = [VerifyLoad(one.address, AFFINITY_SLACK * (one.address == first)) for one in loads]
    assert choose_verify(near, key) == first
    far = [VerifyLoad(one.address, (AFFINITY_SLACK + 1) * (one.address == first)) for one in loads]
    assert choose_verify(far, key) != first


def test_different_starts_spread() -> None:
    loads = [VerifyLoad(f"v{i}", 0) for i in range(4)]
    chosen = {choose_verify(loads, affinity_key("", [number])) for number in range(64)}
    assert len(chosen) == 4


def test_salts_are_part_of_the_start() -> None:
    assert affinity_key("a", [1]) != affinity_key("b", [1])


def test_avoided_replicas_are_not_chosen() -> None:
    loads = [VerifyLoad("a", 0), VerifyLoad("b", 9)]
    assert choose_verify(loads, b"", {"a"}) == "b"
    assert choose_verify(loads, b"", {"a", "b"}) is None


def test_a_session_gets_the_least_busy_drafter_with_its_proposer() -> None:
    state = Attendance()
    state.link_up("a", frozenset({"ngram"}), 0, 0.0)
    state.link_up("b", frozenset({"ngram", "eagle"}), 0, 0.0)
    assert state.wish(wish(1), 0.0) == [Attend("a", wish(1))]
    assert state.wish(wish(2), 0.0) == [Attend("b", wish(2))]
    assert state.wish(wish(3, EAGLE), 0.0) == [Attend("b", wish(3, EAGLE))]
    assert state.wish(wish(4), 0.0) == [Attend("a", wish(4))]


def test_sessions_of_a_lost_drafter_go_to_another() -> None:
    state = Attendance()
    state.link_up("a", frozenset({"ngram"}), 0, 0.0)
    state.wish(wish(1), 0.0)
    state.link_up("b", frozenset({"ngram"}), 0, 0.0)
    assert state.link_down("a", 1.0) == [Attend("b", wish(1))]
    assert state.link_down("b", 1.0) == []
    assert state.link_up("a", frozenset({"ngram"}), 0, 2.0) == [Attend("a", wish(1))]


def test_a_refusal_is_not_asked_again_at_once() -> None:
    state = Attendance(retry_s=2.0)
    state.link_up("a", frozenset({"ngram"}), 0, 0.0)
    state.wish(wish(1), 0.0)
    assert state.refused("a", 1, 0.0) == []
    assert state.tick(1.9) == []
    assert state.tick(2.0) == [Attend("a", wish(1))]


def test_a_full_drafter_is_left_alone() -> None:
    state = Attendance()
    state.link_up("a", frozenset({"ngram"}), 1, 0.0)
    assert state.wish(wish(1), 0.0) == [Attend("a", wish(1))]
    assert state.wish(wish(2), 0.0) == []
    assert state.release(1) == [Release("a", 1)]
    assert state.tick(0.0) == [Attend("a", wish(2))]


def test_a_tier_of_another_proposer_moves_the_session() -> None:
    state = Attendance()
    state.link_up("a", frozenset({"ngram"}), 0, 0.0)
    state.wish(wish(1), 0.0)
    assert state.change_tier(1, OFF, 0.0) == [ChangeTier("a", 1, OFF)]
    state.link_up("b", frozenset({"eagle"}), 0, 0.0)
    assert state.change_tier(1, EAGLE, 0.0) == [Release("a", 1), Attend("b", wish(1, EAGLE))]


class Attending(RuleBasedStateMachine):
    """Whatever happens, what drafters were told is what the state machine believes."""

    def __init__(self) -> None:
        super().__init__()
        self.state = Attendance(retry_s=1.0)
        self.now = 0.0
        self.up: set[str] = set()
        self.alive: set[int] = set()
        self.told: dict[int, str] = {}

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            assert action.draft in self.up
            match action:
                case Attend(draft, one):
                    assert one.session not in self.told
                    self.told[one.session] = draft
                case Release(draft, session):
                    assert self.told.pop(session) == draft
                case ChangeTier(draft, session, _):
                    assert self.told[session] == draft

    @rule(draft=st.sampled_from("abc"))
    def link_up(self, draft: str) -> None:
        self.down(draft)
        self.up.add(draft)
        self.act(self.state.link_up(draft, frozenset({"ngram"}), 3, self.now))

    @rule(draft=st.sampled_from("abc"))
    def down(self, draft: str) -> None:
        self.up.discard(draft)
        self.told = {session: one for session, one in self.told.items() if one != draft}
        self.act(self.state.link_down(draft, self.now))

    @rule(number=st.integers(0, 9))
    def wish(self, number: int) -> None:
        self.alive.add(number)
        self.act(self.state.wish(wish(number), self.now))

    @rule(number=st.integers(0, 9))
    def release(self, number: int) -> None:
        self.alive.discard(number)
        self.act(self.state.release(number))

    @rule(number=st.integers(0, 9), draft=st.sampled_from("abc"))
    def refuse(self, number: int, draft: str) -> None:
        if self.told.get(number) == draft:
            del self.told[number]
        self.act(self.state.refused(draft, number, self.now))

    @rule()
    def wait(self) -> None:
        self.now += 1.0
        self.act(self.state.tick(self.now))

    @invariant()
    def believed_is_told(self) -> None:
        assert self.state.num_sessions == len(self.alive)
        for number in self.alive:
            assert self.state.drafter_of(number) == self.told.get(number)


TestAttending = Attending.TestCase
