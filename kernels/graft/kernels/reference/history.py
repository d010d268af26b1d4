"""What penalties, logit bias and forbidden tokens do at each node of a tree. Knows no logits.

Every node has its own history: the committed tokens and the drafted tokens on its own path. Two
branches that differ in one token are penalised differently, which is what makes a penalised text
the same with and without a tree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch

from graft.common.sampling import Sampling
from graft.common.tree import Tree
from graft.kernels.ops import Adjust


@dataclass(slots=True)
class History:
    """The committed tokens of a session: what was in the prompt, what was generated how often.

    A committed root is part of it. `forbidden` may not be chosen after nodes of a depth below
    `forbidden_depth` (end tokens before min_tokens).
    """

    prompt: frozenset[int] = frozenset()
    generated: Counter[int] = field(default_factory=Counter)
    forbidden: tuple[int, ...] = ()
    forbidden_depth: int = 0

    def commit(self, tokens: Iterable[int]) -> None:
        """In place: counts tokens that the target has decided, the bonus included."""
        self.generated.update(tokens)


def adjust_rows(sampling: Sampling, history: History, tree: Tree) -> Adjust | None:
    """The adjust entries of every node's row, ascending by token; None when there is nothing.

    repetition_penalty counts prompt and generated tokens; presence and frequency penalties count
    generated ones. A forbidden token has shift +inf.
    """
    ptr = [0]
    tokens: list[int] = []
    ratios: list[float] = []
    shifts: list[float] = []
    for node in range(tree.num_nodes):
        path = [int(tree.tokens[i]) for i in tree.ancestors(node)[1:]]
        generated = history.generated + Counter(path)
        seen = history.prompt | set(generated)
        named = set(sampling.logit_bias)
        if history.forbidden_depth > 0:
            named.update(history.forbidden)
        if sampling.has_penalties:
            named |= seen
        for token in sorted(named):
            times = generated[token]
            shift = sampling.frequency_penalty * times - sampling.logit_bias.get(token, 0.0)
            if times > 0:
                shift += sampling.presence_penalty
            tokens.append(token)
            ratios.append(sampling.repetition_penalty if token in seen else 1.0)
            ends_early = int(tree.depth[node]) < history.forbidden_depth
            forbidden = ends_early and token in history.forbidden
            shifts.append(float("inf") if forbidden else shift)
        ptr.append(len(tokens))
    if not tokens:
        return None
    return Adjust(
        torch.tensor(ptr, dtype=torch.int32),
        torch.tensor(tokens, dtype=torch.int32),
        torch.from_numpy(np.asarray(ratios, np.float32)),
        torch.from_numpy(np.asarray(shifts, np.float32)),
    )
