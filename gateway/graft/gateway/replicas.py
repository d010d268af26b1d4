"""The replicas behind the gateway: their channels, health and descriptions.

Polls Describe; decides nothing about where work goes. A replica that fits us badly is refused
with a sentence that says what differs.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Generic, Protocol, TypeVar

import grpc
import grpc.aio

from graft.common import log
from graft.common.channel import Tls, open_channel
from graft.common.errors import GraftError
from graft.gateway.broadcast import Signal
from graft.gateway.resolve import host_and_port, is_name, resolve

_log = log.get("replicas")
_DESCRIBE_TIMEOUT_S = 2.0
_QUICK_POLL_S = 0.25


class Described(Protocol):
    """What the descriptions of verify and draft have in common."""

    @property
    def protocol_revision(self) -> int: ...
    @property
    def incarnation_id(self) -> int: ...


D = TypeVar("D", bound=Described)


class State(Enum):
    """What we know of a replica; only UP takes work."""

    CONNECTING = "connecting"
    UP = "up"
    STALLED = "stalled"
    DOWN = "down"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class Watch:
    """How closely replicas are watched, in seconds."""

    poll_s: float = 1.0
    silent_s: float = 5.0
    stall_s: float = 30.0
    resolve_s: float = 5.0


@dataclass(frozen=True, slots=True)
class Pairing(Generic[D]):
    """How to ask a kind of replica for its description, and what to make of the answer.

    `differs` returns a sentence when the replica at an address does not fit, `progress_age_s`
    how long it has owed progress; zero when idle.
    """

    kind: str
    describe: Callable[[grpc.aio.Channel, float], Awaitable[D]]
    differs: Callable[[str, D], str | None]
    progress_age_s: Callable[[D], float]


class Replica(Generic[D]):
    """One replica: its channel, the last description, and how many sessions we have there."""

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        self.address = address
        self.channel = channel
        self.state = State.CONNECTING
        self.detail = "not reached yet"
        self.description: D | None = None
        self.heard_at = time.monotonic()
        self.polled_at = 0.0
        self.num_sessions = 0
        self.leaving = False
        self.lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.poke = asyncio.Event()

    @property
    def usable(self) -> bool:
        """True when new work may go there."""
        return self.state is State.UP and not self.leaving

    def heard(self) -> None:
        """A message came from the replica, so it is not silent."""
        self.heard_at = time.monotonic()

    def lose(self) -> None:
        """Tells all sessions there to give up; sessions opened later are not touched."""
        if not self.lost.done():
            self.lost.set_result(None)
        self.lost = asyncio.get_running_loop().create_future()


class Replicas(Generic[D]):
    """All replicas of one kind. `changed` is notified whenever a state may have changed."""

    def __init__(
        self,
        pairing: Pairing[D],
        watch: Watch,
        *,
        tls: Tls | None = None,
        plaintext_ok: bool = False,
    ) -> None:
        self.changed = Signal()
        self.ever_up = False
        self.closed = False
        self._pairing = pairing
        self._watch = watch
        self._tls = tls
        self._plaintext_ok = plaintext_ok
        self._replicas: dict[str, Replica[D]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._resolvers: list[asyncio.Task[None]] = []
        self._unresolved: dict[str, str] = {}

    def __iter__(self) -> Iterator[Replica[D]]:
        return iter(self._replicas.values())

    def __len__(self) -> int:
        return len(self._replicas)

    def get(self, address: str) -> Replica[D] | None:
        """The replica at an address, where there is one."""
        return self._replicas.get(address)

    def usable(self) -> list[Replica[D]]:
        """Replicas that take work."""
        return [replica for replica in self if replica.usable]

    def describe_states(self) -> str:
        """One sentence about each replica, for errors and /ready."""
        if not self._replicas:
            why = "; ".join(f"{name}: {error}" for name, error in self._unresolved.items() if error)
            return f"no {self._pairing.kind} replica is known yet" + (f" ({why})" if why else "")
        return "; ".join(
            f"{self._pairing.kind} {replica.address} is {replica.state.value}"
            + (f" ({replica.detail})" if replica.detail else "")
            for replica in self
        )

    def start(self, addresses: Sequence[str]) -> None:
        """Starts to watch the replicas behind the addresses.

        Raises:
            InvalidArgument: an address is malformed, or may not be reached in plain text.
        """
        for address in addresses:
            host_and_port(address)
            if is_name(address):
                self._resolvers.append(asyncio.create_task(self._follow_name(address)))
            else:
                self._add(address)

    def abandon(self) -> None:
        """Gives up all sessions; none is to be opened any more."""
        self.closed = True
        for replica in self:
            replica.lose()
        self.changed.notify()

    async def stop(self) -> None:
        """Ends all watching and closes the channels."""
        self.abandon()
        tasks = [*self._resolvers, *self._tasks.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for replica in self:
            await replica.channel.close(None)
        self._replicas.clear()
        self._tasks.clear()

    def suspect(self, replica: Replica[D]) -> None:
        """A session saw the replica fail: ask it at once."""
        replica.poke.set()

    def _add(self, address: str, server_name: str | None = None) -> None:
        channel = open_channel(
            address, tls=self._tls, plaintext_ok=self._plaintext_ok, server_name=server_name
        )
        replica: Replica[D] = Replica(address, channel)
        self._replicas[address] = replica
        self._tasks[address] = asyncio.create_task(self._watch_one(replica))
        self.changed.notify()

    async def _follow_name(self, name: str) -> None:
        """Keeps replicas in step with the name's addresses; a failed look-up changes none."""
        mine: set[str] = set()
        while True:
            found: list[str] | None = None
            trouble = ""
            try:
                found = await resolve(name)
            except (OSError, TimeoutError) as error:
                trouble = str(error) or "no answer in time"
            if trouble and trouble != self._unresolved.get(name):
                _log.warning("name did not resolve", name=name, error=trouble)
            self._unresolved[name] = trouble
            if found is not None:
                for address in set(found) - mine - set(self._replicas):
                    try:
                        self._add(address, server_name=host_and_port(name)[0])
                        mine.add(address)
                    except GraftError as error:
                        _log.error("replica refused", address=address, reason=str(error))
                for address in mine - set(found):
                    if await self._remove(address):
                        mine.discard(address)
                for address in found:
                    if (replica := self._replicas.get(address)) is not None:
                        replica.leaving = False
            await asyncio.sleep(self._watch.resolve_s if found else _QUICK_POLL_S)

    async def _remove(self, address: str) -> bool:
        """Drops a replica that left its name; False while sessions still run there."""
        replica = self._replicas[address]
        replica.leaving = True
        if replica.num_sessions and replica.state is State.UP:
            return False
        task = self._tasks.pop(address)
        task.cancel()
        await asyncio.wait([task])
        del self._replicas[address]
        replica.lose()
        await replica.channel.close(None)
        self.changed.notify()
        return True

    async def _watch_one(self, replica: Replica[D]) -> None:
        while True:
            before = replica.state
            await self._poll(replica)
            if replica.state is not before:
                # A replica that is not there yet, when both start, is no reason to warn.
                early = before is State.CONNECTING and replica.state is State.DOWN
                line = _log.info if early or replica.state is State.UP else _log.warning
                line(
                    f"{self._pairing.kind} replica changed",
                    address=replica.address,
                    state=replica.state.value,
                    detail=replica.detail,
                )
            self.changed.notify()
            wait_s = self._watch.poll_s if replica.state is State.UP else _QUICK_POLL_S
            with suppress(TimeoutError):
                async with asyncio.timeout(min(wait_s, self._watch.poll_s)):
                    await replica.poke.wait()
            replica.poke.clear()

    async def _poll(self, replica: Replica[D]) -> None:
        try:
            description = await self._pairing.describe(replica.channel, _DESCRIBE_TIMEOUT_S)
        except grpc.aio.AioRpcError as failure:
            self._missed(replica, failure)
            return
        replica.polled_at = time.monotonic()
        replica.heard()
        self._take(replica, description)

    def _missed(self, replica: Replica[D], failure: grpc.aio.AioRpcError) -> None:
        """A failed poll. Silence alone is forgiven for a while: the replica may be busy."""
        code = failure.code()
        if code is grpc.StatusCode.UNIMPLEMENTED:
            replica.state = State.REFUSED
            replica.detail = f"what listens there is no {self._pairing.kind} service"
            return
        age = time.monotonic() - replica.heard_at
        if code is grpc.StatusCode.DEADLINE_EXCEEDED and age < self._watch.silent_s:
            return
        if replica.state is State.DOWN:
            return
        replica.state = State.DOWN
        silent = code is grpc.StatusCode.DEADLINE_EXCEEDED
        replica.detail = f"no answer for {age:.1f} s" if silent else f"{code.name.lower()}"
        if silent:
            replica.lose()

    def _take(self, replica: Replica[D], description: D) -> None:
        known = replica.description
        if known is not None and known.incarnation_id != description.incarnation_id:
            _log.info(f"{self._pairing.kind} replica restarted", address=replica.address)
            replica.lose()
        replica.description = description
        sentence = self._pairing.differs(replica.address, description)
        age = self._pairing.progress_age_s(description)
        if sentence is not None:
            replica.state, replica.detail = State.REFUSED, sentence
        elif age > self._watch.stall_s:
            if replica.state is not State.STALLED:
                replica.lose()
            replica.state, replica.detail = State.STALLED, f"no progress for {age:.1f} s"
        else:
            replica.state, replica.detail = State.UP, ""
            self.ever_up = True
