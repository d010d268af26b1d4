"""Model proposers whose trees grow from their own states, so that they can work ahead of commits.

A branch is a fork of a seat's lane. What the target would make of its last tokens is not known
yet, so it stands on the drafter's own states, exactly as a deeper node of a tree does. The seat
itself is never touched, so there is nothing to take back when the guess was wrong.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from graft.common.tree import Tree
from graft.draft.foresee import split, tier_of_branch, widened
from graft.draft.kv import OutOfPages
from graft.draft.proposers.base import Foreseen, ProposerInfo, Seat
from graft.draft.proposers.model import ModelProposer, ModelState, hidden_of, state_of
from graft.draft.rows import prefix_part, step_rows


class BranchingProposer(ModelProposer):
    """A decoder or a recurrent head: EAGLE, EAGLE-3, MTP of one layer, STANDALONE."""

    def describe(self) -> ProposerInfo:
        """As any model proposer; look-ahead is honoured."""
        return replace(super().describe(), foresees=True)

    def follow(self, seat: Seat) -> None:
        """Catches up with what was committed, as far as its features are here."""
        with torch.inference_mode():
            self.catch_up([seat], self.options.catch_up_s)

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
        branch = Seat(mirror, tier, ModelState(lane, state.noise, state.hidden))
        if ran is not None:
            followed = ran.followed(tokens)
            self.move(lane, num_run, followed)
            if followed:
                state_of(branch).hidden = ran.state(followed[-1])
        return branch

    def foresee(self, branches: Sequence[Seat]) -> Sequence[Foreseen]:
        """Wide trees of all branches at once, and what of them fits their tiers."""
        with torch.inference_mode():
            self._run_missing(branches)
            wide = [Seat(one.mirror, widened(one.tier), one.state) for one in branches]
            ready = [
                place
                for place, one in enumerate(branches)
                if state_of(one).lane.length == self.goal(one)
            ]
            trees = self.grow(wide, ready)
        return [
            split(tree if isinstance(tree, Tree) else None, one.tier)
            for tree, one in zip(trees, branches, strict=True)
        ]

    def _run_missing(self, branches: Sequence[Seat]) -> None:
        """Runs what the branches lack of their prefixes, each token on the state before it."""
        net = self.net
        waiting = [one for one in branches if self._lacks_token(one)]
        while waiting:
            lanes = [state_of(one).lane for one in waiting]
            tokens = [
                int(one.mirror.prefix.tokens[state_of(one).lane.length + net.shift])
                for one in waiting
            ]
            hidden = net.forward(
                torch.tensor([min(token, net.vocab_size - 1) for token in tokens]).int(),
                None if net.needs is None else torch.stack([hidden_of(one) for one in waiting]),
                step_rows([prefix_part(lane, lane.length, lane.length + 1) for lane in lanes]),
                self.kv.cache,
            )
            for one, row in zip(waiting, hidden, strict=True):
                state_of(one).lane.length += 1
                state_of(one).hidden = row.clone()
            waiting = [one for one in waiting if self._lacks_token(one)]

    def _lacks_token(self, branch: Seat) -> bool:
        """True while a token is to be run, for which the lane has room or gets it now."""
        lane = state_of(branch).lane
        if lane.length >= self.goal(branch):
            return False
        try:
            self.kv.reserve(lane, lane.length + 1)
        except OutOfPages:
            return False
        return True
