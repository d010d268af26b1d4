"""Takes hidden states out of a step for drafters, projects and encodes those of committed rows.

Knows tensors, works and specs; knows no stream. A step of which nobody wants states costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from graft.common.errors import NumericFailure
from graft.common.feature_codec import encode
from graft.common.features import FeatureSpec
from graft.common.projection import Projection
from graft.kernels.ops import KvCache, Linear, Ops, StepRows
from graft.models.decoder import Capture
from graft.verify.offer import ProjectionShape
from graft.verify.step import Captured, Outcome, Round, Step, Work


class CapturingModel(Protocol):
    """What capturing asks of the target's decoder."""

    def forward_capturing(
        self,
        tokens: Tensor,
        rows: StepRows,
        kv: KvCache,
        output_rows: Tensor | None,
        capture: Capture,
    ) -> tuple[Tensor, Tensor]:
        """Final states of `output_rows`, and the captured ones: [captured, layers, hidden]."""

    def final_norm(self, states: Tensor) -> Tensor:
        """[n, hidden] before the final norm -> after it."""

    @property
    def num_layers(self) -> int:
        """The number of the last hidden state."""


@dataclass(frozen=True, slots=True, eq=False)
class _Taken:
    """Captured rows of one work: first..first+count-1 of the captured ones, from `start` on."""

    place: int
    first: int
    count: int
    start: int


@dataclass(frozen=True, slots=True, eq=False)
class CapturePlan:
    """Which rows of a step are captured, at which layers, and for whom."""

    capture: Capture
    taken: tuple[_Taken, ...]


class Capturer:
    """Plans what a step captures and turns it into bytes. One thread uses it."""

    def __init__(
        self, model: CapturingModel, ops: Ops, projections: Sequence[Projection] = ()
    ) -> None:
        self.model = model
        self._ops = ops
        self._projections = {one.fused_id: _Fused(one, ops) for one in projections}

    @property
    def shapes(self) -> Mapping[str, ProjectionShape]:
        """The projections that can be applied, by id."""
        return {
            fused_id: ProjectionShape(fused.layers, fused.final_norm, fused.width)
            for fused_id, fused in self._projections.items()
        }

    def plan(self, step: Step) -> CapturePlan | None:
        """What to capture; None when nobody wants anything of this step."""
        layers: set[int] = set()
        rows: list[int] = []
        taken: list[_Taken] = []
        first_row = 0
        for place, work in enumerate(step.works):
            start, skipped = _wanted(work)
            if (count := work.num_rows - skipped) > 0 and (feed := work.session.feed) is not None:
                layers.update(layer for spec in feed.specs for layer in spec.layers)
                taken.append(_Taken(place, len(rows), count, start))
                rows.extend(range(first_row + skipped, first_row + work.num_rows))
            first_row += work.num_rows
        if not layers:
            return None
        index = None
        if len(rows) < first_row:
            index = torch.tensor(rows, dtype=torch.int64, device=self._ops.device)
        return CapturePlan(Capture(tuple(sorted(layers)), index, final_norm=False), tuple(taken))

    def encode(
        self, step: Step, plan: CapturePlan, captured: Tensor, outcomes: Sequence[Outcome]
    ) -> list[Outcome]:
        """The outcomes with the states of the rows that stay: of a round, the accepted path's.

        captured: [captured, layers of the plan, hidden].
        """
        settled = list(outcomes)
        kept: dict[FeatureSpec, list[tuple[_Taken, list[int]]]] = {}
        for taken in plan.taken:
            work, outcome = step.works[taken.place], outcomes[taken.place]
            nodes = outcome.nodes if isinstance(work, Round) else range(taken.count)
            feed = work.session.feed
            if outcome.error is not None or feed is None:
                continue
            for spec in feed.specs:
                kept.setdefault(spec, []).append((taken, [taken.first + node for node in nodes]))
        for spec, parts in kept.items():
            index = np.array([row for _, rows in parts for row in rows], np.int64)
            chosen = captured.index_select(0, torch.from_numpy(index).to(captured.device))
            states = self._states(chosen, plan.capture.layers, spec)
            payloads = _payloads(
                states.float().cpu().numpy(), [len(rows) for _, rows in parts], spec
            )
            for (taken, _), payload in zip(parts, payloads, strict=True):
                former = settled[taken.place]
                added = (*former.features, Captured(spec, taken.start, payload))
                settled[taken.place] = replace(former, features=added)
        return settled

    def _states(self, captured: Tensor, layers: Sequence[int], spec: FeatureSpec) -> Tensor:
        """[rows, layers, hidden] -> [rows, width]: the layers of the spec, normed and projected."""
        normed = spec.final_norm and self.model.num_layers in spec.layers
        if spec.layers == layers and not (normed or spec.fused_id):
            return captured.flatten(1)
        states = []
        for layer in spec.layers:
            state = captured[:, layers.index(layer)].contiguous()
            last = layer == self.model.num_layers
            states.append(self.model.final_norm(state) if last and spec.final_norm else state)
        if spec.fused_id:
            return self._projections[spec.fused_id].apply(states)
        return torch.cat(states, dim=1)


class _Fused:
    """A projection laid out for the device."""

    def __init__(self, projection: Projection, ops: Ops) -> None:
        def tensor(
            values: np.ndarray[tuple[int, ...], np.dtype[np.float32]] | None,
        ) -> Tensor | None:
            return None if values is None else torch.from_numpy(values.copy()).to(ops.device)

        weight = tensor(projection.weight)
        assert weight is not None
        self.layers, self.final_norm = projection.layers, projection.final_norm
        self.width = projection.width
        self._ops, self._eps = ops, projection.eps
        self._fc: Linear = ops.pack([weight], [tensor(projection.bias)])
        self._joined_norm = tensor(projection.joined_norm)
        self._state_norms = [tensor(norm) for norm in projection.state_norms]
        self._out_norm = tensor(projection.out_norm)

    def apply(self, states: Sequence[Tensor]) -> Tensor:
        """One [rows, hidden] a layer -> [rows, width]."""
        if self._state_norms:
            states = [
                self._normed(state, norm)
                for state, norm in zip(states, self._state_norms, strict=True)
            ]
        joined = self._normed(torch.cat(list(states), dim=1), self._joined_norm)
        return self._normed(self._ops.linear(joined, self._fc), self._out_norm)

    def _normed(self, x: Tensor, weight: Tensor | None) -> Tensor:
        return x if weight is None else self._ops.rms_norm(x, weight, self._eps)


def _wanted(work: Work) -> tuple[int, int]:
    """The position of a work's first captured row, and how many rows before it are not wanted."""
    session = work.session
    if isinstance(work, Round):
        return session.kv_length, 0
    feed = session.feed
    if feed is None or not feed.specs:
        return work.start, work.num_rows
    floor = min(feed.floor(spec, session.length) for spec in feed.specs)
    start = min(work.stop, max(work.start, floor))
    return start, start - work.start


def _payloads(
    values: np.ndarray[tuple[int, ...], np.dtype[np.float32]],
    counts: Sequence[int],
    spec: FeatureSpec,
) -> list[bytes | None]:
    """The rows as bytes, cut into parts; None for a part with a row that has none."""
    try:
        lines = encode(values, spec.codec)
    except NumericFailure:
        if len(counts) == 1:
            return [None]
        # Whose row it is shows when they are taken one by one.
        parts = np.split(values, np.cumsum(counts)[:-1])
        return [_payloads(part, [len(part)], spec)[0] for part in parts]
    ends = np.cumsum(counts).tolist()
    return [lines[end - count : end].tobytes() for count, end in zip(counts, ends, strict=True)]
