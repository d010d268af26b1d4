"""Grows whole trees in one call of the device, where it runs the network in calls of its own.

Knows stems, laws and trees; what is computed is behind `Recurrent`. Tokens that are drawn by chance
grow in graft.draft.levels, which gives the same trees otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from graft.common.tree import FloatArray, IntArray, Tree
from graft.draft.expand import Shape, Stem
from graft.draft.law import RowLaw
from graft.draft.prune import pruned
from graft.draft.ran import Ran
from graft.kernels.ops import Bush, BushStem, KvCache, Recurrent


@dataclass(frozen=True, slots=True, eq=False)
class Plot:
    """Where a tree is to grow, and what its lane lacks before it.

    tokens: [rows], int32, of the lane's next slots. features: [rows, states], those beside them.
    root: [hidden], what the network made of the lane's last slot; None where rows are lacking.
    """

    stem: Stem
    shape: Shape
    tokens: IntArray
    features: FloatArray
    root: Tensor | None


class Grown(NamedTuple):
    """A tree, None where nothing can be accepted, and what was run for it and before it."""

    tree: Tree | None
    ran: Ran
    root: Tensor


def grow_bush(recurrent: Recurrent, plots: Sequence[Plot], kv: KvCache, fused: bool) -> list[Grown]:
    """A tree for each plot, of its own shape; the lanes stay as long as they are.

    fused: the features have passed the drafter's projection.

    Raises:
        ValueError: the network gave numbers that cannot be ranked.
    """
    stems = [_stem(plot) for plot in plots]
    made = recurrent.grow(stems, [plot.root for plot in plots], kv, fused)
    return [_grown(plot, bush) for plot, bush in zip(plots, made, strict=True)]


def _grown(plot: Plot, bush: Bush) -> Grown:
    stem = plot.stem
    return Grown(
        pruned(stem.root, stem.vocab_size, bush.tokens, bush.parents, bush.scores),
        Ran(plot.shape.topk, bush.run_tokens, bush.run_parents, bush.states),
        bush.root,
    )


def _stem(plot: Plot) -> BushStem:
    stem, shape = plot.stem, plot.shape
    sampling, lane, first = stem.sampling, stem.lane, stem.prefix_length
    coupled = RowLaw(sampling, stem.noise, first).coupled
    rows = len(plot.tokens)
    return BushStem(
        topk=shape.topk,
        num_steps=shape.num_steps,
        num_nodes=shape.num_nodes,
        position=lane.length + rows,
        cached=lane.num_cached + rows,
        pages=lane.pages,
        tokens=plot.tokens,
        features=plot.features,
        noise=tuple(map(stem.noise.at, range(first, first + shape.num_steps))) if coupled else None,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        children=shape.children,
    )
