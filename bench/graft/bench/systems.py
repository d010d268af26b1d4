"""What can be asked for an answer: our gateway, or a peer in a process of its own.

Knows how to talk to each; knows no measurement.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from graft.bench.ask import Client
from graft.bench.peers import worker
from graft.bench.peers.catalog import Peer, environment_of
from graft.common.errors import GraftError

_LOAD_S = 600.0
_ANSWER_S = 600.0
_END_S = 10.0
_LONGEST_LINE = 1 << 20
# For example "ValueError: no such head", or the same behind a logger's words.
_ERROR = re.compile(r"(?:.*\s)?[A-Za-z_.]*(?:Error|Exception): ")


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt in token ids, and how to answer it."""

    tokens: list[int]
    max_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Written:
    """What an answer came to.

    num_rounds: forwards after the prompt's, those with nothing to verify included; 0 where the
        system does not say.
    per_position: accepted tokens at each depth, the first below the root first.
    """

    num_tokens: int
    num_rounds: int = 0
    per_position: tuple[int, ...] = ()


class System(Protocol):
    """Something that answers."""

    @property
    def name(self) -> str:
        """Its name in reports."""
        ...

    @property
    def most_clients(self) -> int:
        """Jobs that it takes at a time."""
        ...

    async def write(self, jobs: Sequence[Job], salt: str) -> list[Written]:
        """Answers jobs that are asked at once; no cache of another salt is used."""
        ...

    async def close(self) -> None:
        """Ends it."""
        ...


class Gateway:
    """Our services, asked over REST. speculation: as in the API."""

    most_clients = 1 << 10

    def __init__(self, name: str, client: Client, speculation: str | Mapping[str, Any]) -> None:
        self.name = name
        self._client = client
        self._speculation = speculation

    async def write(self, jobs: Sequence[Job], salt: str) -> list[Written]:
        """One text completion each."""
        return await asyncio.gather(
            *(self._complete(job, f"{salt}-{place}") for place, job in enumerate(jobs))
        )

    async def close(self) -> None:
        """Nothing: the client and the services belong to whoever made them."""

    async def _complete(self, job: Job, salt: str) -> Written:
        body = {
            "model": self._client.model,
            "prompt": job.tokens,
            "max_tokens": job.max_tokens,
            "temperature": job.temperature,
            "seed": job.seed,
            "speculation": self._speculation,
            "cache_salt": f"{self.name}-{salt}",
        }
        answer = await self._client.call("POST", "/v1/completions", body)
        record = (answer.get("metrics") or {}).get("speculative_decoding") or {}
        return Written(
            answer["usage"]["completion_tokens"],
            record.get("num_rounds", 0),
            tuple(record.get("accepted_per_position", ())),
        )


@dataclass(frozen=True, slots=True)
class PeerRun:
    """How a peer is run. mode: see the catalog. model: a folder, or a GGUF file."""

    peer: Peer
    python: Path
    mode: str
    model: Path
    threads: int

    def words(self) -> list[str]:
        """The command line."""
        settings = {
            "peer": self.peer.name,
            "mode": self.mode,
            "model": str(self.model),
            "threads": self.threads,
        }
        return [str(self.python), "-P", worker.__file__, json.dumps(settings)]

    def environment(self) -> dict[str, str]:
        """All variables of its process."""
        return {**os.environ, **environment_of(self.peer, self.python, self.threads)}


class PeerProcess:
    """A peer in its own environment, one block of jobs at a time."""

    def __init__(self, name: str, most_clients: int, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self.most_clients = most_clients
        self._process = process

    @classmethod
    async def start(cls, name: str, run: PeerRun) -> PeerProcess:
        """Starts it and waits until its model is loaded.

        Raises:
            GraftError: it ended instead; the message has the last line it said.
        """
        process = await asyncio.create_subprocess_exec(
            *run.words(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=run.environment(),
            limit=_LONGEST_LINE,
        )
        system = cls(name, run.peer.most_clients, process)
        system._errors = asyncio.create_task(system._listen())
        try:
            await system._line(_LOAD_S)
        except BaseException:
            await system.close()
            raise
        return system

    async def write(self, jobs: Sequence[Job], salt: str) -> list[Written]:
        """Answers; peers are run without caches between prompts, so the salt is not needed.

        Raises:
            GraftError: it ended, or says nothing; the message has the last line it said.
        """
        assert self._process.stdin is not None
        lines = json.dumps([asdict(job) for job in jobs])
        # One that has ended says so when it is read from.
        with suppress(ConnectionError):
            self._process.stdin.write(lines.encode() + b"\n")
            await self._process.stdin.drain()
        found = await self._line(_ANSWER_S)
        return [
            Written(tokens, rounds, tuple(per_position))
            for tokens, rounds, per_position in found["answers"]
        ]

    async def close(self) -> None:
        """Ends the process."""
        with suppress(ProcessLookupError):
            self._process.terminate()
        try:
            async with asyncio.timeout(_END_S):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        await asyncio.gather(self._errors, return_exceptions=True)

    _errors: asyncio.Task[None]
    _last_said = ""

    async def _line(self, timeout_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_s):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise GraftError(f"{self.name} said nothing for {timeout_s:g} s") from None
        if not line:
            await asyncio.wait([self._errors], timeout=_END_S)
            raise GraftError(f"{self.name} ended: {self._last_said or 'it said nothing'}")
        found: dict[str, Any] = json.loads(line)
        return found

    async def _listen(self) -> None:
        """Keeps the error stream read, and of its lines the last that names an error, or the last.

        What a library says while it is torn down stands behind the error that ended it.
        """
        assert self._process.stderr is not None
        named = False
        while True:
            try:
                said = await self._process.stderr.readline()
            except ValueError:
                # Longer than the stream takes, and dropped by it.
                continue
            if not said:
                return
            line = said.decode(errors="replace").strip()
            names = _ERROR.match(line) is not None
            if line and (names or not named):
                self._last_said, named = line, names
