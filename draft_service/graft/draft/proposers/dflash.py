"""DFlash: guesses a whole block of tokens with one forward, for all sessions at once.

Catch-up only writes context keys and values; there is no attention in it. Under a law with noise
each guess is ranked by the noise of its own position, as in any tree. Knows lanes and blocks; what
is computed is in `DflashNet`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graft.common import log
from graft.common.tree import Tree
from graft.draft.kv import OutOfPages
from graft.draft.law import RowLaw, best_children
from graft.draft.nets.dflash import DflashNet
from graft.draft.proposers.base import Seat
from graft.draft.proposers.model import ModelOptions, ModelProposer, state_of
from graft.draft.prune import pruned_chain
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

    def grow(self, batch: Sequence[Seat], ready: Sequence[int]) -> list[Tree | None]:
        """The chains of the places in `ready`, cut to their tiers; blocks are always whole."""
        trees: list[Tree | None] = [None] * len(batch)
        places = [place for place in ready if self._fits(batch[place])]
        if not places:
            return trees
        net = self._dflash
        size, count = net.block.size, net.block.num_drafted
        lanes = [state_of(batch[place]).lane for place in places]
        rows = {
            sight: step_rows([block_part(lane, size, sight) for lane in lanes])
            for sight in net.sights
        }
        anchors = [batch[place].mirror.prefix.root for place in places]
        hidden = net.draft(torch.tensor(anchors, dtype=torch.int32), rows, self.kv.cache)
        laws = [law for place in places for law in _laws(batch[place], count)]
        children = best_children(net.logits(hidden), laws, 1)
        tokens = children.index if net.token_ids is None else net.token_ids[children.index]
        guesses = tokens.view(-1, count).tolist()
        logs = children.probs.view(-1, count).log().tolist()
        for place, guess, log_probs in zip(places, guesses, logs, strict=True):
            mirror, tier = batch[place].mirror, batch[place].tier
            most = min(tier.num_steps, tier.num_draft_tokens - 1)
            trees[place] = pruned_chain(
                mirror.prefix.root, mirror.limits.vocab_size, guess[:most], log_probs[:most]
            )
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


def _laws(seat: Seat, count: int) -> list[RowLaw]:
    mirror, noise = seat.mirror, state_of(seat).noise
    first = len(mirror.prefix)
    return [RowLaw(mirror.sampling, noise, first + place) for place in range(count)]
