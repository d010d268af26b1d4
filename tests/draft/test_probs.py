"""What trees say of how their tokens came to be: drawn from what, or not drawn at all."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from graft.common.draft_probs import Distribution, decode_probs, distribution, draw_uniform
from graft.common.prefix import Prefix
from graft.common.sampling import Sampling
from graft.common.tier import Tier
from graft.common.tree import TreeLimits, chain, from_parents
from graft.common.tree_codec import decode
from graft.draft.engine import Engine
from graft.draft.events import Opened, Outcome, Proposed
from graft.draft.metrics import DraftMetrics
from graft.draft.mirror import Mirror
from graft.draft.proposers.base import Proposal, Proposer, Sampled, Seat
from graft.draft.proposers.ngram import NgramOptions, NgramProposer
from graft.testing.scripted import Scripted
from graft.v1.sampling_pb2 import AcceptRule
from graft.v1.tree_pb2 import CandidateTree

LIMITS = TreeLimits(64, 32, 300)
TOKENS = [5, 6, 7, 5, 6, 8, 5, 6]
REJECTION = AcceptRule.ACCEPT_RULE_REJECTION
ROW = distribution([3, 200], [0.25, 0.75])


def sent(proposer: Proposer, sampling: Sampling, tier: Tier) -> Sequence[CandidateTree]:
    """What leaves for one session."""
    outcomes: list[Outcome] = []
    engine = Engine({proposer.name: proposer}, outcomes.extend, DraftMetrics())
    mirror = Mirror(1, Prefix(TOKENS), 3, sampling, LIMITS, 100)
    engine.step([Opened(1, mirror, tier)])
    (made,) = outcomes
    assert isinstance(made, Proposed)
    return made.trees


def law(rule: AcceptRule.ValueType, temperature: float = 0.8) -> Sampling:
    return Sampling(temperature=temperature, rule=rule, seed=11)


def ngram_tree(sampling: Sampling) -> CandidateTree:
    proposer = NgramProposer(NgramOptions(spec_factor=0))
    (tree,) = sent(proposer, sampling, Tier("ngram", 8, 4, 16))
    return tree


@pytest.mark.parametrize("rule", [REJECTION, AcceptRule.ACCEPT_RULE_BLOCK])
def test_ngram_says_that_it_draws_nothing_and_sends_a_chain(rule: AcceptRule.ValueType) -> None:
    message = ngram_tree(law(rule))
    assert message.one_hot and not message.probs
    tree = decode(TOKENS[-1], message.shape, message.tokens, message.scores, LIMITS)
    assert tree.max_depth == tree.num_nodes - 1 > 0


def test_sessions_of_other_rules_hear_nothing_of_it() -> None:
    for sampling in (
        law(AcceptRule.ACCEPT_RULE_COUPLED),
        law(AcceptRule.ACCEPT_RULE_TARGET_ONLY),
        law(REJECTION, temperature=0.0),
    ):
        message = ngram_tree(sampling)
        assert not message.one_hot and not message.probs
    wide = ngram_tree(law(AcceptRule.ACCEPT_RULE_COUPLED))
    tree = decode(TOKENS[-1], wide.shape, wide.tokens, wide.scores, LIMITS)
    assert tree.max_depth < tree.num_nodes - 1


def sampler(rows: tuple[Distribution, ...]) -> Scripted:
    def guess(seat: Seat) -> Proposal:
        prefix, seed = seat.mirror.prefix, seat.mirror.sampling.seed
        drawn = [row.draw(draw_uniform(seed, len(prefix), i)) for i, row in enumerate(rows)]
        return Sampled(chain([prefix.root, *drawn]), rows)

    return Scripted("sampler", guess)


def test_a_drawn_chain_travels_with_its_distributions_cut_to_its_tier() -> None:
    (message,) = sent(sampler((ROW,) * 5), law(REJECTION), Tier("sampler", 3, 1, 16))
    assert not message.one_hot
    tree = decode(TOKENS[-1], message.shape, message.tokens, message.scores, LIMITS)
    probs = decode_probs(message.probs, tree, LIMITS.vocab_size)
    assert tree.num_nodes == 4
    assert [row.probs.tolist() for row in probs] == [[0.25, 0.75]] * 3


def test_a_drawn_chain_is_a_chain_like_any_other_under_other_rules() -> None:
    coupled = law(AcceptRule.ACCEPT_RULE_COUPLED)
    (message,) = sent(sampler((ROW,) * 2), coupled, Tier("sampler", 3, 1, 16))
    assert not message.one_hot and not message.probs


@pytest.mark.parametrize(
    "proposal",
    [
        Sampled(chain([6, 3, 3]), (ROW,)),
        Sampled(from_parents([6, 3, 200], [-1, 0, 0]), (ROW, ROW)),
    ],
    ids=["a distribution is missing", "no chain"],
)
def test_what_is_no_drawn_chain_stays_at_home(proposal: Sampled) -> None:
    bad = Scripted("bad", lambda seat: proposal)
    assert not sent(bad, law(REJECTION), Tier("bad", 3, 1, 16))
