"""Where a session may go: the replica that is tried next, and how long one is waited for.

Knows replicas by what they said of themselves, and which of them lost or declined this session.
"""

from __future__ import annotations

import time
from typing import Final

from graft.common.errors import Draining, GraftError, NoReplica, Unsupported
from graft.gateway import placement
from graft.gateway.choice import Plan
from graft.gateway.reader import VerifyReplica
from graft.gateway.replicas import Replicas
from graft.v1 import verify_pb2

VerifyReplicas = Replicas[verify_pb2.VerifyServiceDescribeResponse]
_RETRY_AFTER_S: Final = 1.0


class Search:
    """One session's way through the verify replicas."""

    def __init__(
        self, plan: Plan, replicas: VerifyReplicas, deadline: float, replay_s: float
    ) -> None:
        """deadline: of the request, on the monotonic clock. replay_s: how long a lost one waits."""
        self._plan = plan
        self._replicas = replicas
        self._deadline = deadline
        self._replay_s = replay_s
        self._affinity = placement.affinity_key(plan.cache_salt, plan.prompt)
        self._lost_at: dict[str, float] = {}
        self._declined: set[str] = set()
        self._refusal: GraftError | None = None
        self._waiting_since: float | None = None

    async def replica(self) -> VerifyReplica:
        """The replica to try; one is waited for only where the session has been lost.

        Raises:
            GraftError: there is none, or none came in time.
        """
        while True:
            if self._replicas.closed:
                raise Draining("the server is shutting down", retry_after_s=_RETRY_AFTER_S)
            found = self._choose()
            if found is not None:
                return found
            if self._waiting_since is None:
                raise self._refusal or self._no_replica()
            await self._wait(self._waiting_since)
            self._declined.clear()

    def declined(self, replica: VerifyReplica, error: GraftError) -> None:
        """The replica has no room; the others are asked before it is again."""
        self._refusal = error
        self._declined.add(replica.address)

    def lost(self, replica: VerifyReplica, progressed: bool) -> None:
        """The session broke off at the replica, which must be heard of before it is tried again."""
        now = time.monotonic()
        self._lost_at[replica.address] = now
        self._replicas.suspect(replica)
        if self._waiting_since is None or progressed:
            self._waiting_since = now

    def _choose(self) -> VerifyReplica | None:
        """A usable replica that has been heard of since it last lost this session."""
        usable = {
            replica.address: replica
            for replica in self._replicas.usable()
            if replica.polled_at > self._lost_at.get(replica.address, -1.0)
            and self._offers_structure(replica)
        }
        loads = [
            placement.VerifyLoad(address, num_sessions(replica))
            for address, replica in usable.items()
        ]
        address = placement.choose_verify(loads, self._affinity, self._declined)
        return None if address is None else usable[address]

    def _offers_structure(self, replica: VerifyReplica) -> bool:
        """False for a replica that would pass the grammar of the answer over."""
        structure, description = self._plan.structure, replica.description
        if structure is None:
            return True
        return description is not None and structure.grammar.kind in description.grammar_kinds

    def _no_replica(self) -> GraftError:
        structure = self._plan.structure
        if structure is not None and self._replicas.usable():
            return Unsupported(
                f"{structure.field} is not offered by this server", field=structure.field
            )
        return NoReplica(
            f"no verify replica can take the request: {self._replicas.describe_states()}",
            retry_after_s=_RETRY_AFTER_S,
        )

    async def _wait(self, since: float) -> None:
        left_s = min(since + self._replay_s, self._deadline) - time.monotonic()
        if left_s <= 0:
            raise self._refusal or NoReplica(
                "the verify replica of this request was lost and none came back within "
                f"{self._replay_s:g} s",
                retry_after_s=_RETRY_AFTER_S,
            )
        await self._replicas.changed.wait(min(left_s, 1.0))


def num_sessions(replica: VerifyReplica) -> int:
    """Our own sessions there at once, or what the replica said of everybody's, if more."""
    description = replica.description
    told = 0
    if description is not None:
        told = description.running_session_count + description.waiting_session_count
    return max(replica.num_sessions, told)
