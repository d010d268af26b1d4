"""A verify replica under test, a gateway's side of Generate, and a drafter on Rounds by script.

Knows messages and streams; what a drafter says is the test's own function.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio

from graft.common.channel import PROTOCOL_REVISION, VERIFY_MESSAGE_BYTES, open_channel
from graft.common.features import FeatureSpec, spec_to_proto
from graft.common.lane import Lane
from graft.common.prefix import Prefix
from graft.common.tree import Tree
from graft.common.tree_codec import encode_scores, encode_shape, encode_tokens
from graft.v1 import features_pb2, tree_pb2, verify_pb2, verify_pb2_grpc
from graft.v1.sampling_pb2 import Sampling, StopRule
from graft.verify.loading import load
from graft.verify.server import Loader, VerifyServer
from graft.verify.settings import VerifySettings

DEFAULTS: dict[str, Any] = {
    "port": 0,
    "threads": 1,
    "kv_tokens": 2048,
    "max_running": 8,
    "chunk_tokens": 32,
    "max_nodes": 32,
    "max_depth": 16,
}
Say = verify_pb2.RoundsRequest
Script = Callable[["Seat"], Awaitable[Say | None]]


@dataclass(slots=True)
class Generation:
    """What a gateway heard of one session."""

    opened: verify_pb2.SessionOpened | None = None
    commits: list[verify_pb2.TokensCommitted] = field(default_factory=list)
    finished: verify_pb2.SessionFinished | None = None
    sequences: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        """All committed tokens."""
        return [token for commit in self.commits for token in commit.tokens]


@dataclass(slots=True)
class Seat:
    """A drafter's view of one session; `round` counts what it heard of it."""

    session_id: int
    prefix: Prefix
    vocab_size: int
    round: int = 0

    @property
    def tokens(self) -> list[int]:
        """The committed prefix."""
        return [int(token) for token in self.prefix.tokens]

    def propose(self, tree: Tree, prefix: Sequence[int] | None = None) -> tree_pb2.CandidateTree:
        """A candidate tree for the committed prefix, or for another one."""
        named = self.prefix if prefix is None else Prefix(prefix)
        return tree_pb2.CandidateTree(
            session_id=self.session_id,
            prefix_length=len(named),
            prefix_digest=named.digest,
            shape=encode_shape(tree),
            tokens=encode_tokens(tree, self.vocab_size),
            scores=encode_scores(tree),
            draft_micros=5,
        )


@dataclass(slots=True)
class FeatureLog:
    """Rows of hidden states that one join brought, in order and without gaps.

    beside: row counts of the chunks outside of commits; early: of those before the prefix.
    """

    start: int = 0
    count: int = 0
    payload: bytes = b""
    beside: list[int] = field(default_factory=list)
    early: list[int] = field(default_factory=list)

    def take(self, rows: features_pb2.FeatureRows) -> None:
        """Adds rows."""
        if not self.count:
            self.start = rows.start_position
        assert rows.start_position == self.start + self.count, "feature rows are missing"
        self.count += rows.row_count
        self.payload += rows.payload


class ScriptedDrafter:
    """One Rounds stream; answers every prefix and commit with what its script says."""

    def __init__(
        self,
        stub: verify_pb2_grpc.VerifyServiceAsyncStub,
        script: Script,
        hello: verify_pb2.DraftHello | None = None,
    ) -> None:
        self.script = script
        self.call = stub.Rounds()  # type: ignore[call-arg]
        self.seats: dict[int, Seat] = {}
        self.refusals: Counter[int] = Counter()
        self.closed: dict[int, int] = {}
        self.features: dict[int, FeatureLog] = {}
        self.commit_bytes: list[tuple[int, int]] = []
        self.sequences: list[int] = []
        self.welcome: verify_pb2.VerifyServiceDescribeResponse | None = None
        self.welcomed = asyncio.Event()
        self.heard = asyncio.Condition()
        self._hello = hello or verify_pb2.DraftHello(protocol_revision=PROTOCOL_REVISION)
        self._writing = asyncio.Lock()
        self._reader = asyncio.create_task(self._read())

    async def join(
        self,
        session_id: int,
        ticket: bytes,
        spec: FeatureSpec | None = None,
        window_tokens: int = 0,
    ) -> None:
        """Asks to attend a session, and for hidden states where a spec is given, once welcomed."""
        await self.welcomed.wait()
        join = verify_pb2.JoinSession(
            session_id=session_id,
            ticket=ticket,
            features=None if spec is None else spec_to_proto(spec),
            feature_window_tokens=window_tokens,
        )
        self.features[session_id] = FeatureLog()
        await self.say(Say(joins=[join]))

    async def leave(self, session_id: int) -> None:
        """No longer attends a session."""
        self.seats.pop(session_id, None)
        await self.say(Say(leaves=[verify_pb2.LeaveSession(session_id=session_id)]))

    async def say(self, message: Say) -> None:
        """Sends one message; one at a time, as a call wants it."""
        async with self._writing:
            await self.call.write(message)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns once something heard makes the condition true."""
        async with self.heard:
            await self.heard.wait_for(condition)

    async def die(self) -> None:
        """Ends the call without a word."""
        self.call.cancel()
        await asyncio.gather(self._reader, return_exceptions=True)

    async def _read(self) -> None:
        await self.say(Say(hello=self._hello))
        async for message in self.call:
            await self._hear(message)

    async def _hear(self, message: verify_pb2.RoundsResponse) -> None:
        self.sequences.append(message.sequence)
        if message.HasField("welcome"):
            self.welcome = message.welcome
            self.welcomed.set()
        moved = self._follow(message)
        async with self.heard:
            self.heard.notify_all()
        for session_id in moved:
            answer = await self.script(self.seats[session_id])
            if answer is not None and session_id in self.seats:
                await self.say(answer)

    def _follow(self, message: verify_pb2.RoundsResponse) -> list[int]:
        assert self.welcome is not None, "the first message must be the welcome"
        moved: dict[int, None] = {}
        for sent in message.features:
            log = self.features[sent.session_id]
            log.take(sent.rows)
            log.beside.append(sent.rows.row_count)
            if sent.session_id not in self.seats:
                log.early.append(sent.rows.row_count)
        for told in message.prefixes:
            prefix = Prefix(told.tokens)
            self.seats[told.session_id] = Seat(told.session_id, prefix, self.welcome.vocab_size)
            moved[told.session_id] = None
        for commit in message.commits:
            if (seat := self.seats.get(commit.session_id)) is None:
                continue  # it was left since
            if commit.HasField("features"):
                self.features[commit.session_id].take(commit.features)
            alone = verify_pb2.RoundsResponse(commits=[commit])
            self.commit_bytes.append((len(commit.tokens), alone.ByteSize()))
            seat.prefix.extend(commit.tokens)
            seat.round += 1
            assert (len(seat.prefix), seat.prefix.digest) == (
                commit.prefix_length,
                commit.prefix_digest,
            ), "the commit does not fit the prefix heard so far"
            moved[commit.session_id] = None
        for refused in message.refusals:
            self.refusals[refused.refusal] += 1
        for closed in message.closed:
            self.closed[closed.session_id] = closed.error
            self.seats.pop(closed.session_id, None)
            moved.pop(closed.session_id, None)
        return list(moved)


class LaneDrafter(ScriptedDrafter):
    """One that goes on over the lane, once it is welcome; `lane` is open then."""

    lane: Lane

    async def say(self, message: Say) -> None:
        """Sends one message over the lane."""
        await self.lane.send(message.SerializeToString())

    async def die(self) -> None:
        """Ends the call without a word."""
        self._reader.cancel()
        await super().die()

    async def _read(self) -> None:
        await self.call.write(Say(hello=self._hello))
        welcome = await self.call.read()
        assert isinstance(welcome, verify_pb2.RoundsResponse)
        came: asyncio.Queue[bytes] = asyncio.Queue()
        self.lane = await open_lane(welcome.lane, came.put_nowait)
        await self._hear(welcome)
        while True:
            await self._hear(verify_pb2.RoundsResponse.FromString(await came.get()))


async def open_lane(offer: verify_pb2.Lane, take: Callable[[bytes], None]) -> Lane:
    """The drafter's end of a lane, named by its token."""
    lane = Lane(take, VERIFY_MESSAGE_BYTES)
    await asyncio.get_running_loop().create_unix_connection(lambda: lane, offer.path)
    lane.put(offer.token)
    return lane


@dataclass(frozen=True, slots=True)
class VerifyBench:
    """A running replica and a stub that speaks to it."""

    server: VerifyServer
    stub: verify_pb2_grpc.VerifyServiceAsyncStub
    address: str

    async def generate(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        *,
        drafter: ScriptedDrafter | None = None,
        stop: StopRule | None = None,
        spec: FeatureSpec | None = None,
        window_tokens: int = 0,
        **fields: Any,
    ) -> Generation:
        """Runs one session to its end, with a drafter at its side from the start on."""
        generation = Generation()
        rule = stop or StopRule(max_tokens=max_tokens, ignore_eos=True)
        fields.setdefault("tree_deadline_micros", 5_000_000)
        request = verify_pb2.OpenSession(
            prompt_tokens=prompt, stop=rule, speculate=drafter is not None, **fields
        )
        call = self.generate_call()
        await call.write(verify_pb2.GenerateRequest(open=request))
        async for message in call:
            generation.sequences.append(message.sequence)
            match message.WhichOneof("event"):
                case "opened":
                    generation.opened = message.opened
                    if drafter is not None:
                        shown = (message.opened.session_id, message.opened.ticket)
                        if spec is None:
                            await drafter.join(*shown)
                        else:
                            await drafter.join(*shown, spec, window_tokens)
                case "committed":
                    generation.commits.append(message.committed)
                case "finished":
                    generation.finished = message.finished
        return generation

    def generate_call(self) -> grpc.aio.StreamStreamCall[Any, Any]:
        """A Generate call to be written and read by hand."""
        return self.stub.Generate()  # type: ignore[call-arg]

    def drafter(
        self, script: Script, hello: verify_pb2.DraftHello | None = None
    ) -> ScriptedDrafter:
        """A drafter on a stream of its own."""
        return ScriptedDrafter(self.stub, script, hello)

    def idle_pages(self) -> bool:
        """True when no page is held and none is lost."""
        assert self.server.engine is not None
        pool = self.server.engine.scheduler.places.pool
        return pool.num_used == 0 and pool.num_free + pool.num_cached == pool.num_pages

    def metric(self, name: str, **labels: str) -> float:
        """A sample of the server's registry; 0 when it was never counted."""
        return self.server.metrics.registry.get_sample_value(name, labels) or 0.0


def settings_of(model: Path, **settings: Any) -> VerifySettings:
    """Settings of a small replica on a free port."""
    return VerifySettings.load(None, {"model": str(model), **DEFAULTS, **settings})


@asynccontextmanager
async def running_verify(
    model: Path, *, loader: Loader = load, **settings: Any
) -> AsyncIterator[VerifyBench]:
    """Starts a replica, waits until it serves, and stops it afterwards."""
    server = VerifyServer(settings_of(model, **settings), loader)
    try:
        address = f"127.0.0.1:{await server.start()}"
        await server.ready()
        async with open_channel(address) as channel:
            yield VerifyBench(server, verify_pb2_grpc.VerifyServiceStub(channel), address)
    finally:
        await server.stop(0.5)


def sampled(seed: int, temperature: float = 0.8) -> Sampling:
    """A seeded law."""
    return Sampling(temperature=temperature, seed=seed, top_k=50)


async def eventually(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    """Returns once the condition holds; for what another thread brings about."""
    async with asyncio.timeout(within_s):
        for _ in itertools.count():
            if condition():
                return
            await asyncio.sleep(0.005)


def status_of(error: grpc.aio.AioRpcError) -> str:
    """The name of a failed call's status code."""
    return str(error.code().name)
