"""Decides what the next step runs and what its outcome means for every session.

A state machine without I/O: sessions, trees and outcomes in, events out, time passed in. It owns
the session table. Knows no tensor, no thread, and streams only by number.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from graft.common.errors import Draining, GraftError, Overloaded
from graft.common.features import FeatureSpec
from graft.common.tree import Tree, TreeRefused, root_only, trim
from graft.v1.tree_pb2 import TreeRefusal
from graft.v1.verify_pb2 import FinishReason, PlainReason
from graft.verify.audience import Audience
from graft.verify.budget import VerifyBudget
from graft.verify.drawn import fit
from graft.verify.ending import Cut
from graft.verify.events import Committed, Event, Failed, Finished, Opened, Timing
from graft.verify.offer import FeatureOffer, FeatureWish
from graft.verify.pages import PagePool
from graft.verify.places import Places
from graft.verify.ranks import ranks
from graft.verify.recall import gaps, recalls, release
from graft.verify.session import Phase, Session, Turn
from graft.verify.share import share
from graft.verify.shelf import PrefixName, Proposal
from graft.verify.step import Chunk, Outcome, Recall, Round, Step, StepTiming, Work
from graft.verify.tally import Tally

_GATHER_SHARE = 0.5
_GATHER_MAX_S = 0.025
_DURATION_SHARE = 0.1
_RETRY_MIN_S, _RETRY_MAX_S = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What the scheduler may use at most; max_step_rows is above max_running."""

    max_running: int
    max_waiting: int
    max_step_rows: int
    chunk_tokens: int


@dataclass(frozen=True, slots=True)
class Plan:
    """The next step; without one, when to ask again (None: when something happens)."""

    step: Step | None = None
    wake_at: float | None = None


class Scheduler:
    """The session table and the round machine. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: PagePool,
        offer: FeatureOffer | None = None,
        budget: VerifyBudget | None = None,
    ) -> None:
        """offer: the hidden states that drafters can have. budget: cuts trees when it pays."""
        self.limits = limits
        self.tally = Tally()
        self.draining = False
        self.places = Places(pool, limits.max_running, self.tally)
        self._sessions: dict[int, Session] = {}
        self._audience = Audience(self.tally, offer)
        self._budget = budget
        self._step: Step | None = None
        self._step_s = 0.0
        self._idle_since = 0.0
        self._duration_s = _RETRY_MIN_S

    @property
    def num_sessions(self) -> int:
        """Sessions that run or wait."""
        return len(self._sessions)

    def drain(self) -> None:
        """From now on no session is opened."""
        self.draining = True

    def take_events(self) -> list[Event]:
        """What happened since the last call, in order."""
        events, self._audience.events = self._audience.events, []
        return events

    def open(self, session: Session, now: float) -> None:
        """Queues a session; a refusal becomes its Failed event."""
        places = self.places
        error: GraftError
        if self.draining:
            error = Draining("this replica is shutting down", retry_after_s=1.0)
        elif len(places.waiting) >= self.limits.max_waiting + places.num_free:
            error = Overloaded(
                f"{len(places.running)} sessions run and {len(places.waiting)} wait, "
                "as many as this replica takes",
                retry_after_s=self._retry_after_s(),
            )
        else:
            session.arrived = session.since = now
            self._sessions[session.session_id] = session
            places.waiting.append(session)
            self._audience.opened(session)
            self._end_if_replayed_to_its_end(session)
            return
        self._happened(Failed(session.session_id, error))

    def cancel(self, session_id: int) -> None:
        """Ends a session; one in a running step keeps its pages until that step is over."""
        session = self._sessions.get(session_id)
        if session is None:
            return
        if session.in_step:
            session.cancelled = True
        else:
            self._finish(session, Cut((), FinishReason.FINISH_REASON_CANCELLED))

    def set_deadline(self, session_id: int, tree_deadline_s: float) -> None:
        """Changes how long a session's rounds may wait for a tree."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.wait_at_most(tree_deadline_s)

    def hello(self, stream: int, specs: tuple[FeatureSpec, ...]) -> None:
        """A draft service says which hidden states its joins may ask for."""
        self._audience.hello(stream, specs)

    def join(
        self, stream: int, session_id: int, ticket: bytes, wish: FeatureWish | None = None
    ) -> None:
        """A draft service asks to attend a session, and for hidden states of it."""
        self._audience.join(stream, session_id, self._sessions.get(session_id), ticket, wish)

    def leave(self, stream: int, session_id: int) -> None:
        """A draft service no longer attends a session."""
        session = self._sessions.get(session_id)
        if session is not None and stream in session.streams:
            self._audience.leave(stream, session)

    def stream_gone(self, stream: int) -> None:
        """A draft service's stream ended."""
        self._audience.gone(stream)
        for session in self._sessions.values():
            if stream in session.streams:
                self._audience.leave(stream, session)

    def offer(self, session_id: int, name: PrefixName, proposal: Proposal, now: float) -> None:
        """A draft service sends a tree, or says that it has none, for a prefix."""
        session = self._sessions.get(session_id)
        if session is not None and proposal.stream in session.streams:
            try:
                fitted = fit(proposal, session.request.sampling, name[0])
            except TreeRefused as refused:
                empty = replace(proposal, tree=None)
                self.refuse(session_id, name, empty, refused.refusal)
                return
            proposal = fitted.proposal
            if proposal.arrived <= session.since:
                # It came while the step ran that has just ended, ahead of the commit.
                passed = name[0] <= session.length and name != session.name
                if passed and not session.was_at(name):
                    self.tally.count_miss(proposal.tree)
                    return
                self.tally.pushed["hit"] += name == session.name and proposal.tree is not None
            self.tally.trees_cut += fitted.cut
            self.tally.trees_redrawn += fitted.redrawn
        self._audience.offer(session_id, session, name, proposal, now)

    def refuse(
        self,
        session_id: int,
        name: PrefixName,
        proposal: Proposal,
        refusal: TreeRefusal.ValueType,
    ) -> None:
        """A draft service sent a tree that breaks the rules; the round goes on without one."""
        self._audience.refuse(session_id, name, proposal, refusal)
        session = self._sessions.get(session_id)
        if session is not None and proposal.stream in session.streams and name == session.name:
            self.offer(session_id, name, replace(proposal, refused=True), proposal.arrived)

    def fail_all(self, error: GraftError) -> None:
        """Ends every session by an error."""
        for session in [*self._sessions.values()]:
            self._fail(session, error)

    def plan(self, now: float) -> Plan:
        """The next step, once something is ready and nothing that is due soon would miss it."""
        assert self._step is None, "a step is planned while one runs"
        for session in self.places.admit():
            self._audience.placed(session)
            if not session.opened:
                session.opened = True
                cached = min(session.kv_length, session.prompt_length)
                self._happened(Opened(session.session_id, cached))
        turns: list[tuple[Session, Turn]] = []
        awaited: list[Session] = []
        unfilled: list[Session] = []
        for session in self.places.running:
            if session.phase is Phase.PREFILL:
                unfilled.append(session)
                continue
            turn = session.turn(now)
            if turn is None:
                awaited.append(session)
            else:
                turns.append((session, turn))
        deadline = min((session.deadline for session in awaited), default=None)
        recalling = gaps(self.places)
        if not turns and not unfilled and not recalling:
            return Plan(wake_at=deadline)
        if turns or unfilled:
            ready = [turn.decided for _, turn in turns] + [session.since for session in unfilled]
            hold_until = self._hold_until(min(ready), awaited)
            if deadline is not None and hold_until > now and not recalling:
                return Plan(wake_at=min(hold_until, deadline))
        works = self._compose(turns, unfilled)
        if not works:
            return self.plan(now) if turns or unfilled else Plan(wake_at=deadline)
        for work in works:
            work.session.in_step = True
        self._step = Step(tuple(works))
        return Plan(step=self._step)

    def complete(self, step: Step, outcomes: list[Outcome], timing: StepTiming, now: float) -> None:
        """Commits what a step came to."""
        self._end_step(step, timing, now)
        spent = Timing(
            forward_s=timing.forward_s,
            choice_s=timing.choice_s,
            num_rows=step.num_rows,
            num_sessions=step.num_sessions,
        )
        for work, outcome in zip(step.works, outcomes, strict=True):
            session = work.session
            if session.phase is Phase.FINISHED:
                continue  # a recall of a session that its round has ended
            if session.cancelled:
                self._finish(session, Cut((), FinishReason.FINISH_REASON_CANCELLED))
            elif outcome.error is not None:
                self._fail(session, outcome.error)
            elif isinstance(work, Recall):
                self._note_recall(work, outcome)
            elif isinstance(work, Chunk) and not work.last:
                self._advance_prefill(work, outcome)
            else:
                self._commit(work, outcome, _timing(work, spent, timing.started), now)

    def abandon(self, step: Step, error: GraftError, timing: StepTiming, now: float) -> None:
        """Ends the sessions of a step that raised; what they wrote is not to be reused."""
        self._end_step(step, timing, now)
        for work in step.works:
            if work.session.phase is not Phase.FINISHED:
                self._fail(work.session, error)

    def check(self) -> None:
        """Asserts what holds between steps; linear in the state."""
        self.places.check()
        placed = {s.session_id for s in (*self.places.running, *self.places.waiting)}
        assert placed == set(self._sessions), "the session table and the places disagree"

    def _hold_until(self, ready_at: float, awaited: list[Session]) -> float:
        """Until when to hold the step for trees due soon, so that sessions meet in one batch.

        Without it two synchronous sessions would take turns, each drafting while the other's
        step runs, and every step would read the weights for one of them.
        """
        window = min(_GATHER_SHARE * self._step_s, _GATHER_MAX_S)
        until = max(ready_at, self._idle_since) + window
        return until if any(session.tree_due() <= until for session in awaited) else 0.0

    def _compose(self, turns: list[tuple[Session, Turn]], unfilled: list[Session]) -> list[Work]:
        """Rounds of all that are ready, and prefix chunks in the rows they leave.

        Growing an old session may preempt a young one that was to take part.
        """
        placed = [
            (session, turn)
            for session, turn in turns
            if session.phase is Phase.DECODING and self.places.grow(session, session.kv_length + 1)
        ]
        unfilled = [session for session in unfilled if session.phase is Phase.PREFILL]
        rows = self.limits.max_step_rows - len(placed)
        recalling = gaps(self.places)
        due = sum(session.length - session.kv_length for session in unfilled)
        due += sum(len(gap) for _, gap in recalling)
        decoding = any(session.phase is Phase.DECODING for session in self.places.running)
        chunk_rows = min(due, rows, self.limits.chunk_tokens if decoding else rows)
        works: list[Work] = [*self._rounds(placed, rows - chunk_rows)]
        for session in unfilled:
            count = min(session.length - session.kv_length, chunk_rows)
            if count:
                start, stop = session.kv_length, session.kv_length + count
                session.pages().check_writable(start, stop)
                works.append(Chunk(session, start, stop))
                chunk_rows -= count
        return [*works, *recalls(self.places, recalling, chunk_rows)]

    def _rounds(self, placed: list[tuple[Session, Turn]], rows: int) -> list[Round]:
        """The rounds of a step, with trees cut to budget, context, rows and pages."""
        trees = [_within_room(turn.tree, session) for session, turn in placed]
        if self._budget is not None:
            trees = self._trimmed(self._budget, [session for session, _ in placed], trees)
        granted = share([tree.num_nodes - 1 for tree in trees], rows)
        rounds = []
        for (session, turn), tree, num_drafted in zip(placed, trees, granted, strict=True):
            table, pool = session.pages(), self.places.pool
            spare = table.capacity + pool.num_available * pool.page_tokens - session.kv_length
            tree = trim(tree, min(1 + num_drafted, spare), tree.num_nodes)
            table.reserve(session.kv_length + tree.num_nodes)
            table.check_writable(session.kv_length, session.kv_length + tree.num_nodes)
            if session.give_up(turn):
                self.tally.draft_timeouts += 1
            if turn.tree is not None and tree.num_nodes == 1:
                turn = replace(turn, tree=None, plain_reason=PlainReason.PLAIN_REASON_NO_ROOM)
            rounds.append(Round(session, tree, turn))
        return rounds

    def _trimmed(
        self, budget: VerifyBudget, sessions: list[Session], trees: list[Tree]
    ) -> list[Tree]:
        """The trees without the nodes that make the step slower than they are worth."""
        kept = budget.keep([session.session_id for session in sessions], trees)
        self.tally.trimmed += sum(tree.num_nodes for tree in trees) - sum(kept)
        return [trim(tree, count, tree.num_nodes) for tree, count in zip(trees, kept, strict=True)]

    def _end_step(self, step: Step, timing: StepTiming, now: float) -> None:
        assert step is self._step, "another step was planned"
        self._step = None
        self._step_s = now - timing.started
        self._idle_since = now
        self.tally.steps += 1
        if self._budget is not None and all(isinstance(work, Round) for work in step.works):
            self._budget.timed(step.num_rows, timing.forward_s + timing.choice_s)
        for work in step.works:
            work.session.in_step = False
            if isinstance(work, Recall):
                release(self.places, work)

    def _advance_prefill(self, chunk: Chunk, outcome: Outcome) -> None:
        session = chunk.session
        session.kv_length = chunk.stop
        session.prompt_logprobs.extend(outcome.prompt_logprobs)
        session.pages().publish(session.prefix.tokens, session.kv_length)
        self.tally.prefilled += chunk.num_rows
        self._audience.captured(session, outcome.features)
        self._audience.tell_features(session)

    def _note_recall(self, recall: Recall, outcome: Outcome) -> None:
        self.tally.recalled += recall.num_rows
        self._audience.captured(recall.session, outcome.features)
        self._audience.tell_features(recall.session)

    def _commit(self, work: Chunk | Round, outcome: Outcome, timing: Timing, now: float) -> None:
        session = work.session
        reason = PlainReason.PLAIN_REASON_PREFILL
        num_drafted, depth = 0, 0
        if isinstance(work, Chunk):
            session.prompt_logprobs.extend(outcome.prompt_logprobs)
            self.tally.prefilled += work.num_rows
        else:
            reason = work.turn.plain_reason
            num_drafted, depth = work.tree.num_nodes - 1, work.tree.max_depth
            session.num_rounds += 1
            session.num_drafted += num_drafted
            if self._budget is not None:
                self._budget.walked(session.session_id, work.tree, outcome.nodes)
        self._audience.captured(session, outcome.features)
        used = session.name
        if isinstance(work, Round):
            lasted_s = now - session.since
            session.patience.ran(len(outcome.tokens), num_drafted > 0, self._step_s, lasted_s)
        cut, dead = session.commit(outcome.tokens, outcome.accepted, now)
        session.phase = Phase.DECODING
        session.pages().trim(session.kv_length)
        session.pages().publish(session.prefix.tokens, session.kv_length)
        if isinstance(work, Chunk):
            self._audience.published(session)
        kept = len(cut.tokens)
        accepted = min(outcome.accepted, kept)
        accepted_ranks, rejected = (
            ranks(work.tree, outcome.nodes) if isinstance(work, Round) else ((), 0)
        )
        self.tally.count_round(kept, accepted, num_drafted, reason)
        self.tally.count_rule(session.request.sampling)
        for name, proposal in dead:
            if name != used:
                self.tally.count_miss(proposal.tree)
        self.tally.pushed["hit"] += session.has_tree
        self._happened(
            Committed(
                session.session_id,
                cut.tokens,
                accepted,
                num_drafted,
                depth,
                session.length,
                reason,
                timing,
                outcome.logprobs[:kept],
                tuple(session.prompt_logprobs),
                outcome.trace,
                accepted_ranks[:accepted],
                rejected if kept == len(outcome.tokens) else 0,
            )
        )
        session.prompt_logprobs_due = False
        session.prompt_logprobs.clear()
        if cut.ends:
            self._finish(session, cut)
        else:
            self._audience.tell_commit(session, cut.tokens, accepted, num_drafted)

    def _finish(self, session: Session, cut: Cut) -> None:
        self._happened(
            Finished(
                session.session_id,
                cut.reason,
                cut.stop_token,
                session.num_rounds,
                session.num_drafted,
                session.num_accepted,
            )
        )
        self.tally.finished[cut.reason] += 1
        lasted = self._idle_since - session.arrived
        self._duration_s += _DURATION_SHARE * (lasted - self._duration_s)
        self._remove(session)

    def _fail(self, session: Session, error: GraftError) -> None:
        self._happened(Failed(session.session_id, error))
        self.tally.failures += 1
        if session.table is not None:
            session.table.release(forget=True)
        self._remove(session)

    def _remove(self, session: Session) -> None:
        del self._sessions[session.session_id]
        self._audience.published(session)
        self.places.remove(session)
        session.shelf.clear()
        if self._budget is not None:
            self._budget.forget(session.session_id)
        self._audience.tell_end(session)

    def _end_if_replayed_to_its_end(self, session: Session) -> None:
        """A replay whose committed tokens already hold the end has only that end to tell."""
        committed = session.request.committed.tolist()
        cut = session.ending.cut(committed, 0)
        if cut.ends:
            self._happened(Opened(session.session_id, 0))
            self._finish(session, cut)

    def _happened(self, event: Event) -> None:
        self._audience.events.append(event)

    def _retry_after_s(self) -> float:
        """When a place may come free, going by how long sessions last."""
        turns = (len(self.places.waiting) + 1) / self.limits.max_running
        return min(_RETRY_MAX_S, max(_RETRY_MIN_S, self._duration_s * turns))


def _within_room(tree: Tree | None, session: Session) -> Tree:
    """The tree without nodes that the budget or the context leaves no room for."""
    if tree is None:
        return root_only(session.prefix.root)
    return trim(tree, tree.num_nodes, session.room - 1)


def _timing(work: Work, spent: Timing, started: float) -> Timing:
    """Where the time of one round went, before its commit moves the session on.

    spent: what all sessions of the step share.
    """
    if not isinstance(work, Round):
        return spent
    turn = work.turn
    return replace(
        spent,
        draft_s=turn.draft_s,
        tree_wait_s=max(0.0, turn.decided - work.session.since),
        queue_s=max(0.0, started - turn.decided),
    )
