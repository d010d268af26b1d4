"""The engine batches what is ready, drops what is stale, and outlives its proposers' faults."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from graft.common.prefix import Prefix
from graft.common.sampling import Sampling
from graft.common.tier import Tier
from graft.common.tree import Tree, TreeLimits, from_parents
from graft.common.tree_codec import decode
from graft.draft.engine import Engine
from graft.draft.events import Broke, Closed, Committed, Opened, Outcome, Proposed, Retiered
from graft.draft.metrics import DraftMetrics
from graft.draft.mirror import Mirror
from graft.draft.proposers.base import Proposal, Seat, chain
from graft.testing.scripted import Scripted

LIMITS = TreeLimits(16, 8, 1000)
CHAIN = Tier("echo", num_steps=3, topk=1, num_draft_tokens=4)


class Watched(Scripted):
    """Repeats the root; writes down what it was told."""

    def __init__(self, name: str = "echo") -> None:
        super().__init__(name, lambda seat: chain(seat, [seat.mirror.prefix.root] * 8))
        self.batches: list[list[int]] = []
        self.opened: list[int] = []
        self.closed: list[int] = []
        self.committed: list[tuple[int, tuple[int, ...]]] = []
        self.fail_commit = False
        self.fail_open = False

    def open(self, mirror: Mirror) -> object:
        self.opened.append(mirror.session_id)
        if self.fail_open:
            raise RuntimeError("scripted failure")
        return object()

    def propose(self, batch: Sequence[Seat]) -> Sequence[Proposal]:
        self.batches.append([seat.mirror.session_id for seat in batch])
        return super().propose(batch)

    def commit(self, seat: Seat, tokens: Sequence[int]) -> None:
        if self.fail_commit:
            raise RuntimeError("scripted failure")
        self.committed.append((seat.mirror.session_id, tuple(tokens)))

    def close(self, seat: Seat) -> None:
        self.closed.append(seat.mirror.session_id)


class Bench:
    """An engine whose steps the test takes itself."""

    def __init__(self, *proposers: Scripted) -> None:
        self.outcomes: list[Outcome] = []
        self.metrics = DraftMetrics()
        named = {proposer.name: proposer for proposer in proposers}
        self.engine = Engine(named, self.outcomes.extend, self.metrics)

    def step(self, *events: Opened | Committed | Retiered | Closed) -> list[Outcome]:
        self.outcomes.clear()
        self.engine.step(events)
        return list(self.outcomes)

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"graft_draft_{name}", labels) or 0.0


def opened(key: int, *tokens: int, tier: Tier = CHAIN, room: int = 100) -> Opened:
    mirror = Mirror(key, Prefix(tokens), len(tokens), Sampling(), LIMITS, room)
    return Opened(key, mirror, tier)


def committed(key: int, before: list[int], *tokens: int) -> Committed:
    after = Prefix([*before, *tokens])
    return Committed(key, tokens, len(after), after.digest)


def tree_of(outcome: Outcome) -> Tree:
    assert isinstance(outcome, Proposed)
    (message,) = outcome.trees
    return decode(0, message.shape, message.tokens, message.scores, LIMITS)


def test_sessions_that_are_ready_together_are_one_batch() -> None:
    echo = Watched()
    bench = Bench(echo)
    outcomes = bench.step(opened(1, 5), opened(2, 6), opened(3, 7))
    assert echo.batches == [[1, 2, 3]]
    assert [tree_of(outcome).tokens.tolist()[1:] for outcome in outcomes] == [
        [5, 5, 5],
        [6, 6, 6],
        [7, 7, 7],
    ]


def test_only_the_newest_prefix_of_a_session_is_worked_on() -> None:
    echo = Watched()
    bench = Bench(echo)
    bench.step(opened(1, 5))
    (outcome,) = bench.step(committed(1, [5], 6), committed(1, [5, 6], 7, 8))
    assert isinstance(outcome, Proposed)
    assert (outcome.prefix_length, outcome.prefix_digest) == (4, Prefix([5, 6, 7, 8]).digest)
    assert echo.committed == [(1, (6,)), (1, (7, 8))]
    assert echo.batches == [[1], [1]]


def test_a_session_without_news_is_left_alone() -> None:
    echo = Watched()
    bench = Bench(echo)
    bench.step(opened(1, 5), opened(2, 6))
    bench.step(committed(2, [6], 9))
    assert echo.batches[-1] == [2]


def test_a_tree_is_no_deeper_than_the_session_has_room_for() -> None:
    bench = Bench(Watched())
    (outcome,) = bench.step(opened(1, 5, room=3))
    assert tree_of(outcome).max_depth == 2
    (outcome,) = bench.step(committed(1, [5], 6, 7))
    assert isinstance(outcome, Proposed) and outcome.trees == ()


def test_a_tree_larger_than_its_tier_is_cut() -> None:
    def wide(seat: Seat) -> Tree:
        return from_parents([seat.mirror.prefix.root, 1, 2, 3, 4, 5], [-1, 0, 1, 2, 3, 4])

    bench = Bench(Scripted("wide", wide))
    (outcome,) = bench.step(opened(1, 5, tier=Tier("wide", 2, 1, 8)))
    assert tree_of(outcome).tokens.tolist()[1:] == [1, 2]


def test_tier_zero_says_nothing_and_costs_no_batch() -> None:
    echo = Watched()
    bench = Bench(echo)
    assert bench.step(opened(1, 5, tier=Tier("echo"))) == []
    assert bench.step(committed(1, [5], 6)) == []
    assert echo.batches == []


def test_a_session_that_leaves_tier_zero_drafts_at_once_for_the_prefix_it_has_by_then() -> None:
    bench = Bench(Watched())
    bench.step(opened(1, 5))
    bench.step(Retiered(1, Tier("echo")))
    assert bench.step(committed(1, [5], 6), committed(1, [5, 6], 7)) == []
    (outcome,) = bench.step(Retiered(1, CHAIN))
    assert isinstance(outcome, Proposed) and outcome.prefix_length == 3
    assert tree_of(outcome).tokens.tolist()[1:] != []


def test_a_new_tier_takes_effect_with_the_next_tree() -> None:
    first, second = Watched("echo"), Watched("other")
    bench = Bench(first, second)
    bench.step(opened(1, 5))
    assert bench.step(Retiered(1, Tier("other", 1, 1, 2))) == []
    (outcome,) = bench.step(committed(1, [5], 6))
    assert tree_of(outcome).tokens.tolist()[1:] == [6]
    assert first.closed == [1] and second.opened == [1]


def test_a_commit_that_does_not_chain_breaks_that_session_alone() -> None:
    echo = Watched()
    bench = Bench(echo)
    bench.step(opened(1, 5), opened(2, 6))
    outcomes = bench.step(committed(1, [4], 7), committed(2, [6], 7))
    assert [type(outcome) for outcome in outcomes] == [Broke, Proposed]
    assert echo.closed == [1]
    assert bench.step(committed(1, [5], 7)) == []


def test_a_closed_session_gets_no_more_trees() -> None:
    echo = Watched()
    bench = Bench(echo)
    bench.step(opened(1, 5))
    assert bench.step(committed(1, [5], 6), Closed(1)) == []
    assert echo.closed == [1]


def _fail(seat: Seat) -> Proposal:
    raise RuntimeError("scripted failure")


def test_a_proposer_that_raises_proposes_nothing_and_is_opened_anew() -> None:
    echo = Watched()
    truth, echo.guess = echo.guess, _fail
    bench = Bench(echo)
    outcomes = bench.step(opened(1, 5), opened(2, 6))
    assert [outcome.trees for outcome in outcomes if isinstance(outcome, Proposed)] == [(), ()]
    assert echo.closed == [1, 2]
    assert bench.value("proposer_failures_total", proposer="echo") == 1
    echo.guess = truth
    (outcome,) = bench.step(committed(1, [5], 6))
    assert tree_of(outcome).tokens.tolist()[1:] == [6, 6, 6]
    assert echo.opened == [1, 2, 1]


def test_a_proposer_that_cannot_take_a_commit_is_opened_anew_from_the_whole_prefix() -> None:
    echo = Watched()
    bench = Bench(echo)
    bench.step(opened(1, 5))
    echo.fail_commit = True
    (outcome,) = bench.step(committed(1, [5], 6))
    assert tree_of(outcome).tokens.tolist()[1:] == [6, 6, 6]
    assert echo.opened == [1, 1]


def test_a_proposer_that_cannot_open_costs_only_its_drafts() -> None:
    echo = Watched()
    echo.fail_open = True
    bench = Bench(echo)
    (outcome,) = bench.step(opened(1, 5))
    assert isinstance(outcome, Proposed) and outcome.trees == ()
    echo.fail_open = False
    (outcome,) = bench.step(committed(1, [5], 6))
    assert tree_of(outcome).num_nodes == 4


@pytest.mark.parametrize(
    ("tokens", "parents", "scores"),
    [
        ([9, 1], [-1, 0], None),
        ([5, 1, 1], [-1, 0, 0], None),
        ([5, 1000], [-1, 0], None),
        ([5, 1], [-1, 0], [0.0, 0.5]),
    ],
)
def test_a_tree_that_verify_would_refuse_stays_at_home(
    tokens: list[int], parents: list[int], scores: list[float] | None
) -> None:
    bench = Bench(Scripted("bad", lambda seat: from_parents(tokens, parents, scores)))
    (outcome,) = bench.step(opened(1, 5, tier=Tier("bad", 3, 3, 8)))
    assert isinstance(outcome, Proposed) and outcome.trees == ()
    assert bench.value("withheld_total", reason="malformed") == 1


def test_commits_that_come_while_a_proposer_works_are_one_batch_after_it() -> None:
    started, go, answered = threading.Event(), threading.Event(), threading.Event()
    batches: list[list[int]] = []

    class Gated(Watched):
        def propose(self, batch: Sequence[Seat]) -> Sequence[Proposal]:
            batches.append([seat.mirror.session_id for seat in batch])
            started.set()
            assert go.wait(10)
            return [None] * len(batch)

    outcomes: list[Outcome] = []

    def deliver(made: Sequence[Outcome]) -> None:
        outcomes.extend(made)
        if len(outcomes) == 3:
            answered.set()

    engine = Engine({"echo": Gated()}, deliver, DraftMetrics())
    engine.start()
    engine.post(opened(1, 5))
    assert started.wait(10)
    engine.post(opened(2, 6))
    engine.post(committed(1, [5], 7))
    go.set()
    assert answered.wait(10)
    assert engine.stop(10)
    assert batches == [[1], [2, 1]]


class Reading(Watched):
    """Lacks some pieces of its sessions' prefixes; where it is stuck, for good."""

    def __init__(self, lacking: int, stuck: bool = False) -> None:
        super().__init__()
        self.lacking, self.stuck = lacking, stuck

    def behind(self, seat: Seat) -> int:
        return self.lacking

    def follow(self, seats: Sequence[Seat]) -> None:
        self.lacking -= not self.stuck


def follow(bench: Bench) -> list[Proposed]:
    bench.outcomes.clear()
    bench.engine.follow()
    return [one for one in bench.outcomes if isinstance(one, Proposed)]


def test_a_session_that_is_behind_is_said_to_be_once_and_reads_on_between_commits() -> None:
    proposer = Reading(lacking=2)
    bench = Bench(proposer)
    (said,) = bench.step(opened(1, 7))
    assert isinstance(said, Proposed)
    assert (said.behind, said.trees, proposer.batches) == (True, (), [])
    assert follow(bench) == []
    assert bench.step(committed(1, [7], 8)) == []
    (made,) = follow(bench)
    assert (made.behind, made.prefix_length, len(made.trees)) == (False, 2, 1)
    assert not bench.engine._behind


def test_a_session_that_cannot_read_on_is_let_be_until_the_next_commit() -> None:
    bench = Bench(Reading(lacking=1, stuck=True))
    bench.step(opened(1, 7))
    assert follow(bench) == [] and not bench.engine._behind
    (said,) = bench.step(committed(1, [7], 8))
    assert isinstance(said, Proposed) and said.behind


def test_a_session_that_is_behind_may_be_closed() -> None:
    proposer = Reading(lacking=2)
    bench = Bench(proposer)
    bench.step(opened(1, 7), opened(2, 8))
    bench.step(Closed(1))
    assert proposer.closed == [1] and list(bench.engine._behind) == [2]
