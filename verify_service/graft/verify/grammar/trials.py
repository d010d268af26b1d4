"""The nursery's other end: starts it, asks it, and starts it again when it has gone.

Knows lines of JSON; knows no grammar. Owned by one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from graft.common import log
from graft.common.errors import GraftError, Overloaded

_log = log.get("grammar")

_BOOT_S: Final = 180.0
_ANSWER_S: Final = 60.0
_MAX_WAITING: Final = 64
_END_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What grammars are compiled for: a folder with tokenizer.json, and the ids that end a text."""

    folder: Path
    vocab_size: int
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a try: the text to compile, or why it is refused.

    final: another try would end the same.
    """

    text: str = ""
    error: str = ""
    final: bool = True


class Trials:
    """Has grammars tried out of reach of everything that matters."""

    def __init__(self, vocabulary: Vocabulary, limit_s: float) -> None:
        self._vocabulary = vocabulary
        self._limit_s = limit_s
        self._numbers = itertools.count(1)
        self._asked: dict[int, asyncio.Future[Verdict]] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._ready: asyncio.Future[None] | None = None
        self._writing = asyncio.Lock()

    async def start(self) -> None:
        """Returns once the nursery takes grammars; what runs already is left as it is.

        Raises:
            GraftError: it cannot be started.
        """
        if self._ready is None:
            loop = asyncio.get_running_loop()
            self._ready = loop.create_future()
            self._ready.add_done_callback(_seen)
            threading.Thread(
                target=self._follow, args=(loop, self._ready), name="graft-nursery", daemon=True
            ).start()
        try:
            async with asyncio.timeout(_BOOT_S):
                await asyncio.shield(self._ready)
        except TimeoutError:
            raise GraftError("the process that compiles grammars does not start") from None

    async def ask(self, kind: int, text: str) -> Verdict:
        """Tries a grammar.

        Raises:
            Overloaded: too many are being tried.
            GraftError: the nursery fails; one that ends is started again, once.
        """
        try:
            return await self._ask(kind, text)
        except _Gone:
            return await self._ask(kind, text)

    async def _ask(self, kind: int, text: str) -> Verdict:
        if len(self._asked) >= _MAX_WAITING:
            raise Overloaded(
                f"{len(self._asked)} grammars are being compiled, as many as this replica takes",
                retry_after_s=1.0,
            )
        number = next(self._numbers)
        answer: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._asked[number] = answer
        try:
            await self.start()
            line = json.dumps({"id": number, "kind": int(kind), "text": text}).encode() + b"\n"
            async with self._writing:
                await asyncio.to_thread(self._write, line)
            async with asyncio.timeout(_ANSWER_S):
                return await answer
        except TimeoutError:
            self.kill()
            raise GraftError("the process that compiles grammars does not answer") from None
        finally:
            del self._asked[number]

    def kill(self) -> None:
        """Ends the nursery; the next grammar starts another."""
        if self._process is not None:
            self._process.kill()

    async def close(self) -> None:
        """Ends the nursery for good."""
        process = self._process
        if process is not None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(process.wait, _END_S)

    def _write(self, line: bytes) -> None:
        process = self._process
        if process is None or process.stdin is None:
            raise _Gone("the process that compiles grammars has ended")
        # Its end is seen where it is read, and told there; the pipe may be broken or closed by now.
        with contextlib.suppress(OSError, ValueError):
            process.stdin.write(line)
            process.stdin.flush()

    def _follow(self, loop: asyncio.AbstractEventLoop, ready: asyncio.Future[None]) -> None:
        """Runs the nursery on this thread until it ends."""
        words, process = self._vocabulary, None
        try:
            eos = ",".join(map(str, words.eos_token_ids))
            process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "graft.verify.grammar.nursery"),
                    *(str(words.folder), str(words.vocab_size), eos, str(self._limit_s)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
            )
            self._process = process
            assert process.stdout is not None
            for line in process.stdout:
                loop.call_soon_threadsafe(self._hear, json.loads(line), ready)
        except (OSError, RuntimeError, ValueError) as error:
            _log.warning("nursery failed", error=str(error))
        finally:
            if process is not None:
                process.kill()
                process.wait()
                for pipe in (process.stdin, process.stdout):
                    with contextlib.suppress(OSError):
                        assert pipe is not None
                        pipe.close()
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._ended, ready)

    def _hear(self, said: dict[str, Any], ready: asyncio.Future[None]) -> None:
        if "ready" in said:
            if not ready.done():
                ready.set_result(None)
            return
        answer = self._asked.get(said["id"])
        if answer is not None and not answer.done():
            answer.set_result(
                Verdict(said.get("text", ""), said.get("error", ""), said.get("final", True))
            )

    def _ended(self, ready: asyncio.Future[None]) -> None:
        error = _Gone("the process that compiles grammars has ended")
        self._ready = self._process = None
        if not ready.done():
            ready.set_exception(error)
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(error)
                answer.exception()


class _Gone(GraftError):
    """The nursery ended with a question open."""


def _seen(future: asyncio.Future[None]) -> None:
    """Nobody has to wait for the start; a failure shows in what was asked."""
    if not future.cancelled():
        future.exception()
