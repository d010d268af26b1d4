"""Nodes of a draft tree that passed through the network. Knows no network and no slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Ran:
    """Numbered as they were run: step * topk + beam; node i was written i slots behind its lane.

    tokens, parents: of each node; parents are beams of the step before, all 0 in the first.
    states: [nodes, hidden], what the network made of them; None when there are no nodes.
    """

    topk: int
    tokens: Sequence[int]
    parents: Sequence[int]
    states: Tensor | None

    @property
    def num_run(self) -> int:
        """Nodes."""
        return len(self.tokens)

    def state(self, node: int) -> Tensor:
        """[hidden]: what the network made of `node`."""
        assert self.states is not None, "no node was run"
        return self.states[node]

    def followed(self, tokens: Sequence[int]) -> list[int]:
        """The nodes on the path `tokens` from the root, as far as they were run."""
        found: list[int] = []
        for step, token in enumerate(tokens):
            level = range(step * self.topk, min((step + 1) * self.topk, self.num_run))
            above = found[-1] % self.topk if found else None
            match = (
                node
                for node in level
                if self.tokens[node] == token and (above is None or self.parents[node] == above)
            )
            node = next(match, None)
            if node is None:
                break
            found.append(node)
        return found
