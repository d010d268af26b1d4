"""The gateway behind both of its surfaces: replicas, admission, answers, readiness.

Knows no HTTP and no client protos. Owned by one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

from graft.common import log
from graft.common.errors import (
    Draining,
    GraftError,
    ModelNotFound,
    NoReplica,
    Overloaded,
    reason_name,
)
from graft.common.model_files import resolve, tokenizer_digest
from graft.common.tracing import current, failed
from graft.gateway.answer import Answer
from graft.gateway.attend import Attendants, DraftReplicas
from graft.gateway.chat_request import ChatRequest
from graft.gateway.chat_template import ChatTemplate
from graft.gateway.choice import Limits
from graft.gateway.dialog import Dialog
from graft.gateway.generation import Services
from graft.gateway.job import ChoiceEvent, Job
from graft.gateway.metrics import Level, Metrics
from graft.gateway.pairing import draft_pairing, verify_pairing
from graft.gateway.prepare import Asked, Preparer, Target
from graft.gateway.record import tier_body
from graft.gateway.replicas import Replicas, State, Watch
from graft.gateway.request import CompletionRequest, Fields, SpeculationField
from graft.gateway.search import VerifyReplicas
from graft.gateway.settings import GatewaySettings
from graft.gateway.steering import Steering
from graft.gateway.streams import Closings
from graft.gateway.tiers.controller import make_policy
from graft.gateway.tokenizer import Tokenizer
from graft.gateway.traced import describe_answer
from graft.gateway.tree_counts import TreeCounts
from graft.gateway.wish import ChosenTier, choose_tier, proposers_of
from graft.v1 import draft_pb2
from graft.v1.sampling_pb2 import GrammarKind

_log = log.get("gateway")
_RETRY_AFTER_S = 1.0
_LAST_WORDS_S = 1.0


@dataclass(frozen=True, slots=True)
class Readiness:
    """Whether requests can be served now, and why not."""

    ready: bool
    state: str
    percent: int
    detail: str


class Gateway:
    """Everything between a request model and the services. `start` before use, `stop` after.

    Raises:
        ModelNotFound, InvalidArgument: the model's files do not give a tokenizer and a template.
    """

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        files = resolve(settings.model, weights=False, cache=settings.cache)
        self.model = settings.served_name or files.name
        self.created = int(time.time())
        self.draining = False
        self.tokenizer = Tokenizer(files.folder)
        template = ChatTemplate(
            settings.chat_template or self.tokenizer.chat_template,
            bos_token=self.tokenizer.bos_token,
            eos_token=self.tokenizer.eos_token,
        )
        dialog = Dialog.of(template, settings.tool_call_parser, settings.reasoning_parser)
        self.preparer = Preparer(self.tokenizer, dialog, settings.max_choices)
        self.metrics = Metrics()
        self.closings = Closings()
        self._names = {self.model, files.name, settings.model}
        digest = tokenizer_digest(files.folder)
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        watch = Watch(settings.poll_s, settings.silent_s, settings.stall_s, settings.resolve_s)
        tls, insecure = settings.tls, settings.insecure
        self.verify: VerifyReplicas = Replicas(
            verify_pairing(self.model, digest, lambda: self.verify),
            watch,
            tls=tls,
            plaintext_ok=insecure,
        )
        self.drafts: DraftReplicas = Replicas(
            draft_pairing(self.model, digest),
            watch,
            tls=tls,
            plaintext_ok=insecure,
        )
        self.attendants = Attendants(self.drafts, self.metrics, settings.silent_s)
        policy = make_policy(settings.tiers, settings.tier_config, settings.tree_deadline_ms / 1000)
        self.steering = Steering(settings.tiers, policy, self.metrics)
        self._services = Services(
            self.verify,
            self.attendants,
            self.closings,
            self.metrics,
            self.steering,
            lambda wish: self.tier(wish).tier,
        )
        self._limits = Limits(
            request_s=settings.request_timeout_s,
            progress_s=settings.progress_timeout_s,
            replay_s=settings.replay_timeout_s,
            tree_micros=settings.tree_deadline_ms * 1000,
        )
        self._watch_levels()

    async def start(self) -> None:
        """Begins to look for the replicas; returns before any is found."""
        self.verify.start(self.settings.verify)
        self.drafts.start(self.settings.draft)
        self.attendants.start()

    async def drain(self, limit_s: float) -> None:
        """Takes no new request and waits until the running ones have ended, at most `limit_s`."""
        self.draining = True
        self.verify.changed.notify()
        try:
            async with asyncio.timeout(limit_s):
                await self._idle.wait()
        except TimeoutError:
            _log.warning("requests were cut off", requests=self._in_flight)
            self.verify.abandon()
            with suppress(TimeoutError):
                async with asyncio.timeout(_LAST_WORDS_S):
                    await self._idle.wait()

    async def stop(self) -> None:
        """Ends every stream and closes all channels."""
        self.draining = True
        await self.closings.drain()
        await self.attendants.stop()
        await self.drafts.stop()
        await self.verify.stop()

    @property
    def num_in_flight(self) -> int:
        """Choices admitted and not ended."""
        return self._in_flight

    def check_model(self, name: str | None) -> None:
        """Refuses the name of a model that is not served.

        Raises:
            ModelNotFound: it is not ours.
        """
        if name is not None and name not in self._names:
            raise ModelNotFound(
                f"the model {name[:200]!r} is not served here; there is {self.model}",
                field="model",
            )

    def target(self) -> Target:
        """What verify serves: the least of its usable replicas.

        Raises:
            NoReplica: none has ever been reached, so nothing is known.
        """
        known = [r.description for r in self.verify if r.usable and r.description is not None]
        known = known or [
            r.description
            for r in self.verify
            if r.description is not None and r.state is not State.REFUSED
        ]
        if not known:
            raise NoReplica(
                f"no verify replica can take the request: {self.verify.describe_states()}",
                retry_after_s=_RETRY_AFTER_S,
            )
        return Target(
            context_length=min(description.context_length for description in known),
            vocab_size=min(description.vocab_size for description in known),
            grammar_kinds=self.grammar_kinds,
        )

    @property
    def grammar_kinds(self) -> frozenset[GrammarKind.ValueType]:
        """What answers may be held to, as at least one usable verify replica offers it."""
        found = [r.description for r in self.verify.usable() if r.description is not None]
        return frozenset(kind for description in found for kind in description.grammar_kinds)

    def unheeded(self, body: Fields) -> list[str]:
        """Names of all that a body asks for and that has no effect here."""
        holds = self.preparer.holds_strict_calls(self.grammar_kinds)
        return body.unknown if holds else body.unheeded

    def proposers(self) -> list[draft_pb2.ProposerDescription]:
        """What the draft replicas offer; one that is away for the moment still counts."""
        known = [r for r in self.drafts if r.description is not None]
        known = [r for r in known if r.state is not State.REFUSED]
        known.sort(key=lambda replica: not replica.usable)
        return proposers_of(r.description for r in known if r.description is not None)

    def tier(self, wish: str | SpeculationField | None) -> ChosenTier:
        """The tier of a request with this `speculation` field."""
        chosen = choose_tier(
            wish, self.settings.speculation, self.proposers(), self.drafts.describe_states()
        )
        return replace(chosen, offers=()) if self.settings.tiers == "fixed" else chosen

    async def prepare_chat(self, request: ChatRequest, asked: Asked) -> Job:
        """Checks a chat request and makes its job."""
        self.check_model(request.model)
        request.check()
        chosen = self.tier(request.speculation)
        return await self.preparer.chat(request, self.target(), chosen, asked)

    async def prepare_completion(self, request: CompletionRequest, asked: Asked) -> Job:
        """Checks a completion request and makes its job."""
        self.check_model(request.model)
        request.check()
        chosen = self.tier(request.speculation)
        return await self.preparer.complete(request, self.target(), chosen, asked)

    def answer(self, job: Job) -> Answer:
        """The answer to a job; nothing runs before `run`."""
        return Answer(job, self._services, self._limits, self.tokenizer)

    async def run(self, answer: Answer) -> AsyncGenerator[ChoiceEvent, None]:
        """Admits the answer and runs it.

        Raises:
            Overloaded, Draining: it is not admitted, and nothing has been started.
            GraftError: it cannot be finished.
        """
        try:
            with self._admitted(answer):
                async with aclosing(answer.events()) as events:
                    async for event in events:
                        yield event
        except GraftError as error:
            # Of a stream that has begun, nothing else says that it failed.
            failed(current(), reason_name(error.reason))
            raise
        finally:
            describe_answer(self.model, answer)

    @contextmanager
    def _admitted(self, answer: Answer) -> Iterator[None]:
        num_choices = len(answer.job.choices)
        if self.draining:
            raise Draining("the server is shutting down", retry_after_s=_RETRY_AFTER_S)
        if self._in_flight + num_choices > self.settings.max_queue:
            raise Overloaded(
                f"{self._in_flight} choices are running or waiting, limit is "
                f"{self.settings.max_queue}",
                retry_after_s=_RETRY_AFTER_S,
            )
        self._in_flight += num_choices
        self._idle.clear()
        self.metrics.prompt(answer.tally.num_prompt)
        try:
            yield
        finally:
            self._in_flight -= num_choices
            if not self._in_flight:
                self._idle.set()

    def readiness(self) -> Readiness:
        """Whether a request sent now would be served."""
        if self.draining:
            return Readiness(False, "draining", 100, f"{self._in_flight} choices are running")
        if self.verify.usable():
            return Readiness(True, "ready", 100, self.degraded())
        if self.verify.ever_up:
            return Readiness(False, "unavailable", 100, self.verify.describe_states())
        return Readiness(False, "starting", 0, self.verify.describe_states())

    def degraded(self) -> str:
        """Why some of what was configured is missing; empty when nothing is."""
        missing = [
            f"{kind} {replica.address} is {replica.state.value} ({replica.detail})"
            for kind, replicas in (("verify", self.verify), ("draft", self.drafts))
            for replica in replicas
            if not replica.usable and not replica.leaving
        ]
        return "; ".join(missing)

    def speculation_body(self) -> dict[str, Any]:
        """The `speculation` block of /v1/models and /server_info."""
        proposers = self.proposers()
        return {
            "default": self.settings.speculation,
            "proposers": [proposer.name for proposer in proposers],
            "tiers": [tier_body(self.tier(proposer.name).tier) for proposer in proposers],
            "details": [proposer.detail for proposer in proposers],
        }

    def _watch_levels(self) -> None:
        self.metrics.registry.register(
            TreeCounts(lambda: [r.description for r in self.verify if r.description is not None])
        )
        self.metrics.watch(
            Level("graft_kv_pages", "Pages of the KV pools", "state", self._kv_pages)
        )
        self.metrics.watch(
            Level("graft_replicas", "Replicas by state", "state", self._replica_states)
        )
        self.metrics.watch(
            Level("graft_spec_active", "Whether a proposer can draft", "algorithm", self._active)
        )
        self.metrics.watch(
            Level("graft_choices", "Choices in the gateway", "state", self._choice_levels)
        )

    def _kv_pages(self) -> dict[str, float]:
        found = [r.description for r in self.verify if r.usable and r.description is not None]
        total = sum(description.kv_page_count for description in found)
        free = sum(description.kv_page_free_count for description in found)
        return {"free": free, "used": total - free}

    def _replica_states(self) -> dict[str, float]:
        levels: dict[str, float] = {}
        for kind, replicas in (("verify", self.verify), ("draft", self.drafts)):
            for replica in replicas:
                key = f"{kind}_{replica.state.value}"
                levels[key] = levels.get(key, 0) + 1
        return levels

    def _active(self) -> dict[str, float]:
        usable = proposers_of(r.description for r in self.drafts.usable() if r.description)
        names = {proposer.name for proposer in usable}
        return {proposer.name: float(proposer.name in names) for proposer in self.proposers()}

    def _choice_levels(self) -> dict[str, float]:
        return {
            "in_flight": self._in_flight,
            "attended": self.attendants.num_sessions,
            "closing": self.closings.num_pending,
        }
