"""Proposals under rules that compare probabilities: cut, drawn again, or refused."""

from __future__ import annotations

import pytest

from graft.common.draft_probs import distribution, draw_uniform
from graft.common.sampling import Sampling
from graft.common.tree import TreeRefused, chain, from_parents
from graft.v1.sampling_pb2 import AcceptRule
from graft.v1.tree_pb2 import TreeRefusal
from graft.verify.drawn import fit
from graft.verify.shelf import Proposal

PREFIX = 9
ROW = distribution(list(range(50)), [1.0] * 50)
REJECTION = Sampling(temperature=1.0, seed=5, rule=AcceptRule.ACCEPT_RULE_REJECTION)
GREEDY = Sampling(rule=AcceptRule.ACCEPT_RULE_BLOCK)
OTHERS = [
    Sampling(temperature=1.0, rule=AcceptRule.ACCEPT_RULE_COUPLED),
    Sampling(temperature=1.0, rule=AcceptRule.ACCEPT_RULE_TARGET_ONLY),
]
BUSH = from_parents([7, 1, 2, 3, 4], [-1, 0, 1, 0, 1])
DRAWN = [ROW.draw(draw_uniform(REJECTION.seed, PREFIX, step)) for step in range(3)]


def shown(proposal: Proposal) -> list[int]:
    assert proposal.tree is not None
    return proposal.tree.tokens.tolist()


@pytest.mark.parametrize("sampling", OTHERS)
def test_other_rules_take_a_tree_as_it_is(sampling: Sampling) -> None:
    proposal = Proposal(BUSH)
    assert fit(proposal, sampling, PREFIX) == (proposal, False, False)


def test_a_wide_tree_is_cut_to_its_first_path() -> None:
    fitted = fit(Proposal(BUSH, one_hot=True), REJECTION, PREFIX)
    assert shown(fitted.proposal) == [7, 1, 2]
    assert fitted.cut and not fitted.redrawn


def test_a_chain_that_was_drawn_as_it_says_passes_whole() -> None:
    proposal = Proposal(chain([7, *DRAWN]), probs=(ROW,) * 3)
    fitted = fit(proposal, REJECTION, PREFIX)
    assert shown(fitted.proposal) == [7, *DRAWN]
    assert len(fitted.proposal.probs) == 3
    assert not fitted.cut and not fitted.redrawn


def test_a_token_that_was_not_drawn_is_replaced_and_ends_the_chain() -> None:
    argmax = (DRAWN[1] + 1) % 50
    proposal = Proposal(chain([7, DRAWN[0], argmax, DRAWN[2]]), probs=(ROW,) * 3)
    fitted = fit(proposal, REJECTION, PREFIX)
    assert shown(fitted.proposal) == [7, DRAWN[0], DRAWN[1]]
    assert len(fitted.proposal.probs) == 2
    assert fitted.redrawn
    assert shown(proposal) == [7, DRAWN[0], argmax, DRAWN[2]]


def test_a_tree_that_does_not_say_what_it_was_drawn_from_is_refused() -> None:
    with pytest.raises(TreeRefused, match="drawn from") as caught:
        fit(Proposal(chain([7, 1])), REJECTION, PREFIX)
    assert caught.value.refusal == TreeRefusal.TREE_REFUSAL_NO_PROBS


def test_greedy_decoding_needs_to_know_nothing() -> None:
    fitted = fit(Proposal(BUSH, probs=(ROW,) * 4), GREEDY, PREFIX)
    assert shown(fitted.proposal) == [7, 1, 2]
    assert not fitted.proposal.probs and not fitted.redrawn


def test_nothing_to_propose_is_no_fault() -> None:
    for proposal in (Proposal(None), Proposal(chain([7]))):
        assert fit(proposal, REJECTION, PREFIX) == (proposal, False, False)
