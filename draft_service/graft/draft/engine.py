"""Runs the proposers on one thread, for all sessions that are ready at once.

Knows mirrors, seats and proposers; knows no stream and no event loop. Events come in by `post` from
any thread, in order; outcomes leave through one callback, on the engine's thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue

from graft.common import log
from graft.common.errors import GraftError
from graft.common.tier import Tier
from graft.common.tree import Tree, TreeRefused
from graft.draft.events import (
    Broke,
    Closed,
    Committed,
    Event,
    Featured,
    Opened,
    Outcome,
    Proposed,
    Refused,
    Retiered,
)
from graft.draft.features import FeatureChunk
from graft.draft.metrics import DraftMetrics
from graft.draft.mirror import ChainBroken, Mirror
from graft.draft.predicted import Predictions
from graft.draft.prepare import Preparer
from graft.draft.proposers.base import Follower, Foreseen, Proposal, Proposer, Seat, Wire
from graft.draft.sendable import messages
from graft.v1.tree_pb2 import CandidateTree

_log = log.get("engine")


@dataclass(slots=True, eq=False)
class _Attended:
    """A session in the engine. `seat` is None while its proposer's state is missing."""

    key: int
    mirror: Mirror
    tier: Tier
    seat: Seat | None = None
    proposer: str = field(default="")
    max_trees: int = 1


class Engine:
    """Applies events, then lets each proposer work once for all its sessions with a new prefix.

    A session whose tier drafts nothing follows its prefix in silence, and drafts again, for the
    prefix it has by then, as soon as its tier does.

    While a proposer works, events gather and are applied together before the next batch, so only
    the newest prefix of a session is worked on.
    """

    def __init__(
        self,
        proposers: Mapping[str, Proposer],
        deliver: Callable[[Sequence[Outcome]], None],
        metrics: DraftMetrics,
    ) -> None:
        self._proposers = proposers
        self._needing = {name for name, one in proposers.items() if one.describe().needs}
        self._followers = {
            name: one for name, one in proposers.items() if isinstance(one, Follower)
        }
        self._deliver = deliver
        self._metrics = metrics
        self._predictions = Predictions()
        self._preparer = Preparer(proposers, metrics, self._predictions)
        self._inbox: SimpleQueue[Event | None] = SimpleQueue()
        self._sessions: dict[int, _Attended] = {}
        self._ready: dict[int, _Attended] = {}
        self._behind: dict[int, _Attended] = {}
        self._outcomes: list[Outcome] = []
        self._known_to_fail: set[str] = set()
        self._busy_s = 0.0
        self._working_since: float | None = None
        self._thread = threading.Thread(target=self._run, name="draft-engine", daemon=True)

    @property
    def busy_s(self) -> float:
        """Seconds spent on work since the start, the work at hand included."""
        return self._busy_s + self.working_s

    @property
    def working_s(self) -> float:
        """Seconds since the work at hand began; 0 when there is none. A hang shows here."""
        since = self._working_since
        return 0.0 if since is None else time.perf_counter() - since

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Asks the thread to end after the work at hand; False when it has not by `timeout_s`.

        A proposer that hangs is left behind on its daemon thread.
        """
        self._inbox.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def post(self, event: Event) -> None:
        """Queues an event; from any thread."""
        self._inbox.put(event)

    def _run(self) -> None:
        while (events := self._gather()) is not None:
            self._working_since = started = time.perf_counter()
            if events:
                self.step(events)
            elif self._behind:
                self.follow()
            else:
                self.look_ahead()
            self._working_since = None
            self._busy_s += time.perf_counter() - started

    def _gather(self) -> list[Event] | None:
        """All events there are; waits for one while nothing can be prepared. None is the end."""
        events: list[Event] = []
        while True:
            try:
                idle = not (events or self._behind or self._preparer.wants_work)
                event = self._inbox.get(block=idle)
            except Empty:
                return events
            if event is None:
                return None
            events.append(event)

    def look_ahead(self) -> None:
        """Prepares some likely outcomes and hands them out; the thread's body without events."""
        for made in self._preparer.step():
            self._outcomes.append(
                Proposed(
                    made.key,
                    made.proposer,
                    made.prefix_length,
                    made.prefix_digest,
                    made.trees,
                    ahead=True,
                )
            )
        self._flush()

    def follow(self) -> None:
        """Has sessions that are behind read on, and propose as soon as they are not."""
        name = next(iter(self._behind.values())).proposer
        follower = self._followers[name]
        batch = [one for one in self._behind.values() if one.proposer == name]
        seats = [one.seat for one in batch if one.seat is not None]
        try:
            before = [follower.behind(seat) for seat in seats]
            follower.follow(seats)
            still = [follower.behind(seat) for seat in seats]
        except Exception as error:
            self._failed(name, batch, error)
            return
        for one, was, now in zip(batch, before, still, strict=True):
            if not now:
                self._ready[one.key] = one
            if not now or now >= was:  # who cannot read on is asked again after the next commit
                del self._behind[one.key]
        self.step(())

    def step(self, events: Sequence[Event]) -> None:
        """Applies `events` and proposes for every session with a new prefix. The thread's body."""
        for event in events:
            self._apply(event)
        ready = [session for session in self._ready.values() if not session.tier.off]
        self._ready = {}
        batches: dict[str, list[_Attended]] = {}
        for session in ready:
            batches.setdefault(session.tier.proposer, []).append(session)
        for name, batch in batches.items():
            self._propose(name, batch)
            self._flush()
        self._flush()

    def _flush(self) -> None:
        if self._outcomes:
            outcomes, self._outcomes = self._outcomes, []
            self._deliver(outcomes)

    def _apply(self, event: Event) -> None:
        if isinstance(event, Opened):
            session = _Attended(event.key, event.mirror, event.tier, max_trees=event.max_trees)
            self._sessions[event.key] = self._ready[event.key] = session
            self._take_features(session, event.features)
            return
        known = self._sessions.get(event.key)
        if known is None:
            return
        match event:
            case Committed():
                self._commit(known, event)
            case Featured():
                if self._take_features(known, (event.features,)) and (
                    known.mirror.features_complete
                ):
                    self._ready[known.key] = known
            case Retiered():
                if event.tier != known.tier:
                    self._preparer.forget(known.key)
                if known.tier.off and not event.tier.off:
                    self._ready[known.key] = known
                known.tier = event.tier
            case Refused():
                self._preparer.refused(known.key, event.prefix_length)
            case Closed():
                self._forget(known)

    def _commit(self, session: _Attended, event: Committed) -> None:
        self._predictions.committed(session.mirror, event.tokens)
        try:
            session.mirror.commit(event.tokens, event.prefix_length, event.prefix_digest)
        except ChainBroken as error:
            self._break(session, error)
            return
        if event.features is not None and not self._take_features(session, (event.features,)):
            return
        if not self._preparer.committed(session.key, event.tokens, event.num_drafted):
            self._ready[session.key] = session
        if session.seat is not None:
            proposer = self._proposers[session.proposer]
            try:
                proposer.commit(session.seat, event.tokens)
            except Exception as error:
                self._failed(session.proposer, [session], error)

    def _take_features(self, session: _Attended, chunks: Sequence[FeatureChunk]) -> bool:
        """Adds rows to the mirror; False when they do not follow and the session is forgotten."""
        try:
            session.mirror.take_features(chunks)
        except ChainBroken as error:
            self._break(session, error)
            return False
        return True

    def _break(self, session: _Attended, error: ChainBroken) -> None:
        self._forget(session)
        self._outcomes.append(Broke(session.key, str(error)))

    def _forget(self, session: _Attended) -> None:
        self._sessions.pop(session.key, None)
        self._ready.pop(session.key, None)
        self._unseat(session)

    def _propose(self, name: str, batch: list[_Attended]) -> None:
        """One batch of one proposer; every session of it gets exactly one outcome."""
        seated = [session for session in batch if self._seat(name, session)]
        batch, seated = self._without_behind(name, batch, seated)
        started = time.perf_counter()
        made: dict[int, Proposal] = {}
        seen: dict[int, Foreseen] = {}
        if seated:
            try:
                made, seen = self._made(name, seated)
            except Exception as error:
                self._failed(name, seated, error)
        elapsed_s = time.perf_counter() - started
        if seated:
            self._metrics.propose_seconds.labels(name).observe(elapsed_s)
            self._metrics.batch_sessions.observe(len(seated))
        for session in batch:
            key = session.key
            self._outcomes.append(
                self._proposed(session, name, made.get(key), seen.get(key), elapsed_s)
            )

    def _without_behind(
        self, name: str, batch: list[_Attended], seated: list[_Attended]
    ) -> tuple[list[_Attended], list[_Attended]]:
        """Those that are not behind; verify is told of the others, once."""
        proposer = self._followers.get(name)
        if proposer is None:
            return batch, seated
        late = {
            one.key: one for one in seated if one.seat is not None and proposer.behind(one.seat)
        }
        if not late:
            return batch, seated
        for key, one in late.items():
            if key not in self._behind:
                prefix = one.mirror.prefix
                self._outcomes.append(
                    Proposed(key, name, len(prefix), prefix.digest, (), behind=True)
                )
        self._behind |= late
        return (
            [one for one in batch if one.key not in late],
            [one for one in seated if one.key not in late],
        )

    def _made(
        self, name: str, batch: list[_Attended]
    ) -> tuple[dict[int, Proposal], dict[int, Foreseen]]:
        """Proposals by key, and what is seen behind those of sessions that are looked ahead of."""
        near: dict[int, Seat] = {}
        far: dict[int, Seat] = {}
        for one in batch:
            assert one.seat is not None, "a session was asked for without a seat"
            ahead = self._preparer.foresees(name, one.seat, one.max_trees)
            (far if ahead else near)[one.key] = one.seat
        made: dict[int, Proposal] = {}
        if near:
            proposals = self._proposers[name].propose([*near.values()])
            if len(proposals) != len(near):
                raise GraftError(f"{name} made {len(proposals)} proposals for {len(near)} sessions")
            for (key, seat), proposal in zip(near.items(), proposals, strict=True):
                if proposal is None or isinstance(proposal, Tree):
                    proposal = self._predictions.blended(seat.mirror, seat.tier, proposal)
                made[key] = proposal
        seen: dict[int, Foreseen] = {}
        if far:
            seen.update(zip(far, self._preparer.propose(name, [*far.values()]), strict=True))
        return made | {key: one.tree for key, one in seen.items()}, seen

    def _seat(self, name: str, session: _Attended) -> bool:
        """Seats the session at proposer `name` with its tier; False when it drafts nothing."""
        tier = _fitted(session.tier, session.mirror)
        if session.proposer != name:
            self._unseat(session)
        if tier.off or name not in self._proposers:
            return False
        if name in self._needing and not session.mirror.features_complete:
            return False  # rows are on their way; until they are here it has nothing to say
        if session.seat is None:
            try:
                state = self._proposers[name].open(session.mirror)
            except Exception as error:
                self._failed(name, [], error)
                return False
            session.seat, session.proposer = Seat(session.mirror, tier, state), name
        session.seat.tier = tier
        return True

    def _unseat(self, session: _Attended) -> None:
        self._behind.pop(session.key, None)
        if session.seat is None:
            return
        self._preparer.forget(session.key)
        seat, session.seat = session.seat, None
        try:
            self._proposers[session.proposer].close(seat)
        except Exception as error:
            self._failed(session.proposer, [], error)

    def _failed(self, name: str, sessions: Sequence[_Attended], error: Exception) -> None:
        """Counts a proposer's exception and takes its state of `sessions`, to be opened anew."""
        self._metrics.failures.labels(name).inc()
        if name in self._known_to_fail:
            _log.warning("proposer failed again", proposer=name, error=repr(error))
        else:
            self._known_to_fail.add(name)
            _log.error("proposer failed", proposer=name, exc_info=error)
        for session in sessions:
            self._unseat(session)

    def _proposed(
        self,
        session: _Attended,
        name: str,
        proposal: Proposal,
        seen: Foreseen | None,
        elapsed_s: float,
    ) -> Proposed:
        mirror = session.mirror
        length, digest = len(mirror.prefix), mirror.prefix.digest
        trees: tuple[CandidateTree, ...] = ()
        verbatim = False
        if isinstance(proposal, Wire):
            trees, verbatim = proposal.messages, True
        elif proposal is not None and session.seat is not None:
            try:
                trees = messages(proposal, session.seat, elapsed_s)
            except TreeRefused as error:
                self._metrics.withheld.labels("malformed").inc()
                self._failed(name, [session], error)
        if session.seat is not None and not verbatim:
            self._preparer.answered(session.key, name, session.seat, seen, session.max_trees)
        return Proposed(session.key, name, length, digest, trees, verbatim, elapsed_s)


def _fitted(tier: Tier, mirror: Mirror) -> Tier:
    """The tier within what verify takes, the room that is left and the rule of the session."""
    limits, room = mirror.limits, max(0, mirror.room - 1)
    if tier.num_draft_tokens > limits.max_nodes or tier.num_steps > min(limits.max_depth, room):
        tier = tier.within(limits.max_nodes, limits.max_depth)
        tier = replace(tier, num_steps=min(tier.num_steps, room))
    if tier.topk > 1 and mirror.sampling.compares_probs:
        tier = replace(tier, topk=1)  # such rules take chains alone
    return tier
