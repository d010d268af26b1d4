"""A verify service that a test plays by hand: real gRPC, no model.

Knows the messages of Rounds; decides nothing by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from graft.common.channel import PROTOCOL_REVISION
from graft.common.lane import Lane
from graft.common.prefix import Prefix
from graft.common.sampling import Sampling, sampling_to_proto
from graft.common.server import GrpcServer
from graft.v1.verify_pb2 import (
    DraftHello,
    RoundsRequest,
    RoundsResponse,
    SessionCommit,
    SessionPrefix,
    VerifyServiceDescribeResponse,
)
from graft.v1.verify_pb2_grpc import VerifyServiceServicer, add_VerifyServiceServicer_to_server

WAIT_S = 10.0


def welcome(**changes: Any) -> VerifyServiceDescribeResponse:
    """What a small replica says of itself."""
    fields: dict[str, Any] = {
        "protocol_revision": PROTOCOL_REVISION,
        "incarnation_id": 77,
        "model_id": "fake",
        "vocab_size": 320,
        "tokenizer_digest": "aa" * 32,
        "context_length": 4096,
        "max_nodes": 16,
        "max_depth": 8,
        "max_trees": 2,
    }
    return VerifyServiceDescribeResponse(**{**fields, **changes})


class FakeRounds:
    """One Rounds stream, seen from the verify side.

    num_called: requests that came by the call itself, after the hello.
    carried: set once a lane carries the stream.
    """

    def __init__(self) -> None:
        self.hello = DraftHello()
        self.sequence = 0
        self.ended = asyncio.Event()
        self.num_called = 0
        self.lane: Lane | None = None
        self.carried = asyncio.Event()
        self._received: asyncio.Queue[RoundsRequest] = asyncio.Queue()
        self._sending: asyncio.Queue[RoundsResponse | BaseException | None] = asyncio.Queue()
        self._seen: list[tuple[str, Any]] = []

    def send(self, *, sequence: int | None = None, **parts: Any) -> None:
        """Sends one message; `sequence` breaks the numbering."""
        number = self.sequence if sequence is None else sequence
        message = RoundsResponse(sequence=number, **parts)
        self.sequence += 1
        if self.lane is not None:
            self.lane.put(message.SerializeToString())
        else:
            self._sending.put_nowait(message)

    def carry(self, lane: Lane) -> None:
        """Goes on over a lane."""
        self.lane = lane
        lane.on_message = lambda came: self._received.put_nowait(RoundsRequest.FromString(came))
        self.carried.set()

    def end(self, error: BaseException | None = None) -> None:
        """Ends the stream, or fails it."""
        self._sending.put_nowait(error)

    async def next(self, kind: str) -> Any:
        """The next part of this kind (joins, trees, empties, leaves); others stay for later."""
        async with asyncio.timeout(WAIT_S):
            while True:
                for i, (name, part) in enumerate(self._seen):
                    if name == kind:
                        del self._seen[i]
                        return part
                self._keep(await self._received.get())

    def pending(self) -> list[tuple[str, Any]]:
        """Parts that came and were not asked for, in order."""
        while not self._received.empty():
            self._keep(self._received.get_nowait())
        return list(self._seen)

    def _keep(self, request: RoundsRequest) -> None:
        for name in ("joins", "trees", "empties", "leaves"):
            self._seen += [(name, part) for part in getattr(request, name)]

    def prefix(
        self,
        session_id: int,
        tokens: Sequence[int],
        *,
        room: int = 1000,
        prompt: int | None = None,
        cache_salt: str = "",
        sampling: Sampling | None = None,
    ) -> FakeSession:
        """Tells a session's prefix."""
        self.send(
            prefixes=[
                SessionPrefix(
                    session_id=session_id,
                    tokens=tokens,
                    prompt_token_count=len(tokens) if prompt is None else prompt,
                    sampling=sampling_to_proto(sampling or Sampling()),
                    room=room,
                    cache_salt=cache_salt,
                )
            ]
        )
        return FakeSession(self, session_id, Prefix(tokens))

    async def run(self, requests: AsyncIterator[RoundsRequest]) -> AsyncIterator[RoundsResponse]:
        """The stream's body."""
        reader = asyncio.create_task(self._read(requests))
        try:
            while (response := await self._sending.get()) is not None:
                if isinstance(response, BaseException):
                    raise response
                yield response
        finally:
            if self.lane is not None:
                self.lane.close()
            self.ended.set()
            reader.cancel()

    async def _read(self, requests: AsyncIterator[RoundsRequest]) -> None:
        async for request in requests:
            self.num_called += 1
            self._received.put_nowait(request)
        self.end()


class FakeSession:
    """A session's true prefix, and commits that follow from it."""

    def __init__(self, rounds: FakeRounds, session_id: int, prefix: Prefix) -> None:
        self.rounds = rounds
        self.session_id = session_id
        self.prefix = prefix

    def commit(self, *tokens: int, accepted: int = 0, digest: int | None = None) -> None:
        """Commits tokens and tells so; `digest` breaks the chain."""
        self.prefix.extend(tokens)
        self.rounds.send(
            commits=[
                SessionCommit(
                    session_id=self.session_id,
                    tokens=tokens,
                    prefix_length=len(self.prefix),
                    prefix_digest=self.prefix.digest if digest is None else digest,
                    accepted_count=accepted,
                )
            ]
        )


class FakeVerify(VerifyServiceServicer):
    """Hands every Rounds stream to the test once its hello came; answers it with `greeting`."""

    def __init__(self) -> None:
        self.greeting: Callable[[FakeRounds], None] = lambda rounds: rounds.send(welcome=welcome())
        self.num_streams = 0
        self._streams: asyncio.Queue[FakeRounds] = asyncio.Queue()

    async def stream(self) -> FakeRounds:
        """The next Rounds stream that was opened."""
        async with asyncio.timeout(WAIT_S):
            return await self._streams.get()

    async def Rounds(self, request_iterator: Any, context: Any) -> AsyncIterator[RoundsResponse]:
        """Every call is one FakeRounds."""
        self.num_streams += 1
        rounds = FakeRounds()
        first = await anext(aiter(request_iterator))
        rounds.hello = first.hello
        self.greeting(rounds)
        self._streams.put_nowait(rounds)
        async for response in rounds.run(request_iterator):
            yield response

    async def Describe(self, request: Any, context: Any) -> VerifyServiceDescribeResponse:
        """The usual welcome."""
        return welcome()

    def Generate(self, request_iterator: Any, context: Any) -> Any:
        """Not played."""
        raise NotImplementedError


class FakeReplica:
    """A FakeVerify behind a port; may be stopped and started again on the same one."""

    def __init__(self) -> None:
        self.verify = FakeVerify()
        self.port = 0
        self._server: GrpcServer | None = None

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listens, on the former port if there was one."""
        server = GrpcServer(["graft.v1.VerifyService"])
        add_VerifyServiceServicer_to_server(self.verify, server.server)
        self.port = await server.start("127.0.0.1", self.port)
        self._server = server

    async def stop(self) -> None:
        """Cuts every stream and stops listening."""
        if self._server is not None:
            await self._server.server.stop(None)
            self._server = None


@asynccontextmanager
async def fake_replica() -> AsyncIterator[FakeReplica]:
    """A running replica."""
    replica = FakeReplica()
    await replica.start()
    try:
        yield replica
    finally:
        await replica.stop()
