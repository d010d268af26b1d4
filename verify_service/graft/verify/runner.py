"""Runs one planned step on the target: forward, choose, accept, keep. Owns the KV tensors."""

from __future__ import annotations

import time
from typing import Protocol

import torch
from torch import Tensor

from graft.kernels.cpu.simulate import Simulation
from graft.kernels.ops import ChoiceRows, KvCache, Ops, StepRows
from graft.kernels.rows import choice_rows
from graft.verify.batch import Batch, build_batch
from graft.verify.capture import CapturePlan, Capturer
from graft.verify.choice import Verdict, settle, wants_logits
from graft.verify.step import Outcome, Step, StepTiming

_FIRST_ROW = torch.zeros(1, dtype=torch.int64)


class Model(Protocol):
    """What a step asks of the target's decoder."""

    def forward(
        self, tokens: Tensor, rows: StepRows, kv: KvCache, output_rows: Tensor | None
    ) -> Tensor:
        """Final hidden states of `output_rows`: [outputs, hidden]."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[outputs, hidden] -> [outputs, vocab], float32."""

    def choose(self, hidden: Tensor, rows: ChoiceRows) -> Tensor:
        """[outputs, hidden] -> [outputs], int32: the choice at the logits, which stay unwritten."""

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""


class Runner:
    """One target and its KV pool. One thread uses it."""

    def __init__(
        self,
        model: Model,
        ops: Ops,
        kv: KvCache,
        capturer: Capturer | None = None,
        simulation: Simulation | None = None,
    ) -> None:
        """capturer: takes out hidden states; without one, sessions must not want any.

        simulation: how rounds of a benchmark are accepted; None lets the target decide.
        """
        self._model = model
        self._capturer = capturer
        self._ops = ops
        self._verdict = Verdict(ops, simulation)
        self._kv = kv

    def run(self, step: Step) -> tuple[list[Outcome], StepTiming]:
        """Runs a step; outcomes stand in the order of its works."""
        with torch.inference_mode():
            return self._run(step)

    def _run(self, step: Step) -> tuple[list[Outcome], StepTiming]:
        started = time.monotonic()
        batch = build_batch(step, self._ops.device)
        if not len(batch.output_rows):
            # Unfinished chunks are run for their keys and values alone.
            _, taken = self._forward(step, batch, _FIRST_ROW)
            forwarded = time.monotonic()
            outcomes = [Outcome() for _ in step.works]
        else:
            # Rounds alone choose at every row, in order: nothing is to be picked out.
            every = len(batch.output_rows) == batch.num_choice_rows == step.num_rows
            hidden, taken = self._forward(step, batch, None if every else batch.output_rows)
            seen = self._seen(step, batch, hidden)
            forwarded = time.monotonic()
            outcomes = settle(step, batch, seen, self._verdict, self._kv)
        if taken is not None and self._capturer is not None:
            outcomes = self._capturer.encode(step, *taken, outcomes)
        return outcomes, StepTiming(started, forwarded - started, time.monotonic() - forwarded)

    def _seen(self, step: Step, batch: Batch, hidden: Tensor) -> Tensor:
        """Logits where anybody looks at them, else the choices themselves."""
        if wants_logits(step, batch, self._verdict):
            return self._model.logits(hidden)
        laws = [choice.law for choice in batch.choices]
        return self._model.choose(hidden, choice_rows(laws, self._model.vocab_size))

    def _forward(
        self, step: Step, batch: Batch, output_rows: Tensor | None
    ) -> tuple[Tensor, tuple[CapturePlan, Tensor] | None]:
        """Final hidden states of the rows, and captured ones where somebody wants them."""
        plan = None if self._capturer is None else self._capturer.plan(step)
        if plan is None or self._capturer is None:
            return self._model.forward(batch.tokens, batch.rows, self._kv, output_rows), None
        hidden, captured = self._capturer.model.forward_capturing(
            batch.tokens, batch.rows, self._kv, output_rows, plan.capture
        )
        return hidden, (plan, captured)
