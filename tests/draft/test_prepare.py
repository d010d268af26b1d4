"""The engine works ahead between events, and what came true needs no answer any more."""

from __future__ import annotations

from collections.abc import Sequence

from graft.common.prefix import Prefix
from graft.common.sampling import Sampling
from graft.common.tier import Tier
from graft.common.tree import TreeLimits
from graft.draft.engine import Engine
from graft.draft.events import (
    Closed,
    Committed,
    Event,
    Opened,
    Outcome,
    Proposed,
    Refused,
    Retiered,
)
from graft.draft.metrics import DraftMetrics
from graft.draft.mirror import Mirror
from graft.draft.proposers.base import Foreseen, Seat
from graft.testing.scripted import Scripted, likely, perfect, replay
from graft.v1.sampling_pb2 import AcceptRule

LIMITS = TreeLimits(16, 8, 1000)
TEXT = [*range(1, 200)]
TIER = Tier("perfect", num_steps=3, topk=1, num_draft_tokens=4, lookahead=5)


class Bench:
    """An engine whose steps the test takes itself, and one session in the middle of TEXT."""

    def __init__(
        self,
        proposer: Scripted | None = None,
        tier: Tier = TIER,
        sampling: Sampling | None = None,
        max_trees: int = 8,
    ) -> None:
        self.outcomes: list[Proposed] = []
        self.metrics = DraftMetrics()
        proposer = proposer or perfect(replay([TEXT]), 3)
        self.engine = Engine({proposer.name: proposer}, self._take, self.metrics)
        self.length = 5
        mirror = Mirror(1, Prefix(TEXT[:5]), 3, sampling or Sampling(), LIMITS, 100)
        self.said = self.step(Opened(1, mirror, tier, max_trees=max_trees))

    def _take(self, made: Sequence[Outcome]) -> None:
        self.outcomes += [one for one in made if isinstance(one, Proposed)]

    def step(self, *events: Event) -> list[Proposed]:
        self.outcomes.clear()
        self.engine.step(events)
        return list(self.outcomes)

    def look_ahead(self) -> list[Proposed]:
        """All that the engine prepares before the next event."""
        self.outcomes.clear()
        while self.engine._preparer.wants_work:
            self.engine.look_ahead()
        return list(self.outcomes)

    def commit(self, count: int, num_drafted: int = 3) -> list[Proposed]:
        tokens = tuple(TEXT[self.length : self.length + count])
        self.length += count
        digest = Prefix(TEXT[: self.length]).digest
        return self.step(Committed(1, tokens, self.length, digest, num_drafted=num_drafted))

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"graft_draft_{name}_total", labels) or 0.0


def test_likely_prefixes_are_named_by_length_and_digest() -> None:
    bench = Bench()
    assert [one.ahead for one in bench.said] == [False]
    made = bench.look_ahead()
    assert made and all(one.ahead for one in made)
    names = {(one.prefix_length, one.prefix_digest) for one in made}
    assert {(9, Prefix(TEXT[:9]).digest), (13, Prefix(TEXT[:13]).digest)} <= names
    assert all(not tree.scores for one in made for tree in one.trees)


def test_a_perfect_drafter_hits_every_time_and_is_never_asked() -> None:
    bench = Bench()
    for _ in range(20):
        bench.look_ahead()
        assert bench.commit(4) == []
    assert bench.value("lookahead_commits", outcome="hit") == 20
    assert bench.value("lookahead_commits", outcome="miss") == 0


def test_a_drafter_with_the_right_token_among_four_hits_too() -> None:
    tier = Tier("likely", num_steps=4, topk=1, num_draft_tokens=5, lookahead=24)
    bench = Bench(likely(replay([TEXT]), 2, 4), tier, max_trees=32)
    for _ in range(15):
        bench.look_ahead()
        bench.commit(3)
    assert bench.value("lookahead_commits", outcome="hit") >= 13


def test_a_miss_is_answered_at_once_and_looked_ahead_of_anew() -> None:
    bench = Bench()
    bench.look_ahead()
    (answer,) = bench.commit(2)
    assert (answer.ahead, answer.prefix_length) == (False, 7)
    assert 11 in {one.prefix_length for one in bench.look_ahead()}
    bench.commit(4)
    assert bench.value("lookahead_trees", outcome="wasted") > 0


def test_no_look_ahead_is_what_it_was_before() -> None:
    bench = Bench(tier=Tier("perfect", 3, 1, 4))
    assert bench.look_ahead() == []
    (answer,) = bench.commit(4)
    assert not answer.ahead
    assert bench.value("lookahead_commits", outcome="miss") == 0


def test_rules_that_draw_tokens_are_not_looked_ahead_of() -> None:
    law = Sampling(temperature=1.0, rule=AcceptRule.ACCEPT_RULE_REJECTION)
    bench = Bench(sampling=law)
    assert bench.look_ahead() == []


def test_verify_never_gets_more_than_it_holds() -> None:
    bench = Bench(max_trees=3)
    assert len(bench.look_ahead()) == 2
    bench.commit(4)
    assert len(bench.look_ahead()) <= 2


def test_a_tree_that_verify_dropped_is_sent_when_its_prefix_comes() -> None:
    bench = Bench()
    bench.look_ahead()
    bench.step(Refused(1, 9))
    (answer,) = bench.commit(4)
    assert (answer.ahead, answer.prefix_length, len(answer.trees)) == (False, 9, 1)


def test_another_tier_ends_what_was_prepared() -> None:
    bench = Bench()
    bench.look_ahead()
    bench.step(Retiered(1, Tier("perfect", 2, 1, 3)))
    assert bench.look_ahead() == []
    (answer,) = bench.commit(4)
    assert not answer.ahead


def test_a_closed_session_is_forgotten() -> None:
    bench = Bench()
    bench.look_ahead()
    bench.step(Closed(1))
    assert bench.look_ahead() == []


def test_a_drafter_that_is_behind_meets_verify_further_on() -> None:
    """Verify decodes plainly, a token a round: prefixes inside the tree may come before it."""
    bench = Bench(max_trees=32)
    bench.look_ahead()
    bench.commit(1, num_drafted=0)
    lengths = {one.prefix_length for one in bench.look_ahead()}
    assert {bench.length + 1, bench.length + 2} <= lengths


def test_a_proposer_that_fails_ahead_costs_no_answer() -> None:
    class Failing(Scripted):
        def foresee(self, seats: Sequence[Seat]) -> Sequence[Foreseen]:
            if any(seat.mirror not in self.mirrors.values() for seat in seats):
                raise RuntimeError("scripted failure")
            return super().foresee(seats)

    inner = perfect(replay([TEXT]), 3)
    bench = Bench(Failing("perfect", inner.guess))
    assert bench.look_ahead() == []
    (answer,) = bench.commit(4)
    assert len(answer.trees) == 1
    assert bench.value("proposer_failures", proposer="perfect") == 1
