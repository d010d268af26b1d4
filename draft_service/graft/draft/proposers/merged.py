"""MERGED: n-gram look-up and a model under one node budget, every path on one scale.

A match is worth what matches of its length have been worth so far; a model's path what the model
says. Where a match is long and such matches hold, its chain is proposed alone and the model does
not run. Works with any model proposer.

Of two models a session keeps to one: the first, unless reading its prompt would cost that one more
than it brings, which is what the second is for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from graft.common.errors import InvalidArgument
from graft.common.tier import Tier
from graft.common.tree import Tree
from graft.draft.foresee import tier_of_branch
from graft.draft.merge import merged, union
from graft.draft.mirror import Mirror
from graft.draft.proposers.base import (
    Follower,
    Foreseen,
    Foreseer,
    Proposal,
    Proposer,
    ProposerInfo,
    Seat,
)
from graft.draft.proposers.ngram import NgramProposer
from graft.draft.survival import Survival

_LONG_MATCH = 8
_SURE = 0.85

# A whole model reads a token of the prompt in a tenth of what it saves for one of the answer.
_LONG_PROMPT = 512
_ROOM_SHARE = 4


@dataclass(slots=True, eq=False)
class _State:
    """A seat at each source. length, guess: the last match, and its likeliest continuation.

    source: whose seat `model` is. follower: the source, where it can follow.
    """

    source: Proposer
    follower: Follower | None
    ngram: Seat
    model: Seat
    length: int = 0
    guess: tuple[int, ...] = ()


class MergedProposer:
    """Several proposers as one."""

    name = "merged"

    def __init__(self, ngram: NgramProposer, *models: Proposer) -> None:
        """models: one, or two, the second for long prompts.

        Raises:
            InvalidArgument: two that read the target's hidden states.
        """
        if sum(model.describe().needs is not None for model in models) > 1:
            raise InvalidArgument(
                f"{' and '.join(model.name for model in models)} both read hidden states of the "
                "target: merged takes one that does",
                field="proposers",
            )
        self._ngram = ngram
        self._models = models
        self._survival = Survival()

    def describe(self) -> ProposerInfo:
        """As the models'; trees may be as deep as matches are long."""
        infos = [model.describe() for model in self._models]
        match = self._ngram.describe()
        tiers = [info.default_tier for info in (*infos, match)]
        names = [self._ngram.name, *(model.name for model in self._models)]
        return replace(
            infos[0],
            default_tier=Tier(
                self.name,
                num_steps=max(tier.num_steps for tier in tiers),
                topk=max(2, *(info.default_tier.topk for info in infos)),
                num_draft_tokens=max(tier.num_draft_tokens for tier in tiers),
                lookahead=min(info.default_tier.lookahead for info in infos),
            ),
            max_nodes=match.max_nodes,
            max_depth=match.max_depth,
            detail=f"{' and '.join(names)} in one tree",
            needs=next((info.needs for info in infos if info.needs is not None), None),
            foresees=all(info.foresees for info in infos),
            sources=tuple(names),
        )

    def open(self, mirror: Mirror) -> object:
        """Opens the session at the look-up and at the model for it."""
        off = Tier()
        ngram = Seat(mirror, off, self._ngram.open(mirror))
        long = len(mirror.prefix) > min(_LONG_PROMPT, _ROOM_SHARE * mirror.room)
        source = self._models[-1 if long else 0]
        model = Seat(mirror, off, source.open(mirror))
        return _State(source, source if isinstance(source, Follower) else None, ngram, model)

    def close(self, seat: Seat) -> None:
        """Closes it at both."""
        state = _state(seat)
        self._ngram.close(state.ngram)
        state.source.close(state.model)

    def commit(self, seat: Seat, tokens: Sequence[int]) -> None:
        """Tells both, and learns how the last match did."""
        state = _state(seat)
        for count, (guess, token) in enumerate(zip(state.guess, tokens, strict=False)):
            self._survival.add(state.length + count, guess == token)
            if guess != token:
                break
        state.guess = ()
        self._ngram.commit(state.ngram, tokens)
        state.source.commit(state.model, tokens)

    def propose(self, batch: Sequence[Seat]) -> Sequence[Proposal]:
        """One tree a seat; the model runs for those whose match is not sure to hold."""
        matches = [self._match(seat, seat.tier) for seat in batch]
        unsure = [
            place
            for place, seat in enumerate(batch)
            if seat.mirror.sampling.needs_draft_probs
            or not self._sure(_state(seat), matches[place])
        ]
        made: dict[int, Proposal] = {}
        for source, places in self._by_source(batch, unsure):
            seats = [self._model_seat(batch[place]) for place in places]
            made |= dict(zip(places, source.propose(seats), strict=True))
        return [
            self._blend(seat, matches[place], made.get(place)) for place, seat in enumerate(batch)
        ]

    def _by_source(
        self, batch: Sequence[Seat], places: Iterable[int]
    ) -> list[tuple[Proposer, list[int]]]:
        """The places of each model, in the order of the models."""
        found = []
        for source in self._models:
            own = [place for place in places if _state(batch[place]).source is source]
            if own:
                found.append((source, own))
        return found

    def behind(self, seat: Seat) -> int:
        """As the model is; what matches is found at once."""
        state = _state(seat)
        return 0 if state.follower is None else state.follower.behind(state.model)

    def follow(self, seats: Sequence[Seat]) -> None:
        """The models read on."""
        for source, places in self._by_source(seats, range(len(seats))):
            if isinstance(source, Follower):
                source.follow([_state(seats[place]).model for place in places])

    def adopt(self, seat: Seat, branch: Seat) -> bool:
        """As the model does; what matched is remembered in any case."""
        own, theirs = _state(seat), _state(branch)
        own.length, own.guess = theirs.length, theirs.guess
        return _foreseer(own).adopt(own.model, theirs.model)

    def branch(self, seat: Seat, tokens: Sequence[int]) -> Seat | None:
        """A branch at both; None when one of them has no room."""
        state = _state(seat)
        state.ngram.tier = seat.tier
        # Sources are always asked for their own branches, so that each keeps its own state.
        model = _foreseer(state).branch(self._model_seat(seat), tokens)
        if model is None:
            return None
        ngram = self._ngram.branch(state.ngram, tokens)
        assert ngram is not None
        mirror = model.mirror
        return Seat(
            mirror,
            tier_of_branch(seat.tier, mirror),
            _State(state.source, state.follower, ngram, model),
        )

    def foresee(self, seats: Sequence[Seat]) -> Sequence[Foreseen]:
        """Both sources' trees, merged; what only the wide ones hold are outcomes."""
        for seat in seats:
            _state(seat).ngram.tier = seat.tier
        looked = self._ngram.foresee([_state(seat).ngram for seat in seats])
        seen: dict[int, Foreseen] = {}
        for _, places in self._by_source(seats, range(len(seats))):
            asked = [self._model_seat(seats[place]) for place in places]
            foreseer = _foreseer(_state(seats[places[0]]))
            seen |= dict(zip(places, foreseer.foresee(asked), strict=True))
        found = []
        for place, (seat, match) in enumerate(zip(seats, looked, strict=True)):
            own, model = self._scored(seat, match.tree), seen[place]
            length = _state(seat).length
            wide = [
                match.wide if match.wide is None else self._survival.scored(match.wide, length),
                model.wide,
            ]
            here = [tree for tree in wide if tree is not None]
            tree = merged([own, model.tree], self._tier(seat))
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
        state = _state(seat)
        own, model = state.source.describe().default_tier, state.model
        model.tier = replace(
            seat.tier,
            num_steps=min(seat.tier.num_steps, own.num_steps),
            topk=min(seat.tier.topk, max(1, own.topk)),
        )
        return model

    def _tier(self, seat: Seat) -> Tier:
        """What a merged tree may be: beside a chain, no more nodes than the chain's own.

        A model that drafts chains is sure of them, and what a match would add is seldom right.
        """
        own = _state(seat).source.describe().default_tier
        if own.topk > 1:
            return seat.tier
        return replace(
            seat.tier, num_draft_tokens=min(seat.tier.num_draft_tokens, own.num_draft_tokens)
        )

    def _blend(self, seat: Seat, match: Tree | None, made: Proposal) -> Proposal:
        if seat.mirror.sampling.needs_draft_probs:
            return made if made is not None else match
        if not isinstance(made, Tree):
            return merged([match], seat.tier)
        return merged([match, made], self._tier(seat))


def _foreseer(state: _State) -> Foreseer:
    assert isinstance(state.source, Foreseer), "look-ahead with a model that cannot foresee"
    return state.source


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
