"""One session's commit by its own accept rule. Knows logits and trees; knows no KV and no RPC.

The coupled rule of many sessions is one `Ops.choose` and one `Ops.accept`; `decide` is for the
sessions of a step that follow another rule, and equals the ops for the coupled one.

Coins come from their own noise domains, counted by the prefix length of the round and the node, so
no coin serves two rounds: block verification looks at coins of positions it then gives back.
A drafter that samples for `rejection` or `block` must do the same with `Domain.DRAFT`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from graft.common.noise import Domain, uniform_at, uniforms
from graft.common.tree import Tree
from graft.kernels.cpu.accept import accept
from graft.kernels.cpu.choose import choose, target_probs
from graft.kernels.cpu.sample import (
    block_speculative_sampling,
    chain_speculative_sampling,
    tree_speculative_sampling_target_only,
)
from graft.kernels.cpu.simulate import (
    FIXED_TOKEN,
    SimulatedTokens,
    Simulation,
    simulated_lengths,
)
from graft.kernels.ops import ChoiceRows
from graft.kernels.rows import Law, choice_rows, tree_rows
from graft.kernels.trees import VerifyTrees
from graft.v1.sampling_pb2 import AcceptRule

REFUSED = -1


class Decision(NamedTuple):
    """What a round decided.

    nodes: the accepted path from the root on, the root included.
    token: the bonus, the target's own token after the last node; REFUSED when that row of logits
        holds NaN or allows nothing. The drafted nodes of the path stand even then.
    """

    nodes: tuple[int, ...]
    token: int


def decide(law: Law, logits: Tensor, draft_probs: Tensor | None = None) -> Decision:
    """The accepted path and the bonus of one session.

    Shapes:
        logits: [num_nodes, vocab], float32, row i after node i.
        draft_probs: [steps, vocab], float32, what the drafter sampled each node of the first path
            from; None when it did not sample, which counts as probability 1.
    Rules:
        COUPLED and TARGET_ONLY use the whole tree. REJECTION and BLOCK use its first path alone.
    """
    rows = choice_rows([law], logits.shape[1])
    rule = law.sampling.rule
    if rule in (AcceptRule.ACCEPT_RULE_UNSPECIFIED, AcceptRule.ACCEPT_RULE_COUPLED):
        return _coupled(law.tree, logits, rows)
    if rule == AcceptRule.ACCEPT_RULE_TARGET_ONLY:
        return _target_only(law, logits, rows)
    return _chain(law, logits, rows, draft_probs)


class SimulatedCommit(NamedTuple):
    """A round of a benchmark whose acceptance was drawn; the tokens are no text.

    nodes: the first nodes of the tree, the root included. tokens: what is committed, one a node.
    """

    nodes: tuple[int, ...]
    tokens: tuple[int, ...]


def simulate(simulation: Simulation, law: Law, logits: Tensor) -> SimulatedCommit:
    """Accepts a drawn length of the tree's first path, as long as it is.

    logits: [num_nodes, vocab], float32, which only real draft tokens look at, for the bonus.
    """
    tree, seed = law.tree, np.array([law.sampling.seed], np.uint64).view(np.int64)
    drawn = simulated_lengths(
        simulation,
        torch.from_numpy(seed),
        torch.tensor([law.prefix_length]),
        first_path(tree) + 1,
    )
    length = int(drawn[0])
    if simulation.tokens is SimulatedTokens.FIXED:
        return SimulatedCommit(tuple(range(length)), (FIXED_TOKEN,) * length)
    drafted = tree.tokens[1:length].tolist()
    return SimulatedCommit(tuple(range(length)), (*drafted, int(logits[length - 1].argmax())))


def first_path(tree: Tree) -> int:
    """Number of drafted nodes on the first path; in preorder they are nodes 1 to that number."""
    length = 0
    while int(tree.next_token[length]) >= 0:
        length += 1
    return length


def _coupled(tree: Tree, logits: Tensor, rows: ChoiceRows) -> Decision:
    chosen = choose(logits, rows)
    accepted, index = accept(tree_rows([tree]), chosen)
    nodes = tuple(index[0, : int(accepted[0]) + 1].tolist())
    return Decision(nodes, int(chosen[nodes[-1]]))


def _target_only(law: Law, logits: Tensor, rows: ChoiceRows) -> Decision:
    tree, sampling = law.tree, law.sampling
    probs = target_probs(logits, rows)
    coins = uniforms(sampling.seed, law.prefix_length, tree.num_nodes, Domain.COIN)
    final = uniform_at(sampling.seed, law.prefix_length, 0, Domain.FINAL)
    result = tree_speculative_sampling_target_only(
        VerifyTrees(
            candidates=torch.from_numpy(tree.tokens).long().unsqueeze(0),
            retrive_index=torch.arange(tree.num_nodes).unsqueeze(0),
            retrive_next_token=torch.from_numpy(tree.next_token).long().unsqueeze(0),
            retrive_next_sibling=torch.from_numpy(tree.next_sibling).long().unsqueeze(0),
        ),
        (torch.from_numpy(coins).unsqueeze(0), torch.tensor([final])),
        probs.unsqueeze(0),
        (sampling.threshold_single, sampling.threshold_acc),
        tree.max_depth + 1,
    )
    nodes = tuple(result.accept_index[0, : int(result.accept_token_num[0]) + 1].tolist())
    return _bonus(nodes, int(result.predicts[nodes[-1]]), probs)


def _chain(law: Law, logits: Tensor, rows: ChoiceRows, draft_probs: Tensor | None) -> Decision:
    steps, sampling = first_path(law.tree), law.sampling
    drafts = torch.from_numpy(law.tree.tokens[1 : steps + 1]).long()
    probs = target_probs(logits, rows)
    if draft_probs is None:
        draft_probs = torch.zeros(steps, logits.shape[1])
        draft_probs[torch.arange(steps), drafts] = 1.0
    coins = uniforms(sampling.seed, law.prefix_length, steps, Domain.COIN)
    final = uniform_at(sampling.seed, law.prefix_length, 0, Domain.FINAL)
    block = sampling.rule == AcceptRule.ACCEPT_RULE_BLOCK
    verify = block_speculative_sampling if block else chain_speculative_sampling
    result = verify(
        drafts.unsqueeze(0),
        torch.tensor([steps]),
        (torch.from_numpy(coins).unsqueeze(0), torch.tensor([final])),
        probs[: steps + 1].unsqueeze(0),
        draft_probs[:steps].unsqueeze(0),
    )
    accepted = int(result.accept_token_num[0])
    return _bonus(tuple(range(accepted + 1)), int(result.tokens[0, accepted]), probs)


def _bonus(nodes: tuple[int, ...], token: int, probs: Tensor) -> Decision:
    lawful = bool((probs[nodes[-1]] > 0).any())
    return Decision(nodes, token if lawful else REFUSED)
