"""Predicted outputs: what the client expects to come, as one more source of every proposal.

Whatever proposer a session has, the continuation of its prediction is folded into its trees, so
that it works where there is only an n-gram look-up. Knows mirrors and trees; knows no proposer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from graft.common.prediction import Place, align
from graft.common.tier import Tier
from graft.common.tree import Tree, chain
from graft.draft.merge import merged
from graft.draft.mirror import Mirror
from graft.draft.survival import Survival


class Predictions:
    """Aligns predictions with what was written, and learns how far they can be trusted."""

    def __init__(self) -> None:
        self._survival = Survival()

    def blended(self, mirror: Mirror, tier: Tier, tree: Tree | None) -> Tree | None:
        """`tree` with the prediction's continuation, within `tier`."""
        if mirror.prediction is None or tier.off or mirror.sampling.compares_probs:
            return tree
        place = self._place(mirror)
        ahead = mirror.prediction[place.following : place.following + tier.num_steps]
        if not place.length or not len(ahead):
            return tree
        own = self._survival.scored(chain([mirror.prefix.root, *ahead.tolist()]), place.length)
        if tree is not None:
            # Beside a prediction a tree of another source may be wider than the tier's chain.
            return merged([own, tree], replace(tier, topk=max(tier.topk, 2)))
        return merged([own], tier)

    def committed(self, mirror: Mirror, tokens: Sequence[int]) -> None:
        """Learns from what is about to be committed to the mirror."""
        if mirror.prediction is None:
            return
        place = self._place(mirror)
        if not place.length:
            return
        for count, token in enumerate(tokens):
            index = place.following + count
            right = index < len(mirror.prediction) and int(mirror.prediction[index]) == token
            self._survival.add(place.length + count, right)
            if not right:
                return

    def _place(self, mirror: Mirror) -> Place:
        assert mirror.prediction is not None
        written = np.asarray(mirror.prefix.tokens[mirror.prompt_length :], np.int32)
        return align(mirror.prediction, written)
