"""Makes a drafter's tree fit a session's accept rule before it is held. Knows no wire and no batch.

`rejection` and `block` compare chains with the distributions that their tokens were drawn from.
They are exact only if the tokens were drawn from those, independently of the target's coins. So the
tokens are drawn here again, by the noise that the drafter was to use: one that sends a softmax and
proposes its argmax has its token replaced, and costs speed, never the law.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from graft.common.draft_probs import draw_uniform
from graft.common.sampling import Sampling
from graft.common.tree import Tree, TreeRefused, trim
from graft.v1.tree_pb2 import TreeRefusal
from graft.verify.shelf import Proposal


class Fitted(NamedTuple):
    """A proposal as its session can use it.

    cut: nodes beside the first path were left out. redrawn: a token was not what its distribution
    gives, so it was replaced and the chain ends there.
    """

    proposal: Proposal
    cut: bool = False
    redrawn: bool = False


def fit(proposal: Proposal, sampling: Sampling, prefix_length: int) -> Fitted:
    """The proposal under the session's rule; rules that look at tokens alone take it as it is.

    Raises:
        TreeRefused: NO_PROBS, when the rule needs to know what the tokens were drawn from.
    """
    tree = proposal.tree
    if tree is None or tree.num_nodes == 1 or not sampling.compares_probs:
        return Fitted(proposal)
    chain = _first_path(tree)
    cut = chain.num_nodes < tree.num_nodes
    if sampling.greedy or proposal.one_hot:
        return Fitted(replace(proposal, tree=chain, probs=()), cut)
    if not proposal.probs:
        raise TreeRefused(
            TreeRefusal.TREE_REFUSAL_NO_PROBS,
            "the tree does not say what its tokens were drawn from",
        )
    probs = proposal.probs[: chain.num_nodes - 1]
    for step, row in enumerate(probs):
        token = row.draw(draw_uniform(sampling.seed, prefix_length, step))
        if token != int(chain.tokens[step + 1]):
            chain = _ending_in(chain, step + 1, token)
            return Fitted(replace(proposal, tree=chain, probs=probs[: step + 1]), cut, True)
    return Fitted(replace(proposal, tree=chain, probs=probs), cut)


def _first_path(tree: Tree) -> Tree:
    """The chain of first children; in preorder it is where the tree begins."""
    node = 0
    while int(tree.next_token[node]) >= 0:
        node += 1
    return trim(tree, node + 1, tree.max_depth)


def _ending_in(chain: Tree, node: int, token: int) -> Tree:
    tree = trim(chain, node + 1, chain.max_depth)
    tokens = tree.tokens.copy()
    tokens[node] = token
    return replace(tree, tokens=tokens)
