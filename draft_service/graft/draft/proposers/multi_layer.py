"""Multi-layer EAGLE: drafts while it catches up, one network step for each token ahead.

Every step runs over the same window of positions; the ids are rotated left by one for each step,
and the token just drafted closes the row. The window reaches back over the positions whose later
ids were only guesses last time, so that keys and values are always those of a fresh prefill.

Knows lanes, windows and chains; what is computed is in `MultiLayerNet`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from graft.common.tree import IntArray, Tree
from graft.draft.guess import Guess, chain_of, guesses
from graft.draft.law import RowLaw
from graft.draft.mirror import Mirror
from graft.draft.nets.mtp import MultiLayerNet
from graft.draft.proposers.base import ProposerInfo, Sampled, Seat
from graft.draft.proposers.model import ModelOptions, ModelProposer, ModelState, state_of
from graft.draft.rows import prefix_part, step_rows
from graft.kernels.ops import Ops


@dataclass(slots=True, eq=False)
class MultiLayerState(ModelState):
    """guesses: what follows the prefix, made when the lane had caught up with it."""

    guesses: list[Guess] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Window:
    """Positions `first` to `stop` - 1 of one seat in one pass, and what it has drafted so far.

    drafts: the window ends at the newest state, so what follows it can be guessed.
    """

    seat: Seat
    first: int
    stop: int
    drafts: bool
    drafted: list[Guess] = field(default_factory=list)

    def ids(self, step: int) -> IntArray:
        """[positions]: the token 1 + step after each; the newest known where none is yet."""
        tokens = self.seat.mirror.prefix.tokens[self.first + 1 :]
        drafted = [guess.token for guess in self.drafted]
        known = np.concatenate([tokens, np.asarray(drafted, np.int32)])
        places = np.arange(self.stop - self.first) + step
        return np.asarray(known[np.minimum(places, len(known) - 1)], np.int32)


class MultiLayerProposer(ModelProposer):
    """Chains as long as there are steps."""

    def __init__(self, name: str, net: MultiLayerNet, ops: Ops, options: ModelOptions) -> None:
        super().__init__(name, net, ops, options)
        self._steps = net

    def describe(self) -> ProposerInfo:
        """As any model proposer; no chain is longer than there are steps."""
        steps = self._steps.num_steps
        return replace(super().describe(), max_nodes=steps + 1, max_depth=steps)

    def open(self, mirror: Mirror) -> object:
        """An empty lane; the prefix is run with the first chain."""
        plain = super().open(mirror)
        assert isinstance(plain, ModelState)
        return MultiLayerState(plain.lane, plain.noise)

    def grow(
        self, batch: Sequence[Seat], ready: Sequence[int], wide: bool = False
    ) -> list[Tree | Sampled | None]:
        """The chains of the places in `ready`; catching up has guessed them already."""
        trees: list[Tree | Sampled | None] = [None] * len(batch)
        for place in ready:
            state = state_of(batch[place])
            assert isinstance(state, MultiLayerState)
            trees[place] = chain_of(batch[place], state.guesses)
        return trees

    def _run_chunk(self, batch: Sequence[Seat], lacking: dict[int, int]) -> None:
        """All steps over one window a seat, `chunk_rows` new rows in all at most.

        Places that are done leave `lacking`.
        """
        windows: dict[int, _Window] = {}
        room = self.options.chunk_rows
        for place, stop in lacking.items():
            seat = batch[place]
            lane = state_of(seat).lane
            end = min(stop, lane.length + room)
            if end <= lane.length:
                break
            again = max(0, lane.length - (self._steps.num_steps - 1))
            first = max(lane.base, again, _first_state(seat))
            windows[place] = _Window(seat, first, end, end == self.goal(seat))
            room -= end - lane.length
        self._run(list(windows.values()))
        for place, window in windows.items():
            state = state_of(window.seat)
            assert isinstance(state, MultiLayerState)
            state.lane.length = window.stop
            state.guesses = window.drafted
            if window.stop == lacking[place]:
                del lacking[place]

    def _run(self, windows: Sequence[_Window]) -> None:
        """Runs every step and fills in what the windows draft."""
        net = self._steps
        rows = step_rows([prefix_part(state_of(w.seat).lane, w.first, w.stop) for w in windows])
        fused = torch.cat([self._fused(w.seat, w.first, w.stop) for w in windows])
        ends = np.cumsum([w.stop - w.first for w in windows]) - 1
        drafting = [(w, int(end)) for w, end in zip(windows, ends, strict=True) if w.drafts]
        hidden = fused
        for step in range(net.num_steps):
            ids = np.minimum(np.concatenate([w.ids(step) for w in windows]), net.vocab_size - 1)
            state = net.run(step, torch.from_numpy(ids), hidden, rows, self.kv.cache)
            if drafting:
                logits = net.logits_of(step, state[[end for _, end in drafting]])
                laws = [_law(w.seat, step) for w, _ in drafting]
                vocab_size = min(w.seat.mirror.limits.vocab_size for w, _ in drafting)
                made = guesses(logits, laws, net.token_ids, vocab_size, step)
                for (window, end), guess in zip(drafting, made, strict=True):
                    window.drafted.append(guess)
                    state_of(window.seat).hidden = state[end].clone()
            hidden = state if net.chain else fused


def _first_state(seat: Seat) -> int:
    return 0 if seat.mirror.features is None else seat.mirror.features.start


def _law(seat: Seat, step: int) -> RowLaw:
    mirror = seat.mirror
    return RowLaw(mirror.sampling, state_of(seat).noise, len(mirror.prefix) + step)
