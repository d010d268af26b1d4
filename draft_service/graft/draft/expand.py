"""Grows draft trees level by level, many sessions side by side.

Knows scores, beams and who sees whom in a tree; knows no network. The caller runs the rows that
`parts` names and hands the logits to `add`, until `done`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from graft.common.draft_probs import Distribution
from graft.common.sampling import Sampling
from graft.common.tree import IntArray, Tree
from graft.draft.kv import Lane
from graft.draft.law import Children, Noise, RowLaw, best_children, draw_children
from graft.draft.proposers.base import Sampled
from graft.draft.prune import pruned
from graft.draft.ran import Ran
from graft.draft.rows import Part, tree_part
from graft.kernels.cpu.build_tree import parents_of_candidates
from graft.kernels.reference.candidates import organize_draft_results, select_top_k_tokens
from graft.kernels.trees import LevelInfo


@dataclass(frozen=True, slots=True)
class Shape:
    """What trees that grow together have in common: beams, depth, and nodes with the root.

    children: candidates of each node that is run, `topk` or more; only the beams go on.
    """

    topk: int
    num_steps: int
    num_nodes: int
    children: int

    @property
    def num_run(self) -> int:
        """Nodes that pass through the draft model, for each tree."""
        return self.topk * (self.num_steps - 1)

    def bounded(self, vocab_size: int) -> Shape:
        """The shape cut to the candidates there are."""
        topk, children = min(self.topk, vocab_size), min(self.children, vocab_size)
        candidates = (1 + (self.num_steps - 1) * topk) * children
        return Shape(topk, self.num_steps, min(self.num_nodes, 1 + candidates), children)


@dataclass(frozen=True, slots=True, eq=False)
class Stem:
    """Where one tree grows: behind `prefix_length` committed tokens, the last of them `root`.

    lane: its length is the slot that a child of the root takes.
    vocab_size: ids from there on may not be drafted.
    """

    lane: Lane
    root: int
    prefix_length: int
    sampling: Sampling
    noise: Noise
    vocab_size: int


@dataclass(frozen=True, slots=True, eq=False)
class RunLevel:
    """Nodes of one level that passed through the draft model.

    tokens: [stems, topk]; parents: [stems, topk], beams of the level before.
    """

    tokens: IntArray
    parents: IntArray


class Growth:
    """Trees of one shape, one a stem.

    Stems whose rule compares probabilities grow in a company of their own: chains, each token
    drawn by chance.
    """

    def __init__(self, stems: Sequence[Stem], shape: Shape, token_ids: Tensor | None) -> None:
        """token_ids: [draft vocab], int64, the target's id of each column of the logits."""
        self.stems = stems
        self.shape = shape
        self.run: list[RunLevel] = []
        self.states: list[Tensor] = []
        self.drawn = stems[0].sampling.needs_draft_probs
        assert not self.drawn or shape.children == 1, "drawn tokens make chains"
        self._token_ids = token_ids
        self._distributions: list[tuple[Distribution, ...]] = []
        self._levels: list[LevelInfo] = []
        self._chain_logs: list[Tensor] = []
        self._scores: Tensor | None = None
        self._paths = np.empty((len(stems), 0), np.int32)
        self._scratch: IntArray | None = None
        self._parent_rows = torch.empty(0, dtype=torch.int64)
        self._tokens = torch.empty(0, dtype=torch.int32)

    @property
    def done(self) -> bool:
        """True when no deeper level is wanted."""
        return len(self._levels) >= self.shape.num_steps

    @property
    def tokens(self) -> Tensor:
        """[stems * topk], int32: tokens of the rows to run next."""
        return self._tokens

    @property
    def parent_rows(self) -> Tensor:
        """[stems * topk], int64: which row of the last logits each of them grew from."""
        return self._parent_rows

    def add(self, logits: Tensor) -> None:
        """Takes what follows each row run last; at first, each root.

        Shapes:
            logits: [stems, draft vocab], then [stems * topk, draft vocab].
        """
        depth = len(self._levels) + 1
        beams_of = len(logits) // len(self.stems)
        laws: list[RowLaw] = []
        for stem in self.stems:
            law = RowLaw(stem.sampling, stem.noise, stem.prefix_length - 1 + depth)
            laws += [law] * beams_of
        if self.drawn:
            vocab_size = min(stem.vocab_size for stem in self.stems)
            children, drawn = draw_children(logits, laws, self._token_ids, vocab_size, depth - 1)
            self._distributions.append(drawn)
        else:
            children = best_children(logits, laws, self.shape.children)
        tokens = children.index if self._token_ids is None else self._token_ids[children.index]
        if self.shape.children == 1:
            # A product of many small numbers would vanish, and a chain has nothing to compare.
            self._chain_logs.append(torch.log(children.probs))
            children = Children(torch.ones_like(children.probs), children.index)
        beams = select_top_k_tokens(
            depth - 1,
            children.probs,
            tokens,
            torch.arange(len(logits)).unsqueeze(1),
            self._scores,
            self.shape.topk,
        )
        self._scores = beams.scores
        self._parent_rows = beams.hidden_states.flatten()
        self._tokens = beams.input_ids.int()
        self._levels.append(beams.info)

    def parts(self) -> list[Part]:
        """The rows to run next, in order of `tokens`; to be called once a level."""
        topk, step = self.shape.topk, len(self._levels) - 1
        parents = self._parent_rows.numpy()
        paths = self._paths[parents].reshape(len(self.stems), topk, step)
        local = (parents % topk if step else np.zeros_like(parents)).reshape(-1, topk)
        self.run.append(RunLevel(self._tokens.numpy().reshape(-1, topk), local.astype(np.int32)))
        if self._scratch is None:
            spans = [(stem.lane, stem.lane.length) for stem in self.stems]
            self._scratch = np.stack(
                [lane.slots(first, first + self.shape.num_run) for lane, first in spans]
            )
        own = self._scratch[:, step * topk : (step + 1) * topk, None]
        paths = np.concatenate([paths, own], axis=2)
        self._paths = paths.reshape(-1, step + 1)
        return [
            tree_part(stem.lane, np.full(topk, stem.lane.length + step, np.int32), path)
            for stem, path in zip(self.stems, paths, strict=True)
        ]

    def trees(self) -> list[Tree | None]:
        """The best nodes of each stem as a tree; None where nothing can be accepted."""
        results = organize_draft_results(self._levels, self.shape.num_nodes)
        parents = parents_of_candidates(results, self.shape.children).numpy()
        if self.shape.children == 1:
            scores = torch.cat(self._chain_logs, dim=1).cumsum(dim=1)
            scores = scores[:, : self.shape.num_nodes - 1]
        else:
            every = torch.cat([level.scores.flatten(1) for level in self._levels], dim=1)
            scores = torch.log(every.gather(1, results.top_scores_index))
        tokens = results.draft_tokens.numpy()
        return [
            pruned(
                stem.root,
                stem.vocab_size,
                tokens[line].tolist(),
                parents[line].tolist()[1:],
                scores[line].tolist(),
            )
            for line, stem in enumerate(self.stems)
        ]

    def proposals(self) -> list[Tree | Sampled | None]:
        """As `trees`, with what their tokens were drawn from where they were."""
        trees: list[Tree | Sampled | None] = [*self.trees()]
        if not self.drawn:
            return trees
        for line, tree in enumerate(trees):
            if isinstance(tree, Tree):
                levels = self._distributions[: tree.num_nodes - 1]
                trees[line] = Sampled(tree, tuple(level[line] for level in levels))
        return trees

    def ran(self, line: int) -> Ran:
        """What passed through the network of tree `line`."""
        topk = self.shape.topk
        own = slice(line * topk, (line + 1) * topk)
        return Ran(
            topk,
            [token for level in self.run for token in level.tokens[line].tolist()],
            [beam for level in self.run for beam in level.parents[line].tolist()],
            torch.cat([states[own] for states in self.states]) if self.states else None,
        )
