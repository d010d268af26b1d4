"""Multi-layer EAGLE: drafts while it catches up, one network step for each token ahead.

Every step runs over the same window of positions; the ids are rotated left by one for each step,
and the token just drafted closes the row. The window reaches back over the positions whose later
ids were only guesses last time, so that keys and values are always those of a fresh prefill.

Knows lanes, windows and chains; what is computed is in `MultiLayerNet`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from graft.common import log
from graft.common.tree import IntArray, Tree
from graft.draft.kv import OutOfPages
from graft.draft.law import RowLaw, best_children
from graft.draft.nets.mtp import MultiLayerNet
from graft.draft.proposers.base import ProposerInfo, Seat
from graft.draft.proposers.model import ModelOptions, ModelProposer, state_of
from graft.draft.prune import pruned_chain
from graft.draft.rows import prefix_part, step_rows
from graft.kernels.ops import Ops

_log = log.get("multi_layer")


@dataclass(slots=True, eq=False)
class _Window:
    """Positions `first` to `stop` - 1 of one seat in one pass, and what it has drafted so far.

    drafts: the window ends at the newest state, so what follows it can be guessed.
    """

    seat: Seat
    first: int
    stop: int
    drafts: bool
    drafted: list[int] = field(default_factory=list)
    logs: list[float] = field(default_factory=list)

    def ids(self, step: int) -> IntArray:
        """[positions]: the token 1 + step after each; the newest known where none is yet."""
        tokens = self.seat.mirror.prefix.tokens[self.first + 1 :]
        known = np.concatenate([tokens, np.asarray(self.drafted, np.int32)])
        places = np.arange(self.stop - self.first) + step
        return np.asarray(known[np.minimum(places, len(known) - 1)], np.int32)


class MultiLayerProposer(ModelProposer):
    """Chains as long as there are steps."""

    def __init__(self, name: str, net: MultiLayerNet, ops: Ops, options: ModelOptions) -> None:
        super().__init__(name, net, ops, options)
        self._steps = net

    def describe(self) -> ProposerInfo:
        """As any model proposer; no chain is longer than there are steps."""
        info = super().describe()
        steps = self._steps.num_steps
        return ProposerInfo(
            info.default_tier,
            max_nodes=steps + 1,
            max_depth=steps,
            detail=info.detail,
            vocab_size=info.vocab_size,
            tokenizer_digest=info.tokenizer_digest,
            needs=info.needs,
        )

    def propose(self, batch: Sequence[Seat]) -> Sequence[Tree | None]:
        """One chain a seat; None where the network lacks features, pages or context."""
        trees: list[Tree | None] = [None] * len(batch)
        with torch.inference_mode():
            behind = {
                place: stop
                for place, seat in enumerate(batch)
                if (stop := self._reserved(seat)) > state_of(seat).lane.base
            }
            while behind:
                for place, window in self._pass(batch, behind).items():
                    if window.stop == behind[place]:
                        del behind[place]
                    if window.drafts:
                        trees[place] = _chain(window)
        return trees

    def _reserved(self, seat: Seat) -> int:
        """Where the lane can get to now, its pages reserved; its base when it cannot."""
        state = state_of(seat)
        self._align(seat)
        state.noise.forget(len(seat.mirror.prefix))
        stop = min(self.goal(seat), self._known(seat))
        try:
            self.kv.reserve(state.lane, stop)
        except OutOfPages as error:
            _log.warning("session drafts nothing", proposer=self.name, reason=str(error))
            return state.lane.base
        return stop

    def _pass(self, batch: Sequence[Seat], behind: dict[int, int]) -> dict[int, _Window]:
        """All steps over one window a seat, within `chunk_rows`; windows by place."""
        windows: dict[int, _Window] = {}
        room = self.options.chunk_rows
        for place, stop in behind.items():
            seat = batch[place]
            lane = state_of(seat).lane
            # The last row is always run, for what it drafts.
            again = min(lane.length, stop - 1) - (self._steps.num_steps - 1)
            first = max(lane.base, again, _first_state(seat))
            end = min(stop, lane.length + max(1, room))
            windows[place] = _Window(seat, first, end, end == self.goal(seat))
            room -= end - lane.length
            if room <= 0:
                break
        self._run(list(windows.values()))
        for window in windows.values():
            state_of(window.seat).lane.length = window.stop
        return windows

    def _run(self, windows: Sequence[_Window]) -> None:
        net = self._steps
        parts = [prefix_part(state_of(w.seat).lane, w.first, w.stop) for w in windows]
        rows = step_rows(parts)
        fused = torch.cat([self._fused(w.seat, w.first, w.stop) for w in windows])
        ends = np.cumsum([w.stop - w.first for w in windows]) - 1
        drafting = [
            (window, int(end)) for window, end in zip(windows, ends, strict=True) if window.drafts
        ]
        hidden = fused
        for step in range(net.num_steps):
            ids = np.minimum(np.concatenate([w.ids(step) for w in windows]), net.vocab_size - 1)
            state = net.run(step, torch.from_numpy(ids), hidden, rows, self.kv.cache)
            if drafting:
                logits = net.logits_of(step, state[[end for _, end in drafting]])
                children = best_children(logits, [_law(w, step) for w, _ in drafting], 1)
                for (window, _), token, prob in zip(
                    drafting, children.index[:, 0].tolist(), children.probs[:, 0], strict=True
                ):
                    window.drafted.append(token)
                    window.logs.append(float(prob.log()))
            hidden = state if net.chain else fused


def _first_state(seat: Seat) -> int:
    return 0 if seat.mirror.features is None else seat.mirror.features.start


def _law(window: _Window, step: int) -> RowLaw:
    mirror = window.seat.mirror
    noise = state_of(window.seat).noise
    return RowLaw(mirror.sampling, noise, len(mirror.prefix) + step)


def _chain(window: _Window) -> Tree | None:
    mirror, tier = window.seat.mirror, window.seat.tier
    most = min(tier.num_steps, tier.num_draft_tokens - 1)
    if most < 1:
        return None
    return pruned_chain(
        mirror.prefix.root, mirror.limits.vocab_size, window.drafted[:most], window.logs[:most]
    )
