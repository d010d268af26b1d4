"""What can be asked for an answer: our gateway, or a peer in a process of its own.

Knows how to talk to each; knows no measurement.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from graft.bench.ask import Client
from graft.bench.peers import worker
from graft.common.errors import GraftError

_LOAD_S = 600.0
_ANSWER_S = 600.0
_END_S = 10.0


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt in token ids, and how to answer it."""

    tokens: list[int]
    max_tokens: int
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Written:
    """What an answer came to; rounds and accepted are 0 where the system does not say."""

    num_tokens: int
    num_rounds: int = 0
    num_accepted: int = 0


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

    async def write(self, job: Job, salt: str) -> Written:
        """Answers one job; no cache of another salt is used."""
        ...

    async def close(self) -> None:
        """Ends it."""
        ...


class Gateway:
    """Our services, asked over REST. speculation: as in the API."""

    most_clients = 1 << 10

    def __init__(self, name: str, client: Client, speculation: str) -> None:
        self.name = name
        self._client = client
        self._speculation = speculation

    async def write(self, job: Job, salt: str) -> Written:
        """One text completion."""
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
            record.get("num_accepted_draft_tokens", 0),
        )

    async def close(self) -> None:
        """Nothing: the client and the services belong to whoever made them."""


class PeerProcess:
    """A peer in its own environment, one job at a time."""

    most_clients = 1

    def __init__(self, name: str, process: asyncio.subprocess.Process) -> None:
        self.name = name
        self._process = process

    @classmethod
    async def start(
        cls, name: str, python: Path, peer: str, mode: str, model: Path, threads: int
    ) -> PeerProcess:
        """Starts it and waits until its model is loaded.

        Raises:
            GraftError: it ended instead; the message has the last line it said.
        """
        settings = {"peer": peer, "mode": mode, "model": str(model), "threads": threads}
        process = await asyncio.create_subprocess_exec(
            str(python),
            "-P",
            worker.__file__,
            json.dumps(settings),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        system = cls(name, process)
        system._errors = asyncio.create_task(system._listen())
        try:
            await system._line(_LOAD_S)
        except BaseException:
            await system.close()
            raise
        return system

    async def write(self, job: Job, salt: str) -> Written:
        """One answer; peers are run without caches between prompts, so the salt is not needed."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(asdict(job)).encode() + b"\n")
        await self._process.stdin.drain()
        return Written(int((await self._line(_ANSWER_S))["tokens"]))

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
        """Keeps the error stream read, and its last line."""
        assert self._process.stderr is not None
        while said := await self._process.stderr.readline():
            self._last_said = said.decode(errors="replace").strip() or self._last_said
