"""What a step runs, who runs at all, and what everybody is told. No model, no clock, no socket."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.common.errors import BadTicket, Draining, GraftError, Overloaded, SessionNotFound
from graft.common.tree import from_parents
from graft.testing.shadow import (
    ShadowTarget,
    new_scheduler,
    new_session,
    next_token,
    right_tree,
    run_step,
    text_after,
)
from graft.v1.tree_pb2 import TreeRefusal
from graft.v1.verify_pb2 import FinishReason, PlainReason
from graft.verify.events import (
    ClosedTold,
    Committed,
    CommitTold,
    Event,
    Failed,
    Finished,
    Opened,
    PrefixTold,
    RefusalTold,
)
from graft.verify.scheduler import Scheduler
from graft.verify.session import Session
from graft.verify.shelf import Proposal
from graft.verify.step import Chunk, Round, StepTiming

PROMPT = [1, 2, 3, 4, 5]


class Bench:
    """A scheduler, its shadow target, and everything that was said."""

    def __init__(self, **limits: int) -> None:
        self.scheduler: Scheduler = new_scheduler(**limits)
        self.target = ShadowTarget()
        self.events: list[Event] = []
        self.now = 0.0
        self.wake_at: float | None = None

    def open(self, session: Session) -> Session:
        self.scheduler.open(session, self.now)
        self._listen()
        return session

    def join(self, session: Session, stream: int = 1) -> None:
        self.scheduler.join(stream, session.session_id, session.ticket)
        self._listen()

    def cancel(self, session: Session) -> None:
        self.scheduler.cancel(session.session_id)
        self._listen()

    def push(self, session: Session, depth: int, stream: int = 1) -> None:
        tree = right_tree(session.prefix.tokens.tolist(), depth)
        proposal = Proposal(tree, arrived=self.now, stream=stream)
        self.scheduler.offer(session.session_id, session.name, proposal, self.now)
        self._listen()

    def step(self) -> tuple[Chunk | Round, ...]:
        plan = run_step(self.scheduler, self.target, self.now)
        self.wake_at = plan.wake_at
        self.now += 0.01
        self._listen()
        return () if plan.step is None else plan.step.works

    def run(self) -> None:
        while self.scheduler.num_sessions:
            if not self.step():
                assert self.wake_at is not None, "sessions are left and nothing will happen"
                self.now = max(self.now, self.wake_at)

    def text(self, session_id: int) -> list[int]:
        return [
            token
            for event in self.events
            if isinstance(event, Committed) and event.session_id == session_id
            for token in event.tokens
        ]

    def of(self, kind: type[Event], session_id: int | None = None) -> list[Event]:
        return [
            event
            for event in self.events
            if isinstance(event, kind) and session_id in (None, event.session_id)
        ]

    def _listen(self) -> None:
        self.events += self.scheduler.take_events()


def test_a_session_decodes_plainly_to_its_budget() -> None:
    bench = Bench()
    bench.open(new_session(1, PROMPT, max_tokens=6))
    bench.run()
    assert bench.text(1) == text_after(PROMPT, 6)
    assert isinstance(bench.events[0], Opened)
    last = bench.events[-1]
    assert isinstance(last, Finished)
    assert (last.reason, last.num_rounds) == (FinishReason.FINISH_REASON_LENGTH, 5)


def test_a_prompt_is_filled_in_chunks() -> None:
    bench = Bench(chunk_tokens=4)
    bench.open(new_session(1, PROMPT, max_tokens=20))
    bench.step()
    bench.open(new_session(2, list(range(10)), max_tokens=2))
    sizes = [[work.num_rows for work in bench.step()] for _ in range(3)]
    assert sizes == [[1, 4], [1, 4], [1, 2]]


def test_a_prompt_alone_takes_the_whole_step() -> None:
    bench = Bench(chunk_tokens=4)
    bench.open(new_session(1, list(range(10)), max_tokens=2))
    assert [work.num_rows for work in bench.step()] == [10]


def test_a_prompt_gets_a_row_even_beside_large_trees() -> None:
    bench = Bench(max_step_rows=6, max_running=3)
    first = bench.open(new_session(1, PROMPT, max_tokens=40, speculate=True))
    bench.join(first)
    bench.step()
    bench.open(new_session(2, list(range(10)), max_tokens=1))
    bench.push(first, 20)
    works = bench.step()
    assert [type(work) for work in works] == [Round, Chunk]
    assert sum(work.num_rows for work in works) <= 6


def test_a_right_tree_is_accepted_whole() -> None:
    bench = Bench()
    session = bench.open(new_session(1, PROMPT, max_tokens=9, speculate=True))
    bench.join(session)
    while session.session_id in bench.scheduler._sessions:
        if session.generated:
            bench.push(session, 3)
        bench.step()
    assert bench.text(1) == text_after(PROMPT, 9)
    finished = bench.of(Finished)[0]
    assert isinstance(finished, Finished)
    assert finished.num_rounds == 2
    assert finished.num_drafted == finished.num_accepted == 6


def test_a_tree_is_cut_to_the_budget_that_is_left() -> None:
    bench = Bench()
    session = bench.open(new_session(1, PROMPT, max_tokens=4, speculate=True))
    bench.join(session)
    bench.step()
    bench.push(session, 8)
    works = bench.step()
    assert isinstance(works[0], Round) and works[0].tree.max_depth == 2
    assert bench.text(1) == text_after(PROMPT, 4)


def test_no_tree_fits_beside_the_last_token() -> None:
    bench = Bench()
    session = bench.open(new_session(1, PROMPT, max_tokens=2, speculate=True))
    bench.join(session)
    bench.step()
    bench.push(session, 3)
    bench.step()
    last = bench.of(Committed)[-1]
    assert isinstance(last, Committed)
    assert last.plain_reason == PlainReason.PLAIN_REASON_NO_ROOM
    assert last.num_drafted == 0


def test_rows_of_a_step_are_shared_between_trees() -> None:
    bench = Bench(max_step_rows=10, max_running=2)
    sessions = [bench.open(new_session(i, [i], max_tokens=40, speculate=True)) for i in (1, 2)]
    for session in sessions:
        bench.join(session)
    bench.step()
    for session in sessions:
        bench.push(session, 12)
    assert [work.num_rows for work in bench.step()] == [5, 5]


def test_sessions_over_the_limit_wait_in_order() -> None:
    bench = Bench(max_running=2)
    for i in range(1, 5):
        bench.open(new_session(i, [i], max_tokens=2))
    bench.run()
    opened = [event.session_id for event in bench.of(Opened)]
    assert opened == [1, 2, 3, 4]
    assert all(bench.text(i) == text_after([i], 2) for i in range(1, 5))


def test_a_full_queue_refuses_with_a_time_to_come_back() -> None:
    bench = Bench(max_running=1, max_waiting=1)
    for i in range(1, 4):
        bench.open(new_session(i, [i], max_tokens=2))
    failed = bench.events[-1]
    assert isinstance(failed, Failed) and failed.session_id == 3
    assert isinstance(failed.error, Overloaded)
    assert failed.error.retry_after_s is not None and failed.error.retry_after_s >= 1.0
    bench.run()


def test_a_draining_replica_opens_nothing_and_finishes_what_runs() -> None:
    bench = Bench()
    bench.open(new_session(1, PROMPT, max_tokens=3))
    bench.scheduler.drain()
    bench.open(new_session(2, PROMPT, max_tokens=3))
    failed = bench.events[-1]
    assert isinstance(failed, Failed) and isinstance(failed.error, Draining)
    bench.run()
    assert len(bench.text(1)) == 3


def test_a_second_prompt_reuses_the_pages_of_the_first() -> None:
    bench = Bench()
    prompt = list(range(20))
    bench.open(new_session(1, prompt, max_tokens=5))
    bench.run()
    longer = [*prompt, *bench.text(1)]
    bench.open(new_session(2, [*longer, 7], max_tokens=5))
    bench.run()
    opened = bench.of(Opened, 2)[0]
    assert isinstance(opened, Opened) and opened.cached_tokens == 24
    assert bench.text(2) == text_after([*longer, 7], 5)


def test_sessions_that_share_a_prefix_at_once_do_not_disturb_each_other() -> None:
    bench = Bench(num_pages=64)
    prompt = list(range(18))
    for i in range(1, 5):
        bench.open(new_session(i, [*prompt, i], max_tokens=12))
        bench.step()
    bench.run()
    for i in range(1, 5):
        assert bench.text(i) == text_after([*prompt, i], 12)


def test_the_youngest_loses_its_pages_and_its_text_stays_the_same() -> None:
    bench = Bench(num_pages=8, page_tokens=4, max_running=3)
    for i in (1, 2, 3):
        bench.open(new_session(i, [i] * 5, max_tokens=14))
    bench.run()
    assert bench.scheduler.tally.preemptions > 0
    for i in (1, 2, 3):
        assert bench.text(i) == text_after([i] * 5, 14)
    assert bench.scheduler.places.pool.num_used == 0


def test_trees_shrink_before_anyone_is_preempted() -> None:
    bench = Bench(num_pages=4, page_tokens=4, max_running=1)
    session = bench.open(new_session(1, PROMPT, max_tokens=11, speculate=True))
    bench.join(session)
    while session.session_id in bench.scheduler._sessions:
        if session.generated:
            bench.push(session, 10)
        bench.step()
    assert bench.scheduler.tally.preemptions == 0
    assert bench.text(1) == text_after(PROMPT, 11)


def test_a_cancel_between_steps_frees_the_pages_at_once() -> None:
    bench = Bench()
    bench.open(new_session(1, PROMPT, max_tokens=50))
    bench.step()
    bench.scheduler.cancel(1)
    finished = bench.scheduler.take_events()[-1]
    assert isinstance(finished, Finished)
    assert finished.reason == FinishReason.FINISH_REASON_CANCELLED
    assert bench.scheduler.places.pool.num_used == 0


def test_a_cancel_during_a_step_frees_the_pages_after_it() -> None:
    bench = Bench()
    bench.open(new_session(1, PROMPT, max_tokens=50))
    plan = bench.scheduler.plan(0.0)
    assert plan.step is not None
    bench.scheduler.cancel(1)
    assert bench.scheduler.places.pool.num_used == 2
    outcomes = bench.target.run(plan.step)
    bench.scheduler.complete(plan.step, outcomes, StepTiming(0.0, 0.0, 0.0), 0.1)
    assert bench.scheduler.places.pool.num_used == 0
    kinds = [type(event) for event in bench.scheduler.take_events()]
    assert kinds == [Opened, Finished]


def test_cancelling_unknown_and_finished_sessions_does_nothing() -> None:
    bench = Bench()
    bench.open(new_session(1, PROMPT, max_tokens=1))
    bench.run()
    bench.scheduler.cancel(1)
    bench.scheduler.cancel(99)
    assert bench.scheduler.take_events() == []


def test_a_step_that_raised_ends_its_sessions_and_their_pages_are_not_reused() -> None:
    bench = Bench()
    bench.open(new_session(1, list(range(12)), max_tokens=50))
    bench.step()
    plan = bench.scheduler.plan(1.0)
    assert plan.step is not None
    bench.scheduler.abandon(plan.step, GraftError("boom"), StepTiming(1.0, 0.0, 0.0), 1.1)
    bench.scheduler.check()
    pool = bench.scheduler.places.pool
    assert (pool.num_used, pool.num_cached) == (0, 0)
    assert isinstance(bench.scheduler.take_events()[-1], Failed)


def test_a_replay_goes_on_where_the_text_stopped() -> None:
    bench = Bench()
    whole = text_after(PROMPT, 10)
    for kept in range(10):
        bench.open(new_session(kept + 1, PROMPT, committed=whole[:kept], max_tokens=10))
    bench.scheduler.limits = new_scheduler(max_waiting=20).limits
    bench.run()
    for kept in range(8):
        assert whole[:kept] + bench.text(kept + 1) == whole


def test_a_replay_of_a_finished_text_only_tells_its_end() -> None:
    bench = Bench()
    bench.open(new_session(1, PROMPT, committed=[7, 8, 9], max_tokens=9, eos=frozenset({9})))
    assert [type(event) for event in bench.events] == [Opened, Finished]
    finished = bench.events[-1]
    assert isinstance(finished, Finished)
    assert (finished.reason, finished.stop_token) == (FinishReason.FINISH_REASON_EOS, 9)
    assert bench.scheduler.num_sessions == 0


def test_a_drafter_learns_the_prefix_with_the_first_token() -> None:
    bench = Bench()
    session = bench.open(new_session(1, PROMPT, max_tokens=4, speculate=True))
    bench.join(session)
    assert not bench.of(PrefixTold)
    bench.step()
    told = bench.of(PrefixTold)[0]
    assert isinstance(told, PrefixTold)
    assert told.tokens.tolist() == [*PROMPT, next_token(PROMPT)]
    assert (told.prompt_length, told.room) == (5, 3)


def test_a_drafter_that_joins_late_learns_the_prefix_at_once() -> None:
    bench = Bench()
    session = bench.open(new_session(1, PROMPT, max_tokens=9))
    bench.step()
    bench.step()
    bench.join(session)
    told = bench.of(PrefixTold)[0]
    assert isinstance(told, PrefixTold) and len(told.tokens) == 7


def test_all_joined_streams_hear_every_commit() -> None:
    bench = Bench()
    session = bench.open(new_session(1, PROMPT, max_tokens=4, speculate=True))
    bench.join(session, stream=1)
    bench.join(session, stream=2)
    bench.run()
    for stream in (1, 2):
        heard = [
            event
            for event in bench.events
            if isinstance(event, PrefixTold | CommitTold | ClosedTold) and event.stream == stream
        ]
        assert [type(event) for event in heard] == [PrefixTold, CommitTold, CommitTold, ClosedTold]


def test_a_commit_names_the_prefix_after_it() -> None:
    bench = Bench()
    session = bench.open(new_session(1, PROMPT, max_tokens=4, speculate=True))
    bench.join(session)
    bench.step()
    bench.push(session, 1)
    bench.step()
    told = bench.of(CommitTold)[0]
    assert isinstance(told, CommitTold)
    expected = new_session(0, [*PROMPT, *text_after(PROMPT, 3)]).name
    assert (told.prefix_length, told.prefix_digest) == expected
    assert (told.accepted, told.num_drafted) == (1, 1)


@pytest.mark.parametrize(
    ("session_id", "ticket", "reason"),
    [(99, b"1234", SessionNotFound.reason), (1, b"1234", BadTicket.reason), (1, b"", None)],
)
def test_a_join_without_the_ticket_is_refused(
    session_id: int, ticket: bytes, reason: int | None
) -> None:
    bench = Bench()
    bench.open(new_session(1, PROMPT))
    bench.scheduler.join(5, session_id, ticket)
    closed = bench.scheduler.take_events()[-1]
    assert isinstance(closed, ClosedTold)
    assert closed.error == (BadTicket.reason if reason is None else reason)


def test_a_tree_from_a_stream_that_has_not_joined_is_foreign() -> None:
    bench = Bench()
    session = bench.open(new_session(1, PROMPT, speculate=True))
    bench.join(session, stream=1)
    bench.step()
    bench.push(session, 2, stream=2)
    refusal = bench.of(RefusalTold)[0]
    assert isinstance(refusal, RefusalTold)
    assert (refusal.stream, refusal.refusal) == (2, TreeRefusal.TREE_REFUSAL_FOREIGN)
    assert not session.has_tree


def test_a_tree_for_a_session_that_has_ended_is_stale_to_who_attended_it() -> None:
    bench = Bench()
    session = bench.open(new_session(1, PROMPT, max_tokens=1, speculate=True))
    bench.join(session, stream=1)
    bench.run()
    bench.push(session, 2, stream=1)
    bench.push(session, 2, stream=2)
    refusals = [event for event in bench.events if isinstance(event, RefusalTold)]
    assert [refusal.refusal for refusal in refusals] == [
        TreeRefusal.TREE_REFUSAL_STALE,
        TreeRefusal.TREE_REFUSAL_FOREIGN,
    ]


def test_a_doubled_tree_is_counted_and_harmless() -> None:
    bench = Bench()
    session = bench.open(new_session(1, PROMPT, max_tokens=6, speculate=True))
    bench.join(session)
    bench.step()
    bench.push(session, 2)
    bench.push(session, 2)
    bench.run()
    assert bench.scheduler.tally.refused[TreeRefusal.TREE_REFUSAL_REPEATED] == 1
    assert bench.text(1) == text_after(PROMPT, 6)


def test_a_wrong_tree_costs_nothing_but_its_rows() -> None:
    bench = Bench()
    session = bench.open(new_session(1, PROMPT, max_tokens=6, speculate=True))
    bench.join(session)
    bench.step()
    root = session.prefix.root
    wrong = (next_token(session.prefix.tokens.tolist()) + 1) % 50
    tree = from_parents([root, wrong, wrong], [-1, 0, 1])
    proposal = Proposal(tree, arrived=bench.now, stream=1)
    bench.scheduler.offer(1, session.name, proposal, bench.now)
    bench.step()
    commit = bench.of(Committed)[-1]
    assert isinstance(commit, Committed)
    assert (len(commit.tokens), commit.accepted, commit.num_drafted) == (1, 0, 2)


def test_pushed_trees_that_come_true_are_hits_and_the_others_misses() -> None:
    bench = Bench()
    session = bench.open(new_session(1, PROMPT, max_tokens=20, speculate=True))
    bench.join(session)
    bench.step()
    tokens = session.prefix.tokens.tolist()
    after = [*tokens, *text_after(tokens, 3)]
    for outcome in (after, [*after[:-1], (after[-1] + 1) % 50]):
        proposal = Proposal(right_tree(outcome, 2), arrived=bench.now, stream=1)
        bench.scheduler.offer(1, new_session(0, outcome).name, proposal, bench.now)
    bench.push(session, 2)
    bench.step()
    tally = bench.scheduler.tally
    assert (tally.pushed["hit"], tally.pushed["miss"]) == (1, 1)
    assert session.turn(bench.now) is not None


def test_synchronous_sessions_meet_in_one_step() -> None:
    bench = Bench()
    sessions = [
        bench.open(new_session(i, [i, *PROMPT], max_tokens=40, speculate=True)) for i in (1, 2)
    ]
    for session in sessions:
        bench.join(session)
    bench.step()
    bench.scheduler._step_s = 0.02
    bench.now = sessions[0].since
    bench.push(sessions[0], 2)
    plan = bench.scheduler.plan(bench.now)
    assert plan.step is None and plan.wake_at is not None
    assert plan.wake_at - bench.now <= 0.0101
    bench.push(sessions[1], 2)
    assert len(bench.step()) == 2


def test_the_step_is_not_held_for_a_drafter_known_to_be_slower_than_that() -> None:
    bench = Bench()
    sessions = [
        bench.open(new_session(i, [i, *PROMPT], max_tokens=40, speculate=True)) for i in (1, 2)
    ]
    for session in sessions:
        bench.join(session)
    bench.step()
    sessions[1].draft_latency_s = 0.04
    bench.now = sessions[0].since
    bench.push(sessions[0], 2)
    assert len(bench.step()) == 1


def test_streams_that_end_leave_their_sessions() -> None:
    bench = Bench()
    session = bench.open(new_session(1, PROMPT, max_tokens=9, speculate=True, deadline_s=50.0))
    bench.join(session)
    bench.step()
    assert bench.scheduler.plan(bench.now).step is None
    bench.scheduler.stream_gone(1)
    bench.step()
    commit = bench.of(Committed)[-1]
    assert isinstance(commit, Committed)
    assert commit.plain_reason == PlainReason.PLAIN_REASON_NO_DRAFTER


_ACTIONS = st.sampled_from(
    ["open", "step", "step", "step", "tree", "wrong", "ahead", "stale", "cancel", "join", "gone"]
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(_ACTIONS, st.integers(0, 5)), max_size=80), st.integers(5, 24))
def test_whatever_happens_texts_are_right_and_pages_come_back(
    actions: list[tuple[str, int]], num_pages: int
) -> None:
    """Random opens, trees of every kind, joins, losses, cancels, preemptions; then all finish."""
    bench = Bench(num_pages=num_pages, page_tokens=4, max_running=3, max_step_rows=12)
    ids = count(1)
    sessions: dict[int, Session] = {}
    prompts: dict[int, list[int]] = {}
    cancelled: set[int] = set()
    for action, number in actions:
        live = [s for i, s in sessions.items() if i in bench.scheduler._sessions]
        session = live[number % len(live)] if live else None
        if action == "open" and len(live) < 6:
            session_id = next(ids)
            prompts[session_id] = [*range(number * 2), session_id % 3]
            sessions[session_id] = bench.open(
                new_session(
                    session_id,
                    prompts[session_id],
                    max_tokens=1 + number,
                    speculate=number % 2 == 0,
                    deadline_s=0.015,
                )
            )
        elif action == "step":
            bench.step()
        elif session is None:
            continue
        elif action == "join":
            bench.join(session, stream=number)
        elif action == "gone":
            bench.scheduler.stream_gone(number)
        elif action == "cancel" and number == 0:
            bench.cancel(session)
            cancelled.add(session.session_id)
        elif session.generated and session.streams:
            stream = min(session.streams)
            tokens = session.prefix.tokens.tolist()
            if action == "stale":
                tokens = tokens[:-1]
            elif action == "ahead":
                tokens = [*tokens, *text_after(tokens, 1 + number)]
            tree = right_tree(tokens, number)
            if action == "wrong":
                tree = from_parents([*tree.tokens, 51, 52], [*tree.parent, 0, number])
            proposal = Proposal(tree, arrived=bench.now, stream=stream)
            name = new_session(0, tokens).name
            bench.scheduler.offer(session.session_id, name, proposal, bench.now)
    bench.run()
    for session_id, prompt in prompts.items():
        text = bench.text(session_id)
        assert text == text_after(prompt, len(text))
        if session_id not in cancelled:
            assert len(text) == sessions[session_id].request.stop.max_tokens
    pool = bench.scheduler.places.pool
    assert (pool.num_used, pool.num_free + pool.num_cached) == (0, num_pages)
    ends = [e.session_id for e in bench.events if isinstance(e, Finished | Failed)]
    assert sorted(ends) == sorted(prompts)
    tally = bench.scheduler.tally
    assert 0 <= tally.accepted <= tally.drafted
    assert tally.committed == sum(len(bench.text(i)) for i in prompts)


def test_the_scheduler_tells_arrays_that_do_not_change_later() -> None:
    bench = Bench()
    session = bench.open(new_session(1, PROMPT, max_tokens=4, speculate=True))
    bench.join(session)
    bench.step()
    told = bench.of(PrefixTold)[0]
    assert isinstance(told, PrefixTold)
    before = told.tokens.copy()
    bench.run()
    assert np.array_equal(told.tokens, before)


def test_a_tree_that_came_while_the_step_ran_is_a_hit_or_a_miss_and_not_late() -> None:
    bench = Bench()
    session = bench.open(new_session(1, PROMPT, max_tokens=20, speculate=True))
    bench.join(session)
    bench.step()
    bench.push(session, 2)
    tokens = session.prefix.tokens.tolist()
    after = [*tokens, *text_after(tokens, 3)]
    during = bench.now
    bench.step()
    for outcome in (after, [*after[:-1], (after[-1] + 1) % 50]):
        proposal = Proposal(right_tree(outcome, 2), arrived=during, stream=1)
        bench.scheduler.offer(1, new_session(0, outcome).name, proposal, bench.now)
    tally = bench.scheduler.tally
    assert (tally.pushed["hit"], tally.pushed["miss"], tally.pushed["stale"]) == (1, 1, 0)
    assert tally.wasted_nodes == 2
    assert not bench.of(RefusalTold)
