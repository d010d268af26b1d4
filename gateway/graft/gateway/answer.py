"""One request of the client: its choices as text, with exact counts. Knows no HTTP and no proto.

The counts follow one rule: what is emitted is what is counted. A stop string, a stop id or an
end-of-sequence id that is not part of the text is not emitted; its log-probability is not either.
Speculation counts one thing more, the tokens of the stop itself, since those were decided too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Literal

from graft.common.tier import OFF, Tier
from graft.gateway.generation import (
    Committed,
    Ended,
    Generation,
    Limits,
    Opened,
    Plan,
    Services,
)
from graft.gateway.metrics import RoundStages
from graft.gateway.record import SpeculationRecord
from graft.gateway.streams import settle
from graft.gateway.text import (
    Decided,
    Emitted,
    Logprob,
    Origin,
    Piece,
    StopStrings,
    TextStream,
)
from graft.gateway.tokenizer import Tokenizer
from graft.v1 import verify_pb2
from graft.v1.verify_pb2 import FinishReason, PlainReason

Reason = Literal["stop", "length"]
_QUEUE_EVENTS = 64
_END_IDS = (FinishReason.FINISH_REASON_EOS, FinishReason.FINISH_REASON_STOP_ID)


@dataclass(frozen=True, slots=True)
class ChoicePlan:
    """One choice of a request: `plan` has its own seed already."""

    plan: Plan
    stops: StopStrings
    skip_specials: bool = True
    discard: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """A request, checked and tokenized: its choices in the order of their index.

    `prompt_sizes` counts every prompt once, however many choices it has. `tier_label` is a word
    for metrics, drawn from a small set.
    """

    request_id: str
    choices: tuple[ChoicePlan, ...]
    prompt_sizes: tuple[int, ...]
    num_per_prompt: int = 1
    tier: Tier = OFF
    tier_label: str = "off"
    inactive_reason: str = ""


@dataclass(frozen=True, slots=True)
class PromptLogprob:
    """Log-probability of a prompt token; the first one has none."""

    token: int
    logprob: Logprob | None


@dataclass(frozen=True, slots=True)
class Started:
    """A choice's session is open."""

    index: int


@dataclass(frozen=True, slots=True)
class Delta:
    """Text and tokens of a choice that may leave now."""

    index: int
    piece: Piece
    prompt: tuple[PromptLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a choice. `stop` is the stop string or id that was met, if it was one."""

    index: int
    reason: Reason
    stop: str | int | None


ChoiceEvent = Started | Delta | Finished


@dataclass(slots=True)
class Collected:
    """One choice of an answer that is not streamed."""

    text: str = ""
    tokens: list[Emitted] = field(default_factory=list)
    prompt: Sequence[PromptLogprob] = ()
    reason: Reason = "length"
    stop: str | int | None = None

    def take(self, event: ChoiceEvent) -> None:
        """Adds an event of this choice, in place."""
        match event:
            case Started():
                pass
            case Delta(_, piece, prompt):
                self.text += piece.text
                self.tokens += piece.tokens
                self.prompt = self.prompt or prompt
            case Finished(_, reason, stop):
                self.reason, self.stop = reason, stop


@dataclass(slots=True)
class Tally:
    """What a request has cost so far; exact at every event."""

    num_prompt: int = 0
    num_cached: int = 0
    num_completion: int = 0
    record: SpeculationRecord = field(default_factory=SpeculationRecord)


class Answer:
    """Runs all choices of a job. Iterate `events` once; closing it cancels every choice."""

    def __init__(self, job: Job, services: Services, limits: Limits, tokenizer: Tokenizer) -> None:
        self.job = job
        self.tally = Tally(num_prompt=sum(job.prompt_sizes))
        self.tally.record.tier = job.tier
        self.tally.record.inactive_reason = job.inactive_reason
        self._services = services
        self._limits = limits
        self._tokenizer = tokenizer
        self._began = time.monotonic()

    async def events(self) -> AsyncGenerator[ChoiceEvent, None]:
        """The events of all choices as they come; a failed choice fails the request.

        Raises:
            GraftError: a choice cannot be finished.
        """
        queue: asyncio.Queue[ChoiceEvent | Exception] = asyncio.Queue(_QUEUE_EVENTS)
        tasks = [
            asyncio.create_task(self._run(index, choice, queue))
            for index, choice in enumerate(self.job.choices)
        ]
        left = len(tasks)
        try:
            while left:
                event = await queue.get()
                if isinstance(event, Exception):
                    raise event
                if isinstance(event, Finished):
                    left -= 1
                yield event
        finally:
            if left:
                for task in tasks:
                    task.cancel()
            for task in tasks:
                await settle(task)

    async def _run(
        self, index: int, choice: ChoicePlan, queue: asyncio.Queue[ChoiceEvent | Exception]
    ) -> None:
        try:
            async with aclosing(self._choice(index, choice)) as events:
                async for event in events:
                    await queue.put(event)
        except asyncio.CancelledError:
            self._services.metrics.cancelled("client")
            raise
        except Exception as error:
            await queue.put(error)

    async def _choice(self, index: int, choice: ChoicePlan) -> AsyncGenerator[ChoiceEvent, None]:
        """Turns the commits of one choice into text until the text or the session ends."""
        generation = Generation(choice.plan, self._services, self._limits)
        voice = _Voice(choice, self._tokenizer, self)
        first_at: float | None = None
        async with aclosing(generation.events()) as events:
            async for event in events:
                if isinstance(event, Opened):
                    if index % self.job.num_per_prompt == 0 and not voice.opened:
                        self.tally.num_cached += min(event.num_cached, len(choice.plan.prompt))
                    if voice.open(event):
                        yield Started(index)
                    continue
                if isinstance(event, Ended):
                    last, reason, stop = voice.end(event)
                else:
                    first_at = first_at or self._note_first_token()
                    last = voice.commit(event)
                    if last.prompt or not last.piece.empty:
                        yield Delta(index, last.piece, last.prompt)
                    if voice.text.stopped is None:
                        continue
                    generation.cancel_reason = "stop_string"
                    last, reason, stop = _NOTHING, "stop", voice.text.stopped
                if not last.piece.empty:
                    yield Delta(index, last.piece)
                self._note_end(voice, first_at)
                yield Finished(index, reason, stop)
                return

    def _note_first_token(self) -> float:
        now = time.monotonic()
        self._services.metrics.first_token(now - self._began)
        return now

    def _note_end(self, voice: _Voice, first_at: float | None) -> None:
        now = time.monotonic()
        record = voice.record
        self._services.metrics.choice(
            tokens=voice.num_emitted,
            seconds=now - self._began,
            decode_seconds=now - (first_at or now),
            rate=record.acceptance_rate if record.num_drafted else None,
        )

    def count_round(self, commit: Committed, kept: int) -> None:
        """Adds one round to the metrics; its choice's record has it already."""
        reason = commit.plain_reason
        speculates = not self.job.tier.off
        if speculates and reason not in (
            PlainReason.PLAIN_REASON_UNSPECIFIED,
            PlainReason.PLAIN_REASON_PREFILL,
        ):
            name = PlainReason.Name(reason).removeprefix("PLAIN_REASON_").lower()
            self._services.metrics.fallback(name)
        timing = commit.timing
        self._services.metrics.round(
            tier=self.job.tier_label,
            drafted=commit.num_drafted,
            accepted=commit.num_accepted,
            kept=kept,
            stages=RoundStages(
                draft=timing.draft_micros,
                wire=max(0, timing.tree_wait_micros - timing.draft_micros),
                verify=timing.queue_micros + timing.forward_micros,
                commit=timing.choice_micros,
            ),
        )


_NO_PIECE = Piece()


@dataclass(frozen=True, slots=True)
class _Said:
    piece: Piece = _NO_PIECE
    prompt: tuple[PromptLogprob, ...] = ()


_NOTHING = _Said()


class _Voice:
    """Text, counts and speculation record of one choice."""

    def __init__(self, choice: ChoicePlan, tokenizer: Tokenizer, answer: Answer) -> None:
        skip = choice.skip_specials
        self.text = TextStream(
            lambda token: tokenizer.token_bytes(token, skip_specials=skip), choice.stops
        )
        self.record = SpeculationRecord(tier=choice.plan.tier)
        self.opened = False
        self.num_emitted = 0
        self._choice = choice
        self._answer = answer
        self._withheld: Decided | None = None
        self._end_ids = choice.plan.stop.stop_token_ids

    def open(self, opened: Opened) -> bool:
        """True for the first session of the choice, False for a replay."""
        if not self._choice.plan.stop.ignore_eos:
            self._end_ids = self._end_ids | opened.eos_tokens
        first, self.opened = not self.opened, True
        return first

    def commit(self, commit: Committed) -> _Said:
        """Feeds one commit. A last token that ends the session waits for the session's word."""
        decided = _decided(commit, self._choice.plan.want_logprobs)
        if self._withheld is not None:
            decided.insert(0, self._withheld)
            self._withheld = None
        if decided[-1].token in self._end_ids:
            self._withheld = decided.pop()
        before = self.text.num_fed
        piece = self._emit(self.text.feed(decided))
        kept = self.text.num_fed - before
        if self._withheld is not None and self.text.stopped is None:
            kept += 1
        if commit.plain_reason != PlainReason.PLAIN_REASON_PREFILL:
            self._count(commit, kept)
        return _Said(piece, _prompt_logprobs(self._choice.plan, commit))

    def end(self, ended: Ended) -> tuple[_Said, Reason, str | int | None]:
        """The rest of the text, why it ended, and the id it ended at."""
        by_id = ended.reason == FinishReason.FINISH_REASON_STOP_ID
        if self._choice.discard:
            return _NOTHING, "length", None
        withheld = self._withheld
        piece = Piece()
        if withheld is not None and (
            ended.reason not in _END_IDS or (by_id and self._choice.stops.included)
        ):
            piece = self.text.feed([withheld])
        if self.text.stopped is None:
            piece = piece + self.text.finish()
        said = _Said(self._emit(piece))
        if self.text.stopped is not None:
            return said, "stop", self.text.stopped
        if ended.reason in _END_IDS:
            return said, "stop", ended.stop_token if by_id else None
        return said, "length", None

    def _emit(self, piece: Piece) -> Piece:
        if self._choice.discard:
            return Piece()
        self.num_emitted += len(piece.tokens)
        self._answer.tally.num_completion += len(piece.tokens)
        return piece

    def _count(self, commit: Committed, kept: int) -> None:
        for record in (self.record, self._answer.tally.record):
            record.add_round(drafted=commit.num_drafted, accepted=commit.num_accepted, kept=kept)
        self._answer.count_round(commit, kept)


def _decided(commit: Committed, want_logprobs: bool) -> list[Decided]:
    drafted = commit.num_drafted > 0
    decided = []
    for place, token in enumerate(commit.tokens):
        if place < commit.num_accepted:
            origin = Origin.ACCEPTED
        else:
            origin = Origin.BONUS if drafted else Origin.PLAIN
        logprob = _logprob(commit.logprobs[place]) if want_logprobs else None
        decided.append(Decided(token, origin, logprob))
    return decided


def _logprob(entry: verify_pb2.TokenLogprobs) -> Logprob:
    return Logprob(entry.logprob, tuple(zip(entry.top_tokens, entry.top_logprobs, strict=True)))


def _prompt_logprobs(plan: Plan, commit: Committed) -> tuple[PromptLogprob, ...]:
    if not commit.prompt_logprobs:
        return ()
    rest = [PromptLogprob(entry.token, _logprob(entry)) for entry in commit.prompt_logprobs]
    return (PromptLogprob(plan.prompt[0], None), *rest)
