"""DFlash: guesses a whole block of tokens with one forward, for all sessions at once.

Catch-up only writes context keys and values; there is no attention in it. Under a law with noise
each guess is ranked by the noise of its own position, as in any tree. Knows lanes and blocks; what
is computed is in `DflashNet`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from graft.common import log
from graft.common.tree import Tree
from graft.draft.guess import chain_of, guesses
from graft.draft.kv import OutOfPages
from graft.draft.law import RowLaw
from graft.draft.nets.dflash import DflashNet
from graft.draft.proposers.base import ProposerInfo, Sampled, Seat
from graft.draft.proposers.model import ModelOptions, ModelProposer, state_of
from graft.draft.rows import block_part, step_rows
from graft.kernels.ops import Ops

_log = log.get("dflash")


class DflashProposer(ModelProposer):
    """Chains of one block."""

    def __init__(
        self, name: str, net: DflashNet, ops: Ops, options: ModelOptions, window: int = 0
    ) -> None:
        """window: committed tokens that a block sees at least; 0 sees all. Whole pages go."""
        super().__init__(name, net, ops, options)
        self._dflash = net
        self._window = window

    def describe(self) -> ProposerInfo:
        """As any model proposer; no chain is longer than a block, no context than the window."""
        info, count = super().describe(), self._dflash.block.num_drafted
        needs = info.needs and replace(info.needs, window_tokens=self._window)
        return replace(info, max_nodes=count + 1, max_depth=count, needs=needs)

    def grow(
        self, batch: Sequence[Seat], ready: Sequence[int], wide: bool = False
    ) -> list[Tree | Sampled | None]:
        """The chains of the places in `ready`, cut to their tiers; blocks are always whole."""
        trees: list[Tree | Sampled | None] = [None] * len(batch)
        places = [place for place in ready if self._fits(batch[place])]
        if not places:
            return trees
        net, seats = self._dflash, [batch[place] for place in places]
        lanes = [state_of(seat).lane for seat in seats]
        rows = {
            sight: step_rows([block_part(lane, net.block.size, sight) for lane in lanes])
            for sight in net.sights
        }
        anchors = torch.tensor([seat.mirror.prefix.root for seat in seats], dtype=torch.int32)
        logits = net.logits(net.draft(anchors, rows, self.kv.cache))
        steps = logits.view(len(seats), net.block.num_drafted, -1).unbind(1)
        vocab_size = min(seat.mirror.limits.vocab_size for seat in seats)
        columns = [
            guesses(step, [_law(seat, place) for seat in seats], net.token_ids, vocab_size, place)
            for place, step in enumerate(steps)
        ]
        for place, made in zip(places, zip(*columns, strict=True), strict=True):
            trees[place] = chain_of(batch[place], made)
        return trees

    def _fits(self, seat: Seat) -> bool:
        """Room for one block; False when nothing can be drafted."""
        lane, tier = state_of(seat).lane, seat.tier
        most = min(tier.num_steps, tier.num_draft_tokens - 1)
        if most < 1 or lane.length >= self.net.context_length:
            return False
        try:
            self.kv.reserve(lane, lane.length + self._dflash.block.size)
        except OutOfPages as error:
            _log.warning("session drafts nothing", proposer=self.name, reason=str(error))
            return False
        return True

    def _align(self, seat: Seat) -> None:
        """Moves the lane's beginning up, to the features that are here and to the window."""
        super()._align(seat)
        features, state = seat.mirror.features, state_of(seat)
        if not self._window or features is None:
            return
        lane = state.lane
        before = self.goal(seat) - self._window
        if before > lane.length:
            self.kv.release(lane)
            lane.base = lane.length = max(before, features.start)
        else:
            self.kv.forget(lane, before)


def _law(seat: Seat, step: int) -> RowLaw:
    mirror = seat.mirror
    return RowLaw(mirror.sampling, state_of(seat).noise, len(mirror.prefix) + step)
