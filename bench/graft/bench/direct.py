"""One session at a verify replica, attended by a draft replica, without a gateway between.

Reads it as a gateway does, over a lane where there is one, so that a round's timings are seen as
they are reported and cost what they cost there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from graft.bench.rounds import Passage, Round
from graft.common.channel import open_channel
from graft.common.errors import GraftError
from graft.common.sampling import Sampling, StopRule, sampling_to_proto, stop_rule_to_proto
from graft.gateway.reader import Elsewhere, Lost, Reader, VerifyReplica
from graft.gateway.replicas import Replica
from graft.gateway.streams import Closings
from graft.v1 import draft_pb2, draft_pb2_grpc, tree_pb2, verify_pb2, verify_pb2_grpc

CALL_TIMEOUT_S = 600.0
_DESCRIBE_TIMEOUT_S = 10.0
_TREE_DEADLINE_MICROS = 2_000_000


class Pair:
    """A verify and a draft replica, and one Attend stream between us and the latter."""

    def __init__(
        self, verify_address: str, replica: VerifyReplica, attend: Any, tier: tree_pb2.Tier
    ) -> None:
        """verify_address: where drafters are told to go."""
        self._address = verify_address
        self._replica = replica
        self._closings = Closings()
        self._attend = attend
        self.tier = tier

    async def passage(
        self,
        prompt: Sequence[int],
        max_tokens: int,
        sampling: Sampling,
        *,
        speculate: bool,
        cache_salt: str = "",
    ) -> Passage:
        """Runs one session to its end.

        Raises:
            GraftError: it failed.
        """
        stub: Any = verify_pb2_grpc.VerifyServiceStub(self._replica.channel)
        reader = Reader(stub.Generate(timeout=CALL_TIMEOUT_S), self._replica, CALL_TIMEOUT_S)
        opening = verify_pb2.OpenSession(
            prompt_tokens=prompt,
            sampling=sampling_to_proto(sampling),
            stop=stop_rule_to_proto(StopRule(max_tokens)),
            tree_deadline_micros=_TREE_DEADLINE_MICROS if speculate else 0,
            cache_salt=cache_salt,
            speculate=speculate,
        )
        tokens: list[int] = []
        rounds: list[Round] = []
        last, deadline = 0.0, time.monotonic() + CALL_TIMEOUT_S
        try:
            await reader.write(verify_pb2.GenerateRequest(open=opening))
            opened = (await reader.next(deadline, started=False)).opened
            if opened.HasField("lane"):
                reader.take_lane(opened.lane)
            if speculate:
                await self._attend.write(self._attendance(opened))
            while (response := await reader.next(deadline, started=True)).HasField("committed"):
                now, commit = time.perf_counter(), response.committed
                tokens += commit.tokens
                if last and commit.plain_reason != verify_pb2.PLAIN_REASON_PREFILL:
                    rounds.append(_round(commit, now - last))
                last = now
        except (Lost, Elsewhere) as error:
            raise GraftError(f"the session was lost: {error}") from None
        finally:
            reader.close(self._closings, None)
        return Passage(tuple(tokens), tuple(rounds))

    async def close(self) -> None:
        """Waits for calls that are being wound up."""
        await self._closings.drain()

    def _attendance(self, opened: verify_pb2.SessionOpened) -> draft_pb2.AttendRequest:
        return draft_pb2.AttendRequest(
            attend=draft_pb2.AttendSession(
                session_id=opened.session_id,
                ticket=opened.ticket,
                verify_address=self._address,
                tier=self.tier,
            )
        )


@asynccontextmanager
async def paired(verify_address: str, draft_address: str, via: str = "") -> AsyncIterator[Pair]:
    """Both replicas, the draft's first proposer at its default tier.

    via: the address at which the draft replica is to reach verify, where that is another one.
    """
    async with open_channel(verify_address) as verify, open_channel(draft_address) as draft:
        drafter: Any = draft_pb2_grpc.DraftServiceStub(draft)
        described = await drafter.Describe(
            draft_pb2.DraftServiceDescribeRequest(), timeout=_DESCRIBE_TIMEOUT_S
        )
        attend = drafter.Attend()
        hearing = asyncio.create_task(_hear(attend))
        pair = Pair(
            via or verify_address,
            Replica(verify_address, verify),
            attend,
            described.proposers[0].default_tier,
        )
        try:
            yield pair
        finally:
            await pair.close()
            attend.cancel()
            hearing.cancel()
            await asyncio.gather(hearing, return_exceptions=True)


async def _hear(attend: Any) -> None:
    """Keeps the stream read; what the draft service reports shows in the rounds."""
    async for _ in attend:
        pass


def _round(commit: verify_pb2.TokensCommitted, wall: float) -> Round:
    timing = commit.timing
    return Round(
        wall,
        len(commit.tokens),
        timing.batch_row_count,
        draft=timing.draft_micros / 1e6,
        wire=max(0, timing.tree_wait_micros - timing.draft_micros) / 1e6,
        queue=timing.queue_micros / 1e6,
        forward=timing.forward_micros / 1e6,
        choice=timing.choice_micros / 1e6,
        drafted=commit.node_count > 0,
        ahead=commit.node_count > 0 and timing.tree_wait_micros == 0,
    )
