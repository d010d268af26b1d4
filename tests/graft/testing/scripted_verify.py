"""A verify service that says what a script tells it: real gRPC, no model, no drafter.

Every session continues with the script's tokens, in rounds of the script's widths, cut by the
stop rule like a real one. Knows Describe and Generate; offers no Rounds.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from graft.common.channel import PROTOCOL_REVISION
from graft.common.errors import Unsupported
from graft.common.sampling import StopRule, stop_rule_from_proto
from graft.common.server import GrpcServer
from graft.v1 import verify_pb2, verify_pb2_grpc
from graft.v1.verify_pb2 import FinishReason, PlainReason

SERVICE = "graft.v1.VerifyService"


@dataclass(slots=True)
class Script:
    """What all sessions do.

    tokens: generated token i of every session is tokens[i].
    reply: what a session says in place of `tokens`, by what it was opened with.
    widths: tokens of each round after the prefill, cycled; a round of w has w - 1 accepted.
    extra_nodes: drafted nodes of a round beyond the accepted ones.
    at_open, before_commit, before_finish: awaited at those places, before_commit with the number
        of tokens committed so far; they may wait, or raise what the call is to fail with.
    says_opened: further fields of the first message.
    """

    tokens: Sequence[int]
    widths: Sequence[int] = (1,)
    extra_nodes: int = 0
    eos: frozenset[int] = frozenset({258})
    at_open: Callable[[verify_pb2.OpenSession], Awaitable[None]] | None = None
    before_commit: Callable[[int], Awaitable[None]] | None = None
    before_finish: Callable[[], Awaitable[None]] | None = None
    skew: int = 0
    finish: FinishReason.ValueType | None = None
    describe: dict[str, Any] = field(default_factory=dict)
    says_opened: dict[str, Any] = field(default_factory=dict)
    reply: Callable[[verify_pb2.OpenSession], Sequence[int]] | None = None
    hang_describe: bool = False


class ScriptedVerify(verify_pb2_grpc.VerifyServiceServicer):
    """One replica. `opened` and `cancelled` keep what the gateway asked for."""

    def __init__(self, script: Script, **described: Any) -> None:
        self.script = script
        self.opened: list[verify_pb2.OpenSession] = []
        self.cancelled: list[str] = []
        self.num_open = 0
        self.changed = asyncio.Condition()
        self.incarnation = secrets.randbits(63)
        self._described = described
        self._server: GrpcServer | None = None
        self.port = 0

    @property
    def address(self) -> str:
        """Where it listens."""
        return f"127.0.0.1:{self.port}"

    async def start(self, port: int = 0) -> str:
        """Listens; returns the address."""
        self._server = GrpcServer([SERVICE])
        verify_pb2_grpc.add_VerifyServiceServicer_to_server(self, self._server.server)
        self.port = await self._server.start("127.0.0.1", port)
        return self.address

    async def stop(self) -> None:
        """Ends at once, with every stream."""
        if self._server is not None:
            await self._server.server.stop(None)
            self._server = None

    async def until(self, what: Callable[[], bool]) -> None:
        """Waits until something is true of this replica; the test's timeout is the limit."""
        async with self.changed:
            await self.changed.wait_for(what)

    async def Describe(
        self, request: verify_pb2.VerifyServiceDescribeRequest, context: Any
    ) -> verify_pb2.VerifyServiceDescribeResponse:
        if self.script.hang_describe:
            await asyncio.Event().wait()
        fields: dict[str, Any] = {
            "protocol_revision": PROTOCOL_REVISION,
            "incarnation_id": self.incarnation,
            "model_id": "scripted",
            "vocab_size": 320,
            "context_length": 512,
            "max_nodes": 64,
            "max_depth": 32,
            "max_trees": 8,
            "eos_token_ids": sorted(self.script.eos),
            "kv_page_count": 100,
            "kv_page_free_count": 60,
        }
        fields |= self._described | self.script.describe
        return verify_pb2.VerifyServiceDescribeResponse(**fields)

    async def Generate(
        self, requests: AsyncIterator[verify_pb2.GenerateRequest], context: Any
    ) -> AsyncIterator[verify_pb2.GenerateResponse]:
        opening = (await anext(requests)).open
        if self.script.at_open is not None:
            await self.script.at_open(opening)
        await self._note(self.opened.append, opening)
        self.num_open += 1
        cancel = asyncio.create_task(self._until_cancelled(requests))
        step: asyncio.Task[verify_pb2.GenerateResponse | None] | None = None
        events = self._session(opening)
        try:
            for number in itertools.count():
                step = asyncio.create_task(_step(events))
                await asyncio.wait({step, cancel}, return_when=asyncio.FIRST_COMPLETED)
                if not step.done():
                    self.cancelled.append(cancel.result())
                    return
                event = step.result()
                if event is None:
                    return
                event.sequence = number + (self.script.skew if number > 1 else 0)
                yield event
        finally:
            cancel.cancel()
            if step is not None:
                step.cancel()
            self.num_open -= 1
            await self._note(lambda _: None, None)

    async def Rounds(
        self, requests: AsyncIterator[verify_pb2.RoundsRequest], context: Any
    ) -> AsyncIterator[verify_pb2.RoundsResponse]:
        raise Unsupported("a script has no rounds")
        yield

    async def _note(self, act: Callable[[Any], None], value: Any) -> None:
        async with self.changed:
            act(value)
            self.changed.notify_all()

    async def _until_cancelled(self, requests: AsyncIterator[verify_pb2.GenerateRequest]) -> str:
        async for request in requests:
            if request.HasField("cancel"):
                return request.cancel.reason
        return "half-close"

    async def _session(
        self, opening: verify_pb2.OpenSession
    ) -> AsyncGenerator[verify_pb2.GenerateResponse, None]:
        script = self.script
        yield verify_pb2.GenerateResponse(
            opened=verify_pb2.SessionOpened(
                session_id=secrets.randbits(64),
                ticket=b"ticket",
                incarnation_id=self.incarnation,
                **script.says_opened,
            )
        )
        stop = stop_rule_from_proto(opening.stop)
        tokens = script.tokens if script.reply is None else script.reply(opening)
        done = len(opening.committed_tokens)
        widths = itertools.chain([1], itertools.cycle(script.widths))
        prefill = True
        while True:
            if script.before_commit is not None:
                await script.before_commit(done)
            width = next(widths)
            block = list(tokens[done : done + width])
            kept, reason = self._cut(block, done, stop)
            accepted = min(len(kept), width - 1)
            yield verify_pb2.GenerateResponse(
                committed=verify_pb2.TokensCommitted(
                    tokens=kept,
                    accepted_count=accepted,
                    node_count=width - 1 + script.extra_nodes if width > 1 else 0,
                    prefix_length=len(opening.prompt_tokens) + done + len(kept),
                    logprobs=map(_logprobs, kept) if opening.want_logprobs else [],
                    prompt_logprobs=map(_logprobs, opening.prompt_tokens[1:])
                    if prefill and opening.want_prompt_logprobs
                    else [],
                    plain_reason=_plain_reason(prefill, width, opening.speculate),
                )
            )
            prefill = False
            done += len(kept)
            if reason is not None:
                if script.before_finish is not None:
                    await script.before_finish()
                yield verify_pb2.GenerateResponse(
                    finished=verify_pb2.SessionFinished(
                        reason=script.finish or reason, stop_token=kept[-1]
                    )
                )
                return

    def _cut(
        self, block: Sequence[int], done: int, stop: StopRule
    ) -> tuple[list[int], FinishReason.ValueType | None]:
        kept: list[int] = []
        for token in block:
            kept.append(token)
            if token in self.script.eos and not stop.ignore_eos:
                return kept, FinishReason.FINISH_REASON_EOS
            if token in stop.stop_token_ids:
                return kept, FinishReason.FINISH_REASON_STOP_ID
            if done + len(kept) >= stop.max_tokens:
                return kept, FinishReason.FINISH_REASON_LENGTH
        if not kept:
            raise AssertionError("the script has no more tokens")
        return kept, None


async def _step(
    events: AsyncGenerator[verify_pb2.GenerateResponse, None],
) -> verify_pb2.GenerateResponse | None:
    return await anext(events, None)


def _logprobs(token: int) -> verify_pb2.TokenLogprobs:
    return verify_pb2.TokenLogprobs(
        token=token, logprob=-0.5, top_tokens=[token, 65], top_logprobs=[-0.5, -1.5]
    )


def _plain_reason(prefill: bool, width: int, speculate: bool) -> PlainReason.ValueType:
    if prefill:
        return PlainReason.PLAIN_REASON_PREFILL
    if width > 1:
        return PlainReason.PLAIN_REASON_UNSPECIFIED
    return PlainReason.PLAIN_REASON_LATE if speculate else PlainReason.PLAIN_REASON_OFF
