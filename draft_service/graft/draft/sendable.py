"""Proposals as messages that verify will not refuse. Knows limits and laws; knows no stream."""

from __future__ import annotations

from graft.common.tree import Tree, TreeRefused, check, trim
from graft.draft.candidate import candidate
from graft.draft.proposers.base import Sampled, Seat
from graft.v1.tree_pb2 import CandidateTree, TreeRefusal


def messages(proposal: Tree | Sampled, seat: Seat, elapsed_s: float) -> tuple[CandidateTree, ...]:
    """The proposal as it is sent; none for a root alone.

    Raises:
        TreeRefused: verify would refuse it.
    """
    tree, probs = (proposal, ()) if isinstance(proposal, Tree) else (proposal.tree, proposal.probs)
    if tree.num_nodes == 1:
        return ()
    if probs and (len(probs) != tree.num_nodes - 1 or tree.max_depth != tree.num_nodes - 1):
        raise TreeRefused(
            TreeRefusal.TREE_REFUSAL_BAD_PROBS,
            f"{len(probs)} distributions, expected one for each of the {tree.num_nodes - 1} "
            "drafted nodes of a chain",
        )
    tree = checked(tree, seat)
    return (candidate(tree, seat.mirror, elapsed_s, probs[: tree.num_nodes - 1]),)


def checked(tree: Tree, seat: Seat) -> Tree:
    """The tree cut to the seat's tier.

    Raises:
        TreeRefused: verify would refuse it.
    """
    root = seat.mirror.prefix.root
    if int(tree.tokens[0]) != root:
        raise TreeRefused(
            TreeRefusal.TREE_REFUSAL_MALFORMED,
            f"root is {int(tree.tokens[0])}, expected the last committed token {root}",
        )
    if tree.scores is not None and not all(score <= 0 for score in tree.scores.tolist()):
        raise TreeRefused(TreeRefusal.TREE_REFUSAL_BAD_SCORES, "a score is NaN or above zero")
    tree = trim(tree, seat.tier.num_draft_tokens, seat.tier.num_steps)
    check(tree, seat.mirror.limits)
    return tree
