"""One choice at the verify services: open it, follow it, replay it elsewhere when it is lost.

Knows token ids and streams; knows no text. The committed tokens are kept here, so that a session
lost with its replica goes on at another one, from the same seed and position.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass, replace

from graft.common import log
from graft.common.errors import GraftError, Stalled
from graft.common.grammar import grammar_to_proto
from graft.common.sampling import Sampling, sampling_to_proto, stop_rule_to_proto
from graft.common.tier import OFF, Tier
from graft.common.tracing import current, outgoing_metadata, traceparent
from graft.gateway import placement
from graft.gateway.attend import Attendants
from graft.gateway.choice import Committed, Ended, Event, Limits, Opened, Plan
from graft.gateway.metrics import Metrics
from graft.gateway.reader import Call, Elsewhere, Lost, Reader, VerifyReplica
from graft.gateway.request import SpeculationField
from graft.gateway.search import Search, VerifyReplicas, num_sessions
from graft.gateway.steering import Steered, Steering, cut_offers
from graft.gateway.streams import Closings
from graft.gateway.tiers.seen import Switch
from graft.v1 import verify_pb2, verify_pb2_grpc
from graft.v1.sampling_pb2 import AcceptRule
from graft.v1.verify_pb2 import FinishReason

_log = log.get("generation")
_MAX_FRUITLESS_LOSSES = 5
# Fewer tokens are not worth a connection.
_LANE_TOKENS = 8


@dataclass(frozen=True, slots=True)
class Services:
    """What every choice shares. `tier_of` is the tier of a `speculation` field as of now."""

    verify: VerifyReplicas
    attendants: Attendants
    closings: Closings
    metrics: Metrics
    steering: Steering
    tier_of: Callable[[str | SpeculationField | None], Tier] = lambda _: OFF


class Generation:
    """One choice. Iterate `events` once; closing the iterator cancels the session everywhere."""

    def __init__(self, plan: Plan, services: Services, limits: Limits) -> None:
        self.cancel_reason = "client_gone"
        self._plan = plan
        self._services = services
        self._limits = limits
        self._committed: list[int] = []
        self._deadline = time.monotonic() + limits.request_s
        self._search = Search(plan, services.verify, self._deadline, limits.replay_s)
        self._prompt_logprobs_seen = False

    async def events(self) -> AsyncGenerator[Event, None]:
        """Follows the session through all its replicas to its end.

        Raises:
            GraftError: the session cannot be opened, or cannot go on.
        """
        fruitless = 0
        while True:
            replica = await self._search.replica()
            before = len(self._committed)
            try:
                async with aclosing(self._follow(replica)) as events:
                    async for event in events:
                        yield event
                        if isinstance(event, Ended):
                            return
            except GraftError as error:
                raise self._in_our_words(error) from None
            except Elsewhere as elsewhere:
                self._search.declined(replica, elsewhere.error)
                continue
            except Lost as loss:
                progressed = len(self._committed) > before
                self._search.lost(replica, progressed)
                fruitless = 0 if progressed else fruitless + 1
                _log.warning(
                    "session lost its replica",
                    request=self._plan.request_id,
                    tokens=len(self._committed),
                    replica=replica.address,
                    lost_to=str(loss),
                )
                current().add_event(
                    "session lost its replica",
                    {"graft.replica": replica.address, "graft.tokens": len(self._committed)},
                )
                if fruitless > _MAX_FRUITLESS_LOSSES:
                    raise GraftError(
                        f"the session was lost {fruitless} times without a new token"
                    ) from None
                ended = self._already_ended(replica)
                if ended is not None:
                    yield ended
                    return
                self._services.metrics.replay()

    def _in_our_words(self, error: GraftError) -> GraftError:
        """The error under the field that the client knows a grammar by."""
        if error.field == "grammar" and self._plan.structure is not None:
            error.field = self._plan.structure.field
        return error

    def _already_ended(self, replica: VerifyReplica) -> Ended | None:
        """The end of a session whose last message was lost, read off its tokens."""
        if not self._committed:
            return None
        last, stop = self._committed[-1], self._plan.stop
        description = replica.description
        if last in stop.stop_token_ids:
            return Ended(FinishReason.FINISH_REASON_STOP_ID, last)
        if description is not None and last in description.eos_token_ids and not stop.ignore_eos:
            return Ended(FinishReason.FINISH_REASON_EOS, last)
        length = len(self._plan.prompt) + len(self._committed)
        full = description is not None and length >= description.context_length
        if len(self._committed) >= stop.max_tokens or full:
            return Ended(FinishReason.FINISH_REASON_LENGTH, 0)
        return None

    def _steer(self, replica: VerifyReplica) -> Steered | None:
        """The helm of a session at a replica, None when its tier stays as it is."""
        plan, description = self._plan, replica.description
        if not plan.offers or description is None:
            return None
        offers = cut_offers(
            plan.offers,
            description.max_nodes,
            description.max_depth,
            chains_only=plan.sampling.compares_probs,
        )
        context = len(plan.prompt) + len(self._committed)
        return self._services.steering.open(
            replica.address, offers, max(1, num_sessions(replica)), context
        )

    def _attend(self, opened: verify_pb2.SessionOpened, replica: VerifyReplica, tier: Tier) -> None:
        wish = placement.Wish(
            opened.session_id,
            opened.ticket,
            replica.address,
            tier,
            traceparent(),
            self._plan.prediction,
        )
        self._services.attendants.attend(wish)

    async def _turn(self, switch: Switch, session: int, reader: Reader) -> None:
        """Tells the drafter its new tier, and verify whether there is a tree to wait for."""
        self._services.attendants.set_tier(session, switch.after)
        if switch.before.off != switch.after.off:
            micros = 0 if switch.after.off else self._limits.tree_micros
            await reader.write(_deadline_message(micros))

    def _late_tier(self, replica: VerifyReplica) -> Tier | None:
        """The tier that was wished before a drafter was known, once one is; kept for replays."""
        description = replica.description
        if self._plan.late is None or description is None:
            return None
        if not self._services.attendants.connected:
            return None
        try:
            tier = self._services.tier_of(self._plan.late)
        except GraftError:
            # The drafters that came have no such proposer; others may follow.
            return None
        tier = tier.within(description.max_nodes, description.max_depth)
        if tier.off:
            return None
        self._plan = replace(self._plan, tier=tier, late=None)
        return tier

    def _open_message(self, tier: Tier, *, speculate: bool) -> verify_pb2.GenerateRequest:
        plan = self._plan
        return verify_pb2.GenerateRequest(
            open=verify_pb2.OpenSession(
                prompt_tokens=plan.prompt,
                committed_tokens=self._committed,
                sampling=sampling_to_proto(plan.sampling),
                stop=stop_rule_to_proto(plan.stop),
                tree_deadline_micros=0 if tier.off else self._limits.tree_micros,
                want_logprobs=plan.want_logprobs,
                top_logprobs=plan.top_logprobs,
                want_prompt_logprobs=plan.want_prompt_logprobs and not self._prompt_logprobs_seen,
                request_id=plan.request_id,
                cache_salt=plan.cache_salt,
                speculate=speculate,
                want_trace=plan.want_trace,
                grammar=None
                if plan.structure is None
                else grammar_to_proto(plan.structure.grammar),
            )
        )

    def _hold_to(self, opened: verify_pb2.SessionOpened) -> Sampling:
        """The law in force; a replay asks for it, whatever the next replica's default is."""
        law = replace(
            self._plan.sampling,
            rule=opened.rule or AcceptRule.ACCEPT_RULE_COUPLED,
            threshold_single=opened.threshold_single or 1.0,
            threshold_acc=opened.threshold_acc or 1.0,
        )
        self._plan = replace(self._plan, sampling=law)
        return law

    async def _follow(self, replica: VerifyReplica) -> AsyncGenerator[Event, None]:
        """One session at one replica, from open to its end."""
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise self._too_long()
        description = replica.description
        assert description is not None
        steered = self._steer(replica)
        if steered is not None:
            tier = steered.tier
        else:
            tier = self._plan.tier.within(description.max_nodes, description.max_depth)
        speculate = steered is not None or not tier.off
        call: Call = verify_pb2_grpc.VerifyServiceStub(replica.channel).Generate(
            None, timeout=left_s, metadata=outgoing_metadata() or None
        )
        reader = Reader(call, replica, self._limits.progress_s)
        session: int | None = None
        ended = False
        replica.num_sessions += 1
        self._services.metrics.sessions_open.inc()
        try:
            await reader.write(self._open_message(tier, speculate=speculate))
            opened = await reader.next(self._deadline, started=False)
            if not opened.HasField("opened"):
                raise GraftError("the verify replica did not say that the session is open")
            session = opened.opened.session_id
            if opened.opened.HasField("lane") and self._plan.stop.max_tokens >= _LANE_TOKENS:
                reader.take_lane(opened.opened.lane)
            law = self._hold_to(opened.opened)
            if steered is not None:
                steered.session = session
            if speculate:
                self._attend(opened.opened, replica, tier)
            yield Opened(
                num_cached=opened.opened.cached_token_count,
                tier=tier,
                eos_tokens=frozenset(description.eos_token_ids),
                law=law,
                simulated=opened.opened.simulated,
            )
            started = False
            while not ended:
                message = await reader.next(self._deadline, started=started)
                if message.HasField("committed"):
                    started = True
                    if steered is not None:
                        tier = steered.in_force
                    commit = self._commit(message.committed, tier)
                    switch = None if steered is None else steered.observe(message.committed)
                    if switch is not None:
                        await self._turn(switch, session, reader)
                    if not speculate and (late := self._late_tier(replica)) is not None:
                        speculate, tier = True, late
                        self._attend(opened.opened, replica, tier)
                        await reader.write(_deadline_message(self._limits.tree_micros))
                    yield commit
                elif message.HasField("finished"):
                    ended = True
                    yield self._finish(message.finished)
                else:
                    raise GraftError("the verify replica sent an event out of order")
        finally:
            replica.num_sessions -= 1
            self._services.metrics.sessions_open.dec()
            if steered is not None:
                steered.close()
            if session is not None and speculate:
                self._services.attendants.release(session)
            farewell = None
            if not ended and session is not None and not call.done():
                farewell = verify_pb2.GenerateRequest(
                    cancel=verify_pb2.CancelSession(reason=self.cancel_reason)
                )
            reader.close(self._services.closings, farewell)

    def _commit(self, message: verify_pb2.TokensCommitted, tier: Tier) -> Committed:
        tokens = tuple(message.tokens)
        length = len(self._plan.prompt) + len(self._committed) + len(tokens)
        if not tokens or message.prefix_length != length:
            raise GraftError(
                f"the verify replica committed {len(tokens)} tokens to length "
                f"{message.prefix_length}, expected {length}"
            )
        if not message.accepted_count <= min(len(tokens), message.node_count):
            raise GraftError(
                f"the verify replica accepted {message.accepted_count} of {message.node_count} "
                f"drafted tokens in a commit of {len(tokens)}"
            )
        if self._plan.want_logprobs and len(message.logprobs) != len(tokens):
            raise GraftError(
                f"{len(message.logprobs)} log-probabilities came for {len(tokens)} tokens"
            )
        self._committed += tokens
        if message.prompt_logprobs:
            self._prompt_logprobs_seen = True
        return Committed(
            tokens=tokens,
            num_accepted=message.accepted_count,
            num_drafted=message.node_count,
            plain_reason=message.plain_reason,
            logprobs=message.logprobs,
            prompt_logprobs=message.prompt_logprobs,
            timing=message.timing,
            tier=tier,
            trace=message.trace if message.HasField("trace") else None,
        )

    def _finish(self, message: verify_pb2.SessionFinished) -> Ended:
        if message.reason in (
            FinishReason.FINISH_REASON_CANCELLED,
            FinishReason.FINISH_REASON_UNSPECIFIED,
        ):
            raise GraftError("the verify replica gave the session up")
        return Ended(message.reason, message.stop_token)

    def _too_long(self) -> Stalled:
        return Stalled(f"the request ran longer than {self._limits.request_s:g} s")


def _deadline_message(micros: int) -> verify_pb2.GenerateRequest:
    deadline = verify_pb2.SetTreeDeadline(tree_deadline_micros=micros)
    return verify_pb2.GenerateRequest(set_deadline=deadline)
