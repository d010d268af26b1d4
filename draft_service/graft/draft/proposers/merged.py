"""MERGED: n-gram look-up and a model under one node budget, every path on one scale.

A match is worth what matches of its length have been worth so far; a model's path what the model
says. Where a match is long and such matches hold, its chain is proposed alone and the model does
not run. Works with any model proposer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from graft.common.tier import Tier
from graft.common.tree import Tree
from graft.draft.foresee import tier_of_branch
from graft.draft.merge import merged, union
from graft.draft.mirror import Mirror
from graft.draft.proposers.base import Foreseen, Foreseer, Proposal, Proposer, ProposerInfo, Seat
from graft.draft.proposers.ngram import NgramProposer
from graft.draft.survival import Survival

_LONG_MATCH = 8
_SURE = 0.85


@dataclass(slots=True, eq=False)
class _State:
    """A seat at each source. length, guess: the last match, and its likeliest continuation."""

    ngram: Seat
    model: Seat
    length: int = 0
    guess: tuple[int, ...] = ()


class MergedProposer:
    """Two proposers as one."""

    name = "merged"

    def __init__(self, ngram: NgramProposer, model: Proposer) -> None:
        self._ngram = ngram
        self._model = model
        self._survival = Survival()

    def describe(self) -> ProposerInfo:
        """As the model's; trees may be as deep as matches are long."""
        info, match = self._model.describe(), self._ngram.describe().default_tier
        tier = info.default_tier
        return replace(
            info,
            default_tier=Tier(
                self.name,
                num_steps=max(tier.num_steps, match.num_steps),
                topk=max(tier.topk, 2),
                num_draft_tokens=max(tier.num_draft_tokens, match.num_draft_tokens),
                lookahead=tier.lookahead,
            ),
            max_nodes=self._ngram.describe().max_nodes,
            max_depth=self._ngram.describe().max_depth,
            detail=f"{self._ngram.name} and {self._model.name} in one tree",
        )

    def open(self, mirror: Mirror) -> object:
        """Opens the session at both."""
        off = Tier()
        ngram = Seat(mirror, off, self._ngram.open(mirror))
        return _State(ngram, Seat(mirror, off, self._model.open(mirror)))

    def close(self, seat: Seat) -> None:
        """Closes it at both."""
        state = _state(seat)
        self._ngram.close(state.ngram)
        self._model.close(state.model)

    def commit(self, seat: Seat, tokens: Sequence[int]) -> None:
        """Tells both, and learns how the last match did."""
        state = _state(seat)
        for count, (guess, token) in enumerate(zip(state.guess, tokens, strict=False)):
            self._survival.add(state.length + count, guess == token)
            if guess != token:
                break
        state.guess = ()
        self._ngram.commit(state.ngram, tokens)
        self._model.commit(state.model, tokens)

    def propose(self, batch: Sequence[Seat]) -> Sequence[Proposal]:
        """One tree a seat; the model runs for those whose match is not sure to hold."""
        matches = [self._match(seat, seat.tier) for seat in batch]
        unsure = [
            place
            for place, seat in enumerate(batch)
            if seat.mirror.sampling.needs_draft_probs
            or not self._sure(_state(seat), matches[place])
        ]
        seats = [self._model_seat(batch[place]) for place in unsure]
        made = dict(zip(unsure, self._model.propose(seats), strict=True)) if seats else {}
        return [
            self._blend(seat, matches[place], made.get(place)) for place, seat in enumerate(batch)
        ]

    def adopt(self, seat: Seat, branch: Seat) -> bool:
        """As the model does; what matched is remembered in any case."""
        own, theirs = _state(seat), _state(branch)
        own.length, own.guess = theirs.length, theirs.guess
        return self._foreseer().adopt(own.model, theirs.model)

    def branch(self, seat: Seat, tokens: Sequence[int]) -> Seat | None:
        """A branch at both; None when one of them has no room."""
        state = _state(seat)
        state.ngram.tier = seat.tier
        # Sources are always asked for their own branches, so that each keeps its own state.
        model = self._foreseer().branch(self._model_seat(seat), tokens)
        if model is None:
            return None
        ngram = self._ngram.branch(state.ngram, tokens)
        assert ngram is not None
        mirror = model.mirror
        return Seat(mirror, tier_of_branch(seat.tier, mirror), _State(ngram, model))

    def foresee(self, seats: Sequence[Seat]) -> Sequence[Foreseen]:
        """Both sources' trees, merged; what only the wide ones hold are outcomes."""
        for seat in seats:
            _state(seat).ngram.tier = seat.tier
        looked = self._ngram.foresee([_state(seat).ngram for seat in seats])
        seen = self._foreseer().foresee([self._model_seat(seat) for seat in seats])
        found = []
        for seat, match, model in zip(seats, looked, seen, strict=True):
            own = self._scored(seat, match.tree)
            length = _state(seat).length
            wide = [
                match.wide if match.wide is None else self._survival.scored(match.wide, length),
                model.wide,
            ]
            here = [tree for tree in wide if tree is not None]
            tree = merged([own, model.tree], seat.tier)
            found.append(Foreseen(tree, union(here) if here else None))
        return found

    def _match(self, seat: Seat, tier: Tier) -> Tree | None:
        """The match's tree on the common scale; remembers its likeliest path."""
        state = _state(seat)
        state.ngram.tier = tier
        (tree,) = self._ngram.propose([state.ngram])
        return self._scored(seat, tree)

    def _scored(self, seat: Seat, tree: Tree | None) -> Tree | None:
        state = _state(seat)
        state.length = self._ngram.match_length(state.ngram) if tree is not None else 0
        state.guess = () if tree is None else _first_path(tree)
        return None if tree is None else self._survival.scored(tree, state.length)

    def _sure(self, state: _State, match: Tree | None) -> bool:
        held = state.length >= _LONG_MATCH and self._survival.at(state.length) >= _SURE
        return match is not None and held

    def _model_seat(self, seat: Seat) -> Seat:
        """The model's seat; its trees are no deeper and wider than its own default."""
        own, model = self._model.describe().default_tier, _state(seat).model
        model.tier = replace(
            seat.tier,
            num_steps=min(seat.tier.num_steps, own.num_steps),
            topk=min(seat.tier.topk, max(1, own.topk)),
        )
        return model

    def _blend(self, seat: Seat, match: Tree | None, made: Proposal) -> Proposal:
        if seat.mirror.sampling.needs_draft_probs:
            return made if made is not None else match
        return merged([match, made if isinstance(made, Tree) else None], seat.tier)

    def _foreseer(self) -> Foreseer:
        assert isinstance(self._model, Foreseer), "look-ahead with a model that cannot foresee"
        return self._model


def _first_path(tree: Tree) -> tuple[int, ...]:
    path: list[int] = []
    node = int(tree.next_token[0])
    while node >= 0:
        path.append(int(tree.tokens[node]))
        node = int(tree.next_token[node])
    return tuple(path)


def _state(seat: Seat) -> _State:
    assert isinstance(seat.state, _State), "a seat of another proposer"
    return seat.state
