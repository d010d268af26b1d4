"""Starts children, watches them, starts them again, and ends them in order. Knows no service."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from graft.cli.restart import GiveUp, RestartPolicy, exit_words
from graft.cli.screen import Screen, is_error, plain
from graft.common.errors import GraftError

_PROBE_INTERVAL_S = 0.1
_KILL_AFTER_S = 5.0
_TAIL_LINES = 200


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """One process: the command that starts it and how to ask whether it serves.

    `trouble` blocks for a moment and returns None when the child serves. The end of an essential
    child ends everything; others are tried again and again once all has been ready.
    """

    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    address: str
    trouble: Callable[[], str | None]
    essential: bool = True


class ChildFailed(GraftError):
    """A child could not be kept running."""


@dataclass(slots=True)
class _Child:
    spec: ChildSpec
    policy: RestartPolicy = field(default_factory=RestartPolicy)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    tail: deque[str] = field(default_factory=lambda: deque(maxlen=_TAIL_LINES))
    process: Process | None = None


class Supervisor:
    """Keeps the children of one plan running until it is told to stop.

    Children are ended in the order of `specs`, last one first.
    """

    def __init__(self, specs: Sequence[ChildSpec], screen: Screen, *, drain_s: float) -> None:
        self._children = [_Child(spec) for spec in specs]
        self._screen = screen
        self._drain_s = drain_s
        self._stopping = False
        self._was_ready = False

    async def run(self, on_ready: Callable[[], None]) -> None:
        """Runs until SIGINT or SIGTERM; a second one ends the children at once.

        Raises:
            ChildFailed: a child could not be kept running; the others have been ended.
        """
        stop, hurry = asyncio.Event(), asyncio.Event()
        self._catch_signals(stop, hurry)
        keepers = [asyncio.create_task(self._keep(child)) for child in self._children]
        ready = asyncio.create_task(self._announce(on_ready))
        stopped = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait([stopped, *keepers], return_when=asyncio.FIRST_COMPLETED)
            while not stop.is_set() and not (failed := _failures(keepers)):
                running = [task for task in keepers if not task.done()]
                await asyncio.wait([stopped, *running], return_when=asyncio.FIRST_COMPLETED)
            if stop.is_set():
                self._screen.close()
                self._screen.note("stopping: waiting for running answers (again to end now)")
            else:
                raise failed[0]
        finally:
            self._stopping = True
            ready.cancel()
            stopped.cancel()
            await self._end_all(hurry)
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(ready, stopped, *keepers, return_exceptions=True)
            self._screen.close()

    def _catch_signals(self, stop: asyncio.Event, hurry: asyncio.Event) -> None:
        def arrived() -> None:
            (hurry if stop.is_set() else stop).set()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, arrived)

    async def _announce(self, on_ready: Callable[[], None]) -> None:
        await asyncio.gather(*(child.ready.wait() for child in self._children))
        self._was_ready = True
        on_ready()

    async def _keep(self, child: _Child) -> None:
        spec = child.spec
        while True:
            began = time.monotonic()
            process = await self._start(child)
            probing = asyncio.create_task(self._probe(child, again=self._was_ready))
            reading = asyncio.create_task(self._read(child, process))
            code = await process.wait()
            probing.cancel()
            await asyncio.gather(probing, reading, return_exceptions=True)
            if self._stopping:
                return
            was_ready = child.ready.is_set()
            child.ready.clear()
            needed = spec.essential or not self._was_ready
            verdict = child.policy.died(time.monotonic(), code, was_ready=was_ready, needed=needed)
            ran_s = time.monotonic() - began
            if isinstance(verdict, GiveUp):
                sentence = (
                    f"{spec.name}: {verdict.why} ({exit_words(code)}): {last_error(child.tail)}"
                )
                if needed:
                    raise ChildFailed(sentence)
                self._screen.note(f"{sentence}; serving without it", "red")
                return
            why = (
                f": {last_error(child.tail)}; serving without it," if child.policy.hopeless else ";"
            )
            self._screen.note(
                f"{spec.name} died after {ran_s:.1f} s ({exit_words(code)}){why} starting it again "
                f"on {spec.address}" + (f" in {verdict.delay_s:g} s" if verdict.delay_s else ""),
                "yellow",
            )
            await asyncio.sleep(verdict.delay_s)

    async def _start(self, child: _Child) -> Process:
        spec = child.spec
        child.tail.clear()
        if not self._was_ready:
            self._screen.state(spec.name, "starting")
        child.process = await asyncio.create_subprocess_exec(
            *spec.command,
            stdin=DEVNULL,
            stdout=DEVNULL,
            stderr=PIPE,
            env={**os.environ, **spec.environment},
            start_new_session=True,
        )
        return child.process

    async def _probe(self, child: _Child, *, again: bool) -> None:
        began = time.monotonic()
        while (trouble := await asyncio.to_thread(child.spec.trouble)) is not None:
            if not again:
                self._screen.state(child.spec.name, _state(trouble))
            await asyncio.sleep(_PROBE_INTERVAL_S)
        child.policy.ready()
        child.ready.set()
        if again:
            self._screen.note(
                f"{child.spec.name} is back after {time.monotonic() - began:.1f} s", "green"
            )
        else:
            self._screen.state(child.spec.name, "ready")

    async def _read(self, child: _Child, process: Process) -> None:
        assert process.stderr is not None
        while True:
            try:
                raw = await process.stderr.readline()
            except ValueError:  # a line longer than the reader's buffer
                continue
            if not raw:
                return
            line = raw.decode(errors="replace").rstrip()
            if line:
                child.tail.append(line)
                # A traceback is shown once, not at every try; the reason of a refusal is told
                # when the child has ended.
                if child.policy.num_failures == 0 and not line.startswith("error: "):
                    self._screen.log(child.spec.name, line)

    async def _end_all(self, hurry: asyncio.Event) -> None:
        for child in reversed(self._children):
            process = child.process
            if process is None or process.returncode is not None:
                continue
            _send(process, signal.SIGTERM)
            ended = asyncio.create_task(process.wait())
            hurried = asyncio.create_task(hurry.wait())
            await asyncio.wait(
                [ended, hurried],
                timeout=self._drain_s + _KILL_AFTER_S,
                return_when=asyncio.FIRST_COMPLETED,
            )
            hurried.cancel()
            if process.returncode is None:
                why = (
                    "was ended at once" if hurry.is_set() else "did not end in time and was killed"
                )
                self._screen.note(f"{child.spec.name} {why}", "yellow")
                _send(process, signal.SIGKILL)
            await ended


def last_error(lines: Sequence[str]) -> str:
    """The line that says most about why a child ended: its last error, or its last words."""
    for line in reversed(lines):
        if is_error(line):
            return plain(line).removeprefix("error: ")
    return plain(lines[-1]) if lines else "it wrote nothing"


def _state(trouble: str) -> str:
    """What a child that does not serve yet is doing, in the words of a start."""
    if trouble.startswith("no answer"):
        return "starting"
    return "loading" if trouble == "not serving" else trouble


def _failures(tasks: Sequence[asyncio.Task[None]]) -> list[BaseException]:
    errors = [task.exception() for task in tasks if task.done() and not task.cancelled()]
    return [error for error in errors if error is not None]


def _send(process: Process, number: signal.Signals) -> None:
    try:
        process.send_signal(number)
    except ProcessLookupError:
        pass
