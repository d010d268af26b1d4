"""Hidden states through random lives of sessions: every stream gets its rows once and in order.

Instead of hidden states the shadow target hands out the digest of the prefix that ends at a row,
so a row of another position, session or path shows at once.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from graft.common.errors import NumericFailure
from graft.common.features import FeatureSpec
from graft.common.prefix import Prefix
from graft.common.tree import Tree, from_parents
from graft.testing.shadow import ShadowTarget, new_session, run_step, text_after
from graft.v1.features_pb2 import FeatureCodec
from graft.verify.events import ClosedTold, CommitTold, FeaturesTold, PrefixTold, Rows
from graft.verify.offer import FeatureOffer, FeatureWish
from graft.verify.pages import PagePool
from graft.verify.scheduler import Scheduler, SchedulerLimits
from graft.verify.session import Session
from graft.verify.shelf import Proposal
from graft.verify.step import Captured, Outcome, Recall, Round, Step

ROW = 8
BF16 = FeatureSpec((1,))
INT8 = FeatureSpec((1,), codec=FeatureCodec.FEATURE_CODEC_INT8)
# Four values of bf16, or a scale and four of int8: eight bytes either way.
OFFER = FeatureOffer(hidden_size=4, num_layers=2, share_bytes=24 * ROW)


class Featured(ShadowTarget):
    """The shadow target with digests for hidden states; counts rows that nobody asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.poisoned: set[FeatureSpec] = set()
        self.num_captured = 0

    def run(self, step: Step) -> list[Outcome]:
        """As the target does, with captured rows."""
        return [
            replace(outcome, features=self._captured(work, outcome))
            for work, outcome in zip(step.works, super().run(step), strict=True)
        ]

    def _captured(self, work: object, outcome: Outcome) -> tuple[Captured, ...]:
        assert hasattr(work, "session")
        session: Session = work.session
        if session.feed is None:
            return ()
        tokens = session.prefix.tokens.tolist()
        if isinstance(work, Round):
            start, count = session.kv_length, outcome.accepted + 1
            tokens += outcome.tokens
        else:
            assert hasattr(work, "start") and hasattr(work, "stop")
            start, count = work.start, work.stop - work.start
        self.num_captured += count
        payload = b"".join(digest(tokens, start + row) for row in range(count))
        return tuple(
            Captured(spec, start, None if spec in self.poisoned else payload)
            for spec in session.feed.specs
        )


def digest(tokens: list[int], position: int) -> bytes:
    return Prefix(tokens[: position + 1]).digest.to_bytes(ROW, "little")


class Listener:
    """What one stream heard of one session."""

    def __init__(self, stream: int, session: Session) -> None:
        self.stream, self.session = stream, session
        self.start = self.stop = 0
        self.told: list[int] | None = None
        self.closed = 0

    def hear(self, event: object) -> None:
        """Follows one event, checking rows against the session's own prefix."""
        if isinstance(event, FeaturesTold):
            self._rows(event.rows)
            assert self.told is None or self.stop < len(self.told), "rows before their token"
        elif isinstance(event, PrefixTold):
            self.told = event.tokens.tolist()
        elif isinstance(event, CommitTold):
            assert self.told is not None
            self.told += event.tokens
            if event.rows is not None:
                assert self.start == self.stop or event.rows.start == self.stop
                assert event.rows.start == len(self.told) - 1 - len(event.tokens)
                self._rows(event.rows)
                assert self.stop == len(self.told) - 1
        elif isinstance(event, ClosedTold):
            self.closed = event.error or -1

    def _rows(self, rows: Rows) -> None:
        if self.start == self.stop:
            self.start = self.stop = rows.start
        assert rows.start == self.stop, "rows are missing or came twice"
        tokens = self.session.prefix.tokens.tolist()
        for row in range(rows.count):
            sent = rows.payload[row * ROW : (row + 1) * ROW]
            assert sent == digest(tokens, rows.start + row), f"row {rows.start + row} is another's"
        self.stop += rows.count


def new_scheduler(
    num_pages: int = 64, max_running: int = 4, offer: FeatureOffer = OFFER
) -> Scheduler:
    limits = SchedulerLimits(max_running, 32, 24, 8)
    return Scheduler(limits, PagePool(num_pages, 4), offer)


def tree_of(session: Session, rng: random.Random) -> Tree:
    """Some true path behind wrong brothers, or nothing but wrong ones."""
    prefix = session.prefix.tokens.tolist()
    tokens, parents, parent = [prefix[-1]], [-1], 0
    for token in text_after(prefix, rng.randrange(4)):
        tokens += [(token + 1) % 50, token]
        parents += [parent, parent]
        parent = len(tokens) - 1
    return from_parents([*tokens, 7], [*parents, parent])


def hear(scheduler: Scheduler, listeners: dict[tuple[int, int], Listener]) -> None:
    for event in scheduler.take_events():
        if isinstance(event, FeaturesTold | PrefixTold | CommitTold | ClosedTold):
            listener = listeners.get((event.stream, event.session_id))
            if listener is not None:
                listener.hear(event)


@pytest.mark.parametrize("seed", range(60))
def test_rows_come_once_and_in_order_through_any_life(seed: int) -> None:
    rng = random.Random(seed)
    offer = replace(OFFER, kept_bytes=rng.choice([0, 40 * ROW, 1000 * ROW]))
    scheduler = new_scheduler(rng.choice([20, 64]), rng.choice([2, 4]), offer)
    target = Featured()
    if rng.random() < 0.5:
        scheduler.hello(1, (BF16, INT8))
    sessions: dict[int, Session] = {}
    listeners: dict[tuple[int, int], Listener] = {}
    heard: list[Listener] = []
    common = [rng.randrange(50) for _ in range(20)]
    now = 0.0
    while now < 120 or scheduler.num_sessions:
        now += 1
        if now < 100 and rng.random() < 0.1:
            prompt = [*common[: rng.randrange(21)], rng.randrange(50)]
            session = new_session(
                len(sessions) + 1,
                prompt,
                max_tokens=rng.randrange(1, 40),
                speculate=rng.random() < 0.7,
                deadline_s=rng.choice([0.0, 1.5]),
            )
            sessions[session.session_id] = session
            scheduler.open(session, now)
        for session_id, session in sessions.items():
            stream = rng.randrange(1, 3)
            key = (stream, session_id)
            chance = rng.random()
            if key not in listeners and chance < 0.15:
                wish = FeatureWish(rng.choice([BF16, INT8]), rng.choice([0, 0, 5]))
                listeners[key] = Listener(stream, session)
                heard.append(listeners[key])
                scheduler.join(stream, session_id, session.ticket, wish)
            elif key in listeners and chance < 0.03:
                hear(scheduler, listeners)
                scheduler.leave(stream, session_id)
                del listeners[key]
            elif key in listeners and listeners[key].told is not None and chance < 0.6:
                tree = tree_of(session, rng) if chance < 0.5 else None
                scheduler.offer(session_id, session.name, Proposal(tree, stream=stream), now)
        run_step(scheduler, target, now)
        hear(scheduler, listeners)
        for session in sessions.values():
            assert session.feed is None or session.feed.num_bytes <= OFFER.share_bytes + 24 * ROW
    assert any(listener.stop > listener.start for listener in heard)
    assert scheduler.places.pool.num_used == 0


def drive(scheduler: Scheduler, target: Featured, listener: Listener, until: int) -> list[Recall]:
    """Plain rounds until the session has `until` tokens; the recalls that were run."""
    recalls: list[Recall] = []
    for now in range(1, 200):
        session = listener.session
        if session.length >= until:
            break
        plan = run_step(scheduler, target, float(now))
        recalls += [w for w in (plan.step.works if plan.step else ()) if isinstance(w, Recall)]
        hear(scheduler, {(listener.stream, session.session_id): listener})
    return recalls


def opened(scheduler: Scheduler, prompt: list[int], session_id: int = 1) -> Session:
    session = new_session(session_id, prompt, max_tokens=100, speculate=True, deadline_s=0.0)
    scheduler.open(session, 0.0)
    return session


def test_nobody_who_wants_rows_means_no_row_is_captured() -> None:
    scheduler, target = new_scheduler(), Featured()
    session = opened(scheduler, list(range(10)))
    drive(scheduler, target, Listener(1, session), 20)
    assert session.feed is None and target.num_captured == 0


def test_a_late_join_has_missing_rows_run_again_beside_the_rounds() -> None:
    scheduler, target = new_scheduler(), Featured()
    session = opened(scheduler, list(range(20)))
    listener = Listener(1, session)
    drive(scheduler, target, listener, 30)
    scheduler.join(1, 1, session.ticket, FeatureWish(BF16))
    recalls = drive(scheduler, target, listener, 40)
    assert sum(recall.num_rows for recall in recalls) == 24
    assert (listener.start, listener.stop) == (5, 39)
    assert scheduler.tally.recalled == 24


def test_the_prefix_cache_brings_rows_by_running_them_again() -> None:
    scheduler, target = new_scheduler(), Featured()
    scheduler.hello(1, (BF16,))
    first = opened(scheduler, list(range(16)))
    drive(scheduler, target, Listener(1, first), 20)
    second = opened(scheduler, list(range(16)), session_id=2)
    listener = Listener(1, second)
    scheduler.join(1, 2, second.ticket, FeatureWish(BF16))
    recalls = drive(scheduler, target, listener, 20)
    assert sum(recall.num_rows for recall in recalls) == 12
    assert (listener.start, listener.stop) == (0, 19)


@pytest.mark.parametrize("running", [False, True])
def test_kept_rows_of_a_cached_prefix_are_not_run_again(running: bool) -> None:
    scheduler, target = new_scheduler(offer=replace(OFFER, kept_bytes=100 * ROW)), Featured()
    scheduler.hello(1, (BF16,))
    first = opened(scheduler, list(range(16)))
    drive(scheduler, target, Listener(1, first), 21)
    if not running:
        scheduler.cancel(1)
    prompt = first.prefix.tokens.tolist()[:20]
    second = opened(scheduler, prompt, session_id=2)
    listener = Listener(1, second)
    scheduler.join(1, 2, second.ticket, FeatureWish(BF16))
    recalls = drive(scheduler, target, listener, 24)
    assert not recalls and scheduler.tally.recalled == 0
    assert scheduler.tally.kept_rows == 16
    assert (listener.start, listener.stop) == (0, 23)


def test_kept_rows_of_another_salt_are_not_found() -> None:
    scheduler, target = new_scheduler(offer=replace(OFFER, kept_bytes=100 * ROW)), Featured()
    scheduler.hello(1, (BF16,))
    for session_id, salt in ((1, "one"), (2, "other")):
        session = new_session(session_id, list(range(16)), max_tokens=4, speculate=True, salt=salt)
        scheduler.open(session, 0.0)
        drive(scheduler, target, Listener(1, session), 20)
    assert scheduler.tally.kept_rows == 0


def test_kept_rows_stay_within_their_room() -> None:
    room = 10 * ROW
    scheduler, target = new_scheduler(offer=replace(OFFER, kept_bytes=room)), Featured()
    scheduler.hello(1, (BF16, INT8))
    for session_id in range(1, 5):
        session = new_session(session_id, [session_id] * 16, max_tokens=4, speculate=True)
        scheduler.open(session, 0.0)
        drive(scheduler, target, Listener(1, session), 20)
        assert 0 < scheduler._audience._kept.num_bytes <= room


def test_rows_that_are_no_numbers_end_the_attendance_and_not_the_text() -> None:
    scheduler, target = new_scheduler(), Featured()
    session = opened(scheduler, list(range(10)))
    listener = Listener(1, session)
    scheduler.join(1, 1, session.ticket, FeatureWish(BF16))
    drive(scheduler, target, listener, 14)
    target.poisoned.add(BF16)
    drive(scheduler, target, listener, 20)
    assert listener.closed == NumericFailure.reason
    assert session.feed is None and not session.streams
    assert session.prefix.tokens.tolist()[10:] == text_after(list(range(10)), 10)


def test_a_recall_never_takes_the_last_pages() -> None:
    scheduler, target = new_scheduler(num_pages=8), Featured()
    session = opened(scheduler, list(range(20)))
    listener = Listener(1, session)
    drive(scheduler, target, listener, 25)
    scheduler.join(1, 1, session.ticket, FeatureWish(BF16))
    drive(scheduler, target, listener, 31)
    assert scheduler.tally.preemptions == 0
    assert session.length == 31


def test_a_drafter_that_needs_no_rows_ends_their_keeping() -> None:
    scheduler, target = new_scheduler(), Featured()
    scheduler.hello(1, (BF16,))
    session = opened(scheduler, list(range(10)))
    drive(scheduler, target, Listener(1, session), 14)
    assert session.feed is not None and session.feed.num_bytes == 13 * ROW
    scheduler.join(2, 1, session.ticket)
    assert session.feed is None
    scheduler.leave(2, 1)
    assert session.feed is not None and session.feed.num_bytes == 0
    scheduler.stream_gone(1)
