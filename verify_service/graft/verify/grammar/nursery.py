"""A process that tries grammars in children of its own, which it kills when they take too long.

xgrammar cannot be interrupted, and a text made for it can cost minutes, gigabytes or the process.
So each grammar is tried in a fork with limits on time, memory and stack. The nursery itself has one
thread, never looks at a text, and ends when its input does.

Input and output are lines of JSON: {"id", "kind", "text"} in, {"id", "text"} or {"id", "error",
"final"} out, and {"ready"} first. `final` is false for what another try might survive.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import resource
import selectors
import signal
import sys
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from graft.common.token_pieces import vocabulary_bytes
from graft.verify.grammar.refused import SchemaRefused
from graft.verify.grammar.source import Source
from graft.verify.grammar.trial import try_out

_READ_BYTES: Final = 1 << 16
_MEMORY_BYTES: Final = 512 << 20
# Less than any thread has that compiles the grammar once more.
_STACK_BYTES: Final = 1 << 20
_NICE: Final = 5
# The limit is on a child's own time; where others take the machine, it may last this much longer.
_WALL_SHARE: Final = 3.0
_MAX_AT_ONCE: Final = 2


@dataclass(slots=True)
class _Child:
    """A grammar being tried."""

    request: int
    pid: int
    deadline: float
    said: bytes = b""


class Nursery:
    """Tries grammars, at most two at a time, in the order they came."""

    def __init__(self, source: Source, limit_s: float, output: int) -> None:
        """output: the file that answers go to."""
        self._source = source
        self._limit_s = limit_s
        self._output = output
        self._waiting: deque[dict[str, Any]] = deque()
        self._children: dict[int, _Child] = {}
        self._selector = selectors.DefaultSelector()

    def run(self, requests: int) -> None:
        """Serves until `requests`, a file, ends."""
        self._selector.register(requests, selectors.EVENT_READ)
        pending = b""
        while True:
            for key, _ in self._selector.select(self._left_s()):
                if key.fd != requests:
                    self._hear(key.fd)
                    continue
                read = os.read(requests, _READ_BYTES)
                if not read:
                    return self._end()
                *lines, pending = (pending + read).split(b"\n")
                self._waiting.extend(json.loads(line) for line in lines)
            self._kill_late()
            while self._waiting and len(self._children) < _MAX_AT_ONCE:
                self._bear(self._waiting.popleft())

    def _left_s(self) -> float | None:
        if not self._children:
            return None
        first = min(child.deadline for child in self._children.values())
        return max(0.0, first - time.monotonic())

    def _bear(self, request: dict[str, Any]) -> None:
        reader, writer = os.pipe()
        pid = os.fork()
        if not pid:
            os.close(reader)
            self._try(request, writer)
        os.close(writer)
        self._children[reader] = _Child(
            request["id"], pid, time.monotonic() + _WALL_SHARE * self._limit_s
        )
        self._selector.register(reader, selectors.EVENT_READ)

    def _try(self, request: dict[str, Any], writer: int) -> None:
        """Runs in the child and ends it."""
        code = 1
        try:
            _limit(self._limit_s)
            with contextlib.suppress(OSError):
                os.nice(_NICE)
            answer: dict[str, Any] = {}
            try:
                answer["text"] = try_out(self._source, request["kind"], request["text"])
            except SchemaRefused as refused:
                answer["error"] = str(refused)
            except MemoryError:
                answer["error"] = "it takes too much memory to compile"
            said = memoryview(json.dumps(answer).encode())
            while said:
                said = said[os.write(writer, said) :]
            code = 0
        finally:
            os._exit(code)

    def _hear(self, reader: int) -> None:
        child = self._children[reader]
        said = os.read(reader, _READ_BYTES)
        if said:
            child.said += said
            return
        status = self._bury(reader)
        if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF:
            self._answer_late(child)
            return
        try:
            answer = json.loads(child.said)
        except ValueError:
            answer = {"error": "it is too large or nested too deeply to be compiled"}
        self._answer({"final": True, **answer, "id": child.request})

    def _kill_late(self) -> None:
        now = time.monotonic()
        for reader in [fd for fd, child in self._children.items() if child.deadline <= now]:
            child = self._children[reader]
            os.kill(child.pid, signal.SIGKILL)
            self._bury(reader)
            self._answer_late(child)

    def _answer_late(self, child: _Child) -> None:
        error = f"it takes more than {self._limit_s:g} s to compile"
        self._answer({"id": child.request, "error": error, "final": False})

    def _bury(self, reader: int) -> int:
        """Waits for a child whose pipe has ended; returns its status."""
        child = self._children.pop(reader)
        self._selector.unregister(reader)
        os.close(reader)
        return os.waitpid(child.pid, 0)[1]

    def _end(self) -> None:
        for reader, child in [*self._children.items()]:
            os.kill(child.pid, signal.SIGKILL)
            self._bury(reader)

    def _answer(self, answer: dict[str, Any]) -> None:
        said = memoryview(json.dumps(answer).encode() + b"\n")
        while said:
            said = said[os.write(self._output, said) :]


def _limit(limit_s: float) -> None:
    """What a child may use; SIGPROF ends it when its time is over, wherever it is."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _lower(resource.RLIMIT_AS, pages * resource.getpagesize() + _MEMORY_BYTES)
    _lower(resource.RLIMIT_STACK, _STACK_BYTES)
    _lower(resource.RLIMIT_CPU, int(limit_s) + 2)
    _lower(resource.RLIMIT_CORE, 0)


def _lower(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (bound, bound))


def main(folder: str, vocab_size: str, eos_token_ids: str, limit_s: str) -> None:
    """Serves standard input; whatever libraries print goes nowhere."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    output = os.dup(sys.stdout.fileno())
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.dup2(nowhere, sys.stderr.fileno())
    vocabulary = vocabulary_bytes(Path(folder), int(vocab_size))
    source = Source(vocabulary, [int(token) for token in eos_token_ids.split(",")])
    try_out(source, 1, "")
    gc.collect()
    gc.freeze()
    os.write(output, b'{"ready": true}\n')
    with contextlib.suppress(BrokenPipeError):
        Nursery(source, float(limit_s), output).run(sys.stdin.fileno())


if __name__ == "__main__":
    main(*sys.argv[1:])
