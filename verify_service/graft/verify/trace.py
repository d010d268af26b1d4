"""The tree of a round as people want to see it. Knows laws and logits; decides nothing."""

from __future__ import annotations

import torch
from torch import Tensor

from graft.kernels.ops import Ops
from graft.kernels.rows import Law, choice_rows
from graft.kernels.rules import Decision
from graft.v1.sampling_pb2 import AcceptRule
from graft.verify.events import TreeTrace


def traced(law: Law, decision: Decision, logits: Tensor, ops: Ops) -> TreeTrace:
    """What the target made of a session's tree; probabilities are those of the plain softmax.

    logits: [num_nodes, vocab], float32, row i after node i. Only the coupled rule has a choice at
    every node; under another one the nodes of the path alone have one, which the commit tells.
    """
    tree = law.tree
    normaliser = torch.logsumexp(logits, dim=-1)
    parents = torch.from_numpy(tree.parent[1:]).long()
    drafted = torch.from_numpy(tree.tokens[1:]).long()
    choices: tuple[int, ...] = ()
    choice_logprobs: tuple[float, ...] = ()
    if law.sampling.rule in (
        AcceptRule.ACCEPT_RULE_UNSPECIFIED,
        AcceptRule.ACCEPT_RULE_COUPLED,
    ):
        chosen = ops.choose(logits, choice_rows([law], logits.shape[1])).long()
        own = logits.gather(1, chosen.clamp(min=0).unsqueeze(1)).squeeze(1) - normaliser
        # Beside the path a node may have nothing to choose; its row is not numbers.
        own[chosen < 0] = -torch.inf
        choices = tuple(chosen.clamp(min=0).tolist())
        choice_logprobs = tuple(own.tolist())
    last = decision.nodes[-1]
    return TreeTrace(
        tokens=tuple(tree.tokens.tolist()),
        parents=tuple(parents.tolist()),
        path=decision.nodes[1:],
        logprobs=tuple((logits[parents, drafted] - normaliser[parents]).tolist()),
        choices=choices,
        choice_logprobs=choice_logprobs,
        bonus_logprob=float(logits[last, decision.token] - normaliser[last]),
    )
