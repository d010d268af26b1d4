"""STANDALONE: a small decoder writes ahead with the same tokens as the target.

It reads no states of the target, so a node that ran in a tree ran on exactly what a prefix would
give it: keys and values of accepted nodes stay, and only the rest of a commit is run.
"""

from __future__ import annotations

from graft.draft.proposers.base import Seat
from graft.draft.proposers.branching import BranchingProposer
from graft.draft.proposers.model import state_of


class StandaloneProposer(BranchingProposer):
    """A decoder of its own, its keys and values kept across rounds."""

    def keep(self, seat: Seat) -> None:
        """Moves the accepted nodes of the last tree to the end of the lane.

        The last committed token is run in any case, for its hidden state.
        """
        state = state_of(seat)
        lane, ran = state.lane, state.ran
        if ran is None:
            return
        committed = seat.mirror.prefix.tokens[lane.length : -1]
        followed = ran.followed(committed.tolist())
        if followed:
            self.move(lane, ran.num_run, followed)
