"""The target writes: many sessions at once through the verify engine's scheduler, in process.

Hidden states are taken out of the same forward passes. A text is a function of weights, prompt,
law and seed alone, so nothing here depends on which sessions happen to share a batch. Knows token
ids and states; knows no text, no file and no split.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from graft.common.errors import GraftError
from graft.common.sampling import Sampling, StopRule
from graft.kernels.ops import ChoiceRows, KvCache, StepRows
from graft.models.decoder import Capture, Decoder
from graft.train.quantise import Int8Array, ScaleArray, quantise
from graft.v1.verify_pb2 import FinishReason
from graft.verify.ending import Ending
from graft.verify.events import Committed, Failed, Finished
from graft.verify.loading import Loaded, load
from graft.verify.runner import Model, Runner
from graft.verify.scheduler import Scheduler, SchedulerLimits
from graft.verify.session import Session, SessionRequest
from graft.verify.settings import VerifySettings
from graft.verify.step import Chunk, Step

_CHUNK_TOKENS = 128
_NO_TOKENS = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Ask:
    """One text to be written. key: the caller's own name for it, unique among those at work."""

    key: int
    prompt: tuple[int, ...]
    sampling: Sampling
    max_tokens: int


@dataclass(frozen=True, slots=True, eq=False)
class Written:
    """What came of an `Ask`.

    tokens: the answer alone. finish: eos or length. rows: [n - 1, layers, hidden], int8, and
    scales: [n - 1, layers], float32, of prompt and answer together, without the last token; both
    None where no states were asked for.
    """

    ask: Ask
    tokens: tuple[int, ...]
    finish: str
    rows: Int8Array | None
    scales: ScaleArray | None


@dataclass(frozen=True, slots=True)
class Desk:
    """How the target is run. sessions: texts written at once."""

    target: str
    precision: str = "fp32"
    threads: int = 2
    sessions: int = 32
    kv_tokens: int = 32_768
    context_length: int = 2048

    def settings(self) -> VerifySettings:
        """The same, as the verify engine is told."""
        flags = {
            "model": self.target,
            "precision": self.precision,
            "threads": self.threads,
            "max_running": self.sessions,
            "kv_tokens": self.kv_tokens,
            "max_step_rows": self.sessions + 4 * _CHUNK_TOKENS,
            "chunk_tokens": _CHUNK_TOKENS,
            "feature_memory_mb": 0,
            "log_level": "warning",
        }
        return VerifySettings.load(None, flags)


class Author:
    """A loaded target and the states to take of it. One thread uses it."""

    def __init__(self, loaded: Loaded, sessions: int, layers: Sequence[int] = ()) -> None:
        """layers: as in `Capture`; the last one of all is taken before the final norm."""
        self.loaded = loaded
        self.num_tokens = 0
        self._tap = _Tap(loaded.target.decoder, tuple(layers)) if layers else None
        model: Model = loaded.target.decoder if self._tap is None else self._tap
        self._runner = Runner(model, loaded.ops, loaded.kv)
        self._limits = SchedulerLimits(
            sessions, sessions, sessions + 4 * _CHUNK_TOKENS, _CHUNK_TOKENS
        )

    def write(self, asks: Iterable[Ask]) -> Iterator[Written]:
        """Texts in the order in which they end; asks are taken as places come free.

        Raises:
            GraftError: a session failed, which a sound target never makes happen.
        """
        scheduler = Scheduler(self._limits, self.loaded.new_pool())
        coming = iter(asks)
        drafts: dict[int, _Draft] = {}
        while True:
            while scheduler.num_sessions < self._limits.max_running:
                ask = next(coming, None)
                if ask is None:
                    break
                drafts[ask.key] = self._open(scheduler, ask)
            if not drafts:
                return
            self._step(scheduler, drafts)
            for event in scheduler.take_events():
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Committed):
                    drafts[event.session_id].tokens.extend(event.tokens)
                    self.num_tokens += len(event.tokens)
                elif isinstance(event, Finished):
                    yield drafts.pop(event.session_id).written(event.reason)

    def _open(self, scheduler: Scheduler, ask: Ask) -> _Draft:
        target, stop = self.loaded.target, StopRule(ask.max_tokens)
        room = target.context_length - len(ask.prompt)
        if room < 1:
            raise GraftError(f"prompt {ask.key} has {len(ask.prompt)} tokens, room is {room}")
        request = SessionRequest(
            prompt=np.asarray(ask.prompt, np.int32),
            committed=_NO_TOKENS,
            sampling=ask.sampling,
            stop=stop,
            # States of a prefix that came from the cache would be missing.
            cache_salt="" if self._tap is None else str(ask.key),
        )
        ending = Ending.of(stop, frozenset(target.eos_token_ids), room)
        session = Session(ask.key, b"", request, ending, max_trees=1)
        scheduler.open(session, time.monotonic())
        if self._tap is None:
            return _Draft(ask)
        num_rows = len(ask.prompt) + ending.max_generated - 1
        shape = (num_rows, len(self._tap.layers), target.decoder.config.hidden_size)
        return _Draft(ask, [], np.empty(shape, np.int8), np.empty(shape[:2], np.float32))

    def _step(self, scheduler: Scheduler, drafts: dict[int, _Draft]) -> None:
        step = scheduler.plan(time.monotonic()).step
        assert step is not None, "a session without a drafter is always ready"
        outcomes, timing = self._runner.run(step)
        if self._tap is not None:
            _file(step, drafts, *quantise(self._tap.states))
        scheduler.complete(step, outcomes, timing, time.monotonic())


def load_author(
    desk: Desk, layers: Sequence[int], progress: Callable[[str, float | None], None]
) -> Author:
    """Raises:
    GraftError: as `graft.verify.loading.load`.
    """
    torch.set_num_threads(desk.threads)
    return Author(load(desk.settings(), progress), desk.sessions, layers)


class _Tap:
    """The target's decoder, with the states of every row of the last forward at hand."""

    def __init__(self, decoder: Decoder, layers: tuple[int, ...]) -> None:
        self.layers = layers
        self.states = torch.empty(0)
        self._decoder = decoder

    def forward(
        self, tokens: Tensor, rows: StepRows, kv: KvCache, output_rows: Tensor | None
    ) -> Tensor:
        """As `Decoder.forward`; leaves `states`, [rows, layers, hidden]."""
        capture = Capture(self.layers, torch.arange(len(tokens)), final_norm=False)
        hidden, self.states = self._decoder.forward_capturing(
            tokens, rows, kv, output_rows, capture
        )
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """As `Decoder.logits`."""
        return self._decoder.logits(hidden)

    def choose(self, hidden: Tensor, rows: ChoiceRows) -> Tensor:
        """As `Decoder.choose`."""
        return self._decoder.choose(hidden, rows)

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self._decoder.vocab_size


@dataclass(slots=True, eq=False)
class _Draft:
    """A text at work."""

    ask: Ask
    tokens: list[int] = field(default_factory=list)
    rows: npt.NDArray[np.int8] | None = None
    scales: npt.NDArray[np.float32] | None = None

    def written(self, reason: FinishReason.ValueType) -> Written:
        count = len(self.ask.prompt) + len(self.tokens) - 1
        return Written(
            self.ask,
            tuple(self.tokens),
            FinishReason.Name(reason).removeprefix("FINISH_REASON_").lower(),
            None if self.rows is None else self.rows[:count],
            None if self.scales is None else self.scales[:count],
        )


def _file(step: Step, drafts: dict[int, _Draft], rows: Int8Array, scales: ScaleArray) -> None:
    """Copies the states of a step to the texts they belong to, by position."""
    done = 0
    for work in step.works:
        draft = drafts[work.session.session_id]
        assert draft.rows is not None and draft.scales is not None
        start = work.start if isinstance(work, Chunk) else work.session.kv_length
        count = work.num_rows
        draft.rows[start : start + count] = rows[done : done + count]
        draft.scales[start : start + count] = scales[done : done + count]
        done += count
