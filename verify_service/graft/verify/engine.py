"""The thread that owns the scheduler and the target: commands in, steps run, events out.

The event loop posts commands and gets lists of events through `deliver`; nothing else crosses.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from graft.common import log
from graft.common.errors import GraftError
from graft.verify.events import Event
from graft.verify.runner import Runner
from graft.verify.scheduler import Scheduler
from graft.verify.step import Step, StepTiming

_log = log.get("engine")

Command = Callable[[Scheduler, float], None]
"""Changes the scheduler; the second argument is the time."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """How the engine is doing. Pages that are cached count as free. busy_s is 0 when idle."""

    num_running: int
    num_waiting: int
    num_pages: int
    num_pages_free: int
    page_tokens: int
    busy_s: float
    alive: bool


class Engine:
    """Runs steps on a thread of its own until stopped.

    deliver is called on that thread with the events of one turn, in order.
    """

    def __init__(
        self, scheduler: Scheduler, runner: Runner, deliver: Callable[[list[Event]], None]
    ) -> None:
        self.scheduler = scheduler
        self._runner = runner
        self._deliver = deliver
        self._inbox: list[Command] = []
        self._changed = threading.Condition()
        self._stopping = False
        self._busy_since: float | None = None
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="graft-engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Ends the thread after its running step; False when that outlasted `timeout_s`."""
        with self._changed:
            self._stopping = True
            self._changed.notify()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def submit(self, command: Command) -> None:
        """Has a command applied between steps; callable from any thread."""
        with self._changed:
            self._inbox.append(command)
            self._changed.notify()

    @property
    def num_unapplied(self) -> int:
        """Commands that wait for the running step to end."""
        return len(self._inbox)

    def snapshot(self) -> Snapshot:
        """Counts as of now; callable from any thread."""
        busy_since = self._busy_since
        places = self.scheduler.places
        return Snapshot(
            num_running=len(places.running),
            num_waiting=len(places.waiting),
            num_pages=places.pool.num_pages,
            num_pages_free=places.pool.num_available,
            page_tokens=places.pool.page_tokens,
            busy_s=0.0 if busy_since is None else time.monotonic() - busy_since,
            alive=self._thread.is_alive() and not self._failed,
        )

    def _run(self) -> None:
        wake_at: float | None = None
        try:
            while (commands := self._take(wake_at)) is not None:
                self._busy_since = time.monotonic()
                wake_at = self._turn(commands)
                self._busy_since = None
        except Exception:
            # A broken invariant: nothing this engine holds can be trusted any more.
            self._failed = True
            _log.exception("engine failed")
            self.scheduler.fail_all(GraftError("the engine of this replica failed"))
            self._flush()

    def _take(self, wake_at: float | None) -> list[Command] | None:
        """Waits for commands or until `wake_at`; None when the engine is to end."""
        with self._changed:
            while not self._inbox and not self._stopping:
                left = None if wake_at is None else wake_at - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
            if self._stopping:
                return None
            commands, self._inbox = self._inbox, []
            return commands

    def _turn(self, commands: list[Command]) -> float | None:
        """Applies commands and runs at most one step; returns when to look again."""
        now = time.monotonic()
        for command in commands:
            command(self.scheduler, now)
        plan = self.scheduler.plan(now)
        # Refusals, prefixes and openings must not wait for the step that follows them.
        self._flush()
        if plan.step is None:
            return plan.wake_at
        self._run_step(plan.step)
        if not self.scheduler.num_sessions:
            self.scheduler.check()
        self._flush()
        return 0.0

    def _run_step(self, step: Step) -> None:
        started = time.monotonic()
        try:
            outcomes, timing = self._runner.run(step)
        except Exception:
            _log.exception("step failed", rows=step.num_rows, sessions=len(step.works))
            timing = StepTiming(started, time.monotonic() - started, 0.0)
            error = GraftError("the forward pass of this session failed")
            self.scheduler.abandon(step, error, timing, time.monotonic())
            return
        self.scheduler.complete(step, outcomes, timing, time.monotonic())

    def _flush(self) -> None:
        events = self.scheduler.take_events()
        if events:
            self._deliver(events)
