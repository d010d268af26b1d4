"""One request of the client: all its choices, as they come. Knows no HTTP and no proto."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing

from graft.gateway.choice import Committed, Ended, Limits, Opened
from graft.gateway.generation import Generation, Services
from graft.gateway.job import ChoiceEvent, ChoicePlan, Delta, Finished, Job, Started, Tally
from graft.gateway.rounds import SeenRound, check_trace
from graft.gateway.streams import settle
from graft.gateway.tokenizer import Tokenizer
from graft.gateway.voice import NOTHING, Counts, Voice

_QUEUE_EVENTS = 64


class Answer:
    """Runs all choices of a job. Iterate `events` once; closing it cancels every choice."""

    def __init__(self, job: Job, services: Services, limits: Limits, tokenizer: Tokenizer) -> None:
        self.job = job
        self._counts = Counts(job, services.metrics)
        self._services = services
        self._limits = limits
        self._tokenizer = tokenizer
        self._began = time.monotonic()

    @property
    def tally(self) -> Tally:
        """What the request has cost so far; exact at every event."""
        return self._counts.tally

    async def events(self) -> AsyncGenerator[ChoiceEvent, None]:
        """The events of all choices as they come; a failed choice fails the request.

        Raises:
            GraftError: a choice cannot be finished.
        """
        if len(self.job.choices) == 1:
            ended = False
            try:
                async with aclosing(self._choice(0, self.job.choices[0])) as events:
                    async for only in events:
                        ended = isinstance(only, Finished)
                        yield only
            except (asyncio.CancelledError, GeneratorExit):
                if not ended:
                    self._services.metrics.cancelled("client")
                raise
            return
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
        voice = Voice(choice, self._tokenizer, self._counts)
        first_at: float | None = None
        num_rounds = 0
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
                    rounds = self._seen(choice, num_rounds, event)
                    num_rounds += 1
                    if rounds or last.prompt or not last.piece.empty:
                        yield Delta(index, last.piece, last.prompt, rounds)
                    if voice.text.stopped is None:
                        continue
                    generation.cancel_reason = "stop_string"
                    last, reason, stop = NOTHING, "stop", voice.text.stopped
                if not last.piece.empty:
                    yield Delta(index, last.piece)
                self._note_end(voice, first_at)
                yield Finished(index, reason, stop)
                return

    def _seen(self, choice: ChoicePlan, number: int, commit: Committed) -> tuple[SeenRound, ...]:
        """The round for those who asked for it."""
        if not choice.plan.want_trace:
            return ()
        if commit.trace is not None:
            check_trace(commit.trace)
        millis = (time.monotonic() - self._began) * 1000
        return (SeenRound(number, millis, commit.tier, commit),)

    def _note_first_token(self) -> float:
        now = time.monotonic()
        self._services.metrics.first_token(now - self._began)
        return now

    def _note_end(self, voice: Voice, first_at: float | None) -> None:
        now = time.monotonic()
        record = voice.record
        self._services.metrics.choice(
            tokens=voice.num_emitted,
            seconds=now - self._began,
            decode_seconds=now - (first_at or now),
            rate=record.acceptance_rate if record.num_drafted else None,
        )
