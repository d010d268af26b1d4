"""Runs one planned step on the target: forward, choose, accept, keep. Owns the KV tensors."""

from __future__ import annotations

import time
from typing import Protocol

import torch
from torch import Tensor

from graft.kernels.ops import KvCache, Ops, StepRows
from graft.verify.batch import build_batch
from graft.verify.choice import settle
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


class Runner:
    """One target and its KV pool. One thread uses it."""

    def __init__(self, model: Model, ops: Ops, kv: KvCache) -> None:
        self._model = model
        self._ops = ops
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
            self._model.forward(batch.tokens, batch.rows, self._kv, _FIRST_ROW)
            unfinished = [Outcome() for _ in step.works]
            return unfinished, StepTiming(started, time.monotonic() - started, 0.0)
        hidden = self._model.forward(batch.tokens, batch.rows, self._kv, batch.output_rows)
        logits = self._model.logits(hidden)
        forwarded = time.monotonic()
        outcomes = settle(step, batch, logits, self._ops, self._kv)
        return outcomes, StepTiming(started, forwarded - started, time.monotonic() - forwarded)
