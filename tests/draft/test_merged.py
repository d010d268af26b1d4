"""Matched text, a model and a client's prediction share one tree, on one scale."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from graft.common.errors import InvalidArgument
from graft.common.prefix import Prefix
from graft.common.sampling import Sampling
from graft.common.tier import Tier
from graft.common.tree import Tree, TreeLimits, chain, from_parents
from graft.draft.features import FeatureNeed
from graft.draft.merge import merged, union
from graft.draft.mirror import Mirror
from graft.draft.predicted import Predictions
from graft.draft.proposers.base import ProposerInfo, Seat
from graft.draft.proposers.merged import MergedProposer
from graft.draft.proposers.ngram import NgramOptions, NgramProposer
from graft.draft.server import make_proposers
from graft.draft.settings import DraftSettings
from graft.draft.survival import Survival
from graft.testing.scripted import Scripted

TIER = Tier("merged", num_steps=6, topk=2, num_draft_tokens=8)


def mirror_of(tokens: Sequence[int], prompt: int = 0, predicted: Sequence[int] = ()) -> Mirror:
    return Mirror(
        1,
        Prefix(tokens),
        prompt or len(tokens),
        Sampling(),
        TreeLimits(64, 32, 1000),
        100,
        prediction=np.asarray(predicted, np.int32) if predicted else None,
    )


def paths(tree: Tree | None) -> set[tuple[int, ...]]:
    if tree is None:
        return set()
    return {
        tuple(int(tree.tokens[one]) for one in tree.ancestors(node)[1:])
        for node in range(1, tree.num_nodes)
    }


def test_equal_paths_are_one_node_with_the_better_score() -> None:
    first = from_parents([9, 1, 2], [-1, 0, 1], [0.0, -1.0, -2.0])
    second = from_parents([9, 1, 3], [-1, 0, 1], [0.0, -0.5, -3.0])
    folded = union([first, second])
    assert paths(folded) == {(1,), (1, 2), (1, 3)}
    assert folded.scores is not None
    assert folded.scores.tolist() == [0.0, -0.5, -2.0, -3.0]


def test_one_budget_takes_the_best_nodes_of_all_sources() -> None:
    first = from_parents([9, 1, 2], [-1, 0, 1], [0.0, -0.1, -0.2])
    second = from_parents([9, 5, 6], [-1, 0, 1], [0.0, -0.3, -4.0])
    assert paths(merged([first, None, second], Tier("x", 4, 2, 4))) == {(1,), (1, 2), (5,)}
    assert paths(merged([first, second], Tier("x", 4, 1, 8))) == {(1,), (1, 2)}
    assert merged([None, None], TIER) is None


def test_longer_matches_are_trusted_more_and_experience_counts() -> None:
    survival = Survival()
    before = [survival.at(length) for length in (1, 2, 4, 9, 20)]
    assert before == sorted(before)
    for _ in range(200):
        survival.add(20, False)
    assert survival.at(20) < before[0]


class Model(Scripted):
    """Proposes 500, 501, ... with a fixed probability a step; counts the seats it ran for."""

    def __init__(self, log: float) -> None:
        def guess(seat: Seat) -> Tree:
            count = seat.tier.num_steps
            tree = chain([seat.mirror.prefix.root, *range(500, 500 + count)])
            scores = [step * log for step in range(count + 1)]
            return from_parents(tree.tokens.tolist(), tree.parent.tolist(), scores)

        super().__init__("model", guess, depth=3)
        self.num_seats = 0

    def propose(self, batch: Sequence[Seat]) -> Sequence[Tree | None]:
        self.num_seats += len(batch)
        return [self._seen(seat, seat.tier) for seat in batch]


def merged_proposer(log: float) -> tuple[MergedProposer, Model]:
    model = Model(log)
    return MergedProposer(NgramProposer(NgramOptions(spec_factor=0)), model), model


def seat_at(proposer: MergedProposer, tokens: Sequence[int]) -> Seat:
    mirror = mirror_of(tokens)
    return Seat(mirror, TIER, proposer.open(mirror))


def test_a_long_match_goes_alone_and_the_model_rests() -> None:
    proposer, model = merged_proposer(-0.1)
    text = [*range(1, 21), *range(1, 13)]
    (tree,) = proposer.propose([seat_at(proposer, text)])
    assert isinstance(tree, Tree)
    assert (13, 14, 15, 16, 17, 18) in paths(tree)
    assert model.num_seats == 0


def test_a_short_match_yields_to_a_sure_model_and_stays_beside_an_unsure_one() -> None:
    for log, first in ((-0.05, 500), (-3.0, 2)):
        proposer, _ = merged_proposer(log)
        (tree,) = proposer.propose([seat_at(proposer, [1, 2, 3, 9, 1])])
        assert isinstance(tree, Tree)
        assert int(tree.tokens[1]) == first
        assert tree.num_nodes <= TIER.num_draft_tokens


def test_without_a_match_the_model_is_alone() -> None:
    proposer, _ = merged_proposer(-0.5)
    (tree,) = proposer.propose([seat_at(proposer, [1, 2, 3, 4])])
    assert isinstance(tree, Tree)
    assert paths(tree) == {(500,), (500, 501), (500, 501, 502)}


def test_matches_that_fail_are_trusted_less() -> None:
    proposer, model = merged_proposer(-0.1)
    text = [*range(1, 21), *range(1, 13)]
    seat = seat_at(proposer, text)
    for other in range(900, 960):
        proposer.propose([seat])
        surprise = [other, *range(1, 13)]
        after = seat.mirror.prefix.digest_after(surprise)
        seat.mirror.commit(surprise, len(seat.mirror.prefix) + 13, after)
        proposer.commit(seat, surprise)
    model.num_seats = 0
    proposer.propose([seat])
    assert model.num_seats == 1


def test_branches_of_both_sources_see_the_same_likely_text() -> None:
    proposer, _ = merged_proposer(-3.0)
    seat = seat_at(proposer, [1, 2, 3, 4, 9, 1])
    branch = proposer.branch(seat, (2, 3))
    assert branch is not None
    (found,) = proposer.foresee([branch])
    assert found.tree is not None and found.wide is not None
    assert int(found.tree.tokens[0]) == 3
    assert {4, 500} & set(found.wide.tokens.tolist()) == {4, 500}
    proposer.close(branch)
    assert seat.mirror.prefix.tokens.tolist() == [1, 2, 3, 4, 9, 1]


def test_a_prediction_alone_is_a_chain() -> None:
    mirror = mirror_of([7, 7, 10], 2, [10, 11, 12, 13])
    tree = Predictions().blended(mirror, TIER, None)
    assert tree is not None
    assert tree.tokens.tolist() == [10, 11, 12, 13]


def test_a_prediction_goes_beside_a_tree() -> None:
    mirror = mirror_of([7, 7, 10], 2, [10, 11, 12, 13])
    other = from_parents([10, 500], [-1, 0], [0.0, -2.0])
    assert paths(Predictions().blended(mirror, TIER, other)) == {
        (11,),
        (11, 12),
        (11, 12, 13),
        (500,),
    }


def test_a_prediction_that_is_left_says_nothing_until_it_is_met_again() -> None:
    predictions = Predictions()
    left = mirror_of([7, 7, 10, 99], 2, [10, 11, 12, 13, 14])
    assert predictions.blended(left, TIER, None) is None
    again = mirror_of([7, 7, 10, 99, 12, 13], 2, [10, 11, 12, 13, 14])
    tree = predictions.blended(again, TIER, None)
    assert tree is not None and tree.tokens.tolist() == [13, 14]


def test_merged_is_named_with_its_model() -> None:
    for word in ("merged", "merged=eagle3+eagle3", "merged=eagle3+mtp+standalone", "merged=llama"):
        with pytest.raises(InvalidArgument, match="merged takes ngram and one or two of"):
            make_proposers(DraftSettings.load(None, {"proposers": [word]}))


class Named(Scripted):
    """Guesses one token, as a chain; may be behind."""

    def __init__(self, name: str, token: int, topk: int = 1, reads: bool = False) -> None:
        super().__init__(name, lambda seat: chain([seat.mirror.prefix.root, token, token]))
        self.topk, self.reads, self.lacking = topk, reads, 0

    def describe(self) -> ProposerInfo:
        tier = Tier(self.name, num_steps=2, topk=self.topk, num_draft_tokens=3)
        return ProposerInfo(tier, needs=FeatureNeed((1,)) if self.reads else None)

    def behind(self, seat: Seat) -> int:
        return self.lacking

    def follow(self, seats: Sequence[Seat]) -> None:
        self.lacking -= len(seats)


def test_long_prompts_are_left_to_the_second_model() -> None:
    first, second = Named("standalone", 7), Named("eagle3", 8, reads=True)
    proposer = MergedProposer(NgramProposer(NgramOptions()), first, second)
    assert proposer.describe().needs == FeatureNeed((1,))
    mirrors = [mirror_of(range(count)) for count in (20, 600)]
    mirrors.append(replace_room(mirror_of(range(100)), 10))
    seats = [Seat(mirror, TIER, proposer.open(mirror)) for mirror in mirrors]
    drafted = [paths(tree) for tree in proposer.propose(seats) if isinstance(tree, Tree)]
    assert drafted == [{(7,), (7, 7)}, {(8,), (8, 8)}, {(8,), (8, 8)}]


def replace_room(mirror: Mirror, room: int) -> Mirror:
    mirror.room = room
    return mirror


def test_two_models_that_read_states_are_refused() -> None:
    pair = Named("eagle", 7, reads=True), Named("eagle3", 8, reads=True)
    with pytest.raises(InvalidArgument, match="eagle and eagle3 both read"):
        MergedProposer(NgramProposer(NgramOptions()), *pair)


def test_it_is_behind_as_its_model_is() -> None:
    model = Named("standalone", 7)
    proposer = MergedProposer(NgramProposer(NgramOptions()), model)
    mirror = mirror_of(range(20))
    seat = Seat(mirror, TIER, proposer.open(mirror))
    model.lacking = 3
    assert proposer.behind(seat) == 3
    proposer.follow([seat])
    assert proposer.behind(seat) == 2


def test_beside_a_chain_a_match_adds_no_nodes() -> None:
    """The text has been followed by 3 before, and the chain says 7: two nodes in all."""
    for topk, count in ((1, 2), (2, 4)):
        proposer = MergedProposer(NgramProposer(NgramOptions()), Named("x", 7, topk))
        mirror = mirror_of([1, 2, 3, 4, 5, 1, 2])
        seat = Seat(mirror, TIER, proposer.open(mirror))
        (tree,) = proposer.propose([seat])
        assert isinstance(tree, Tree)
        assert tree.num_nodes - 1 >= count if topk > 1 else tree.num_nodes - 1 == count
