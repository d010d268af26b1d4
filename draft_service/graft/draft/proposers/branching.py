"""Model proposers whose trees grow from their own states, so that they can work ahead of commits.

A branch is a fork of a seat's lane. What the target would make of its last tokens is not known
yet, so it stands on the drafter's own states, exactly as a deeper node of a tree does. The seat
itself is never touched, so there is nothing to take back when the guess was wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from graft.common.tree import FloatArray, Tree
from graft.draft.foresee import split, tier_of_branch
from graft.draft.kv import OutOfPages
from graft.draft.proposers.base import Foreseen, ProposerInfo, Seat
from graft.draft.proposers.model import ModelProposer, ModelState, hidden_of, state_of
from graft.draft.rows import prefix_part, step_rows

_WITH_TREE = 1
"""Tokens whose states are known only one after the other, and that run along with a tree."""


class BranchingProposer(ModelProposer):
    """A decoder or a recurrent head: EAGLE, EAGLE-3, MTP of one layer, STANDALONE."""

    def describe(self) -> ProposerInfo:
        """As any model proposer; look-ahead is honoured."""
        return replace(super().describe(), foresees=True)

    def adopt(self, seat: Seat, branch: Seat) -> bool:
        """Where the target's states play no part, the branch's are the seat's own from now on."""
        if self.net.needs is not None:
            return False
        own, theirs = state_of(seat), state_of(branch)
        own.lane, theirs.lane = theirs.lane, own.lane
        own.hidden, own.ran = theirs.hidden, theirs.ran
        return True

    def branch(self, seat: Seat, tokens: Sequence[int]) -> Seat | None:
        """A branch of the seat; None where it is behind, or has no room in pages or context.

        All but the last of `tokens` ran in the seat's last tree, so that their keys, values and
        states are there.
        """
        with torch.inference_mode():
            return self._fork(seat, tokens)

    def _fork(self, seat: Seat, tokens: Sequence[int]) -> Seat | None:
        state = state_of(seat)
        mirror = seat.mirror.ahead(tokens)
        tier = tier_of_branch(seat.tier, mirror)
        if state.lane.length != self.goal(seat) or state.hidden is None or tier.off:
            return None
        if state.lane.length + len(tokens) > self.net.context_length:
            return None
        ran = state.ran if tokens else None
        num_run = 0 if ran is None else ran.num_run
        try:
            lane = self.kv.fork(state.lane, state.lane.length + num_run)
        except OutOfPages:
            return None
        branch = Seat(mirror, tier, ModelState(lane, state.noise, state.hidden, ahead=True))
        if ran is not None:
            followed = ran.followed(tokens)
            self.move(lane, num_run, followed)
            if followed:
                state_of(branch).hidden = ran.state(followed[-1])
        return branch

    def foresee(self, seats: Sequence[Seat]) -> Sequence[Foreseen]:
        """Wide trees of all seats at once, and what of them fits their tiers."""
        with torch.inference_mode():
            if self.net.needs is not None:
                self._run_missing([seat for seat in seats if state_of(seat).ahead])
            trees = self.trees(seats, wide=True)
        return [
            split(tree if isinstance(tree, Tree) else None, seat.tier)
            for tree, seat in zip(trees, seats, strict=True)
        ]

    def beside(self, seat: Seat, first: int, stop: int) -> tuple[FloatArray, bool] | None:
        """For a branch, the state before its last token in place of the target's."""
        if not state_of(seat).ahead:
            return super().beside(seat, first, stop)
        if stop - first > _WITH_TREE:
            return None
        hidden: FloatArray = hidden_of(seat).numpy()
        return hidden[None][: stop - first], True

    def _run_missing(self, branches: Sequence[Seat]) -> None:
        """Runs what the branches lack of their prefixes, each token on the state before it.

        The last one is left to the call that grows the tree, where there is one.
        """
        net = self.net
        left = 0 if net.recurrent is None else _WITH_TREE
        waiting = [one for one in branches if self._lacks_token(one, left)]
        while waiting:
            lanes = [state_of(one).lane for one in waiting]
            tokens = [
                int(one.mirror.prefix.tokens[state_of(one).lane.length + net.shift])
                for one in waiting
            ]
            hidden = net.forward(
                torch.tensor([min(token, net.vocab_size - 1) for token in tokens]).int(),
                torch.stack([hidden_of(one) for one in waiting]),
                step_rows([prefix_part(lane, lane.length, lane.length + 1) for lane in lanes]),
                self.kv.cache,
            )
            for one, row in zip(waiting, hidden, strict=True):
                state_of(one).lane.length += 1
                state_of(one).hidden = row.clone()
            waiting = [one for one in waiting if self._lacks_token(one, left)]

    def _lacks_token(self, branch: Seat, left: int) -> bool:
        """True while a token is to be run, for which the lane has room or gets it now."""
        lane = state_of(branch).lane
        if lane.length + left >= self.goal(branch):
            return False
        try:
            self.kv.reserve(lane, lane.length + 1)
        except OutOfPages:
            return False
        return True
