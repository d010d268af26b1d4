"""Grows whole trees in one call of the device, where it runs the network in calls of its own.

Knows stems, laws and trees; what is computed is behind `Recurrent`. Tokens that are drawn by chance
grow in graft.draft.levels, which gives the same trees otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from graft.common.tree import Tree
from graft.draft.expand import Shape, Stem
from graft.draft.law import RowLaw
from graft.draft.prune import pruned
from graft.draft.ran import Ran
from graft.draft.rows import page_table
from graft.kernels.ops import BushStem, KvCache, Recurrent


class Grown(NamedTuple):
    """A tree, None where nothing can be accepted, and what was run for it."""

    tree: Tree | None
    ran: Ran


def grow_bush(
    recurrent: Recurrent, stems: Sequence[tuple[Stem, Shape]], roots: Tensor, kv: KvCache
) -> list[Grown]:
    """A tree for each stem, of its own shape. roots: [stems, hidden].

    Raises:
        ValueError: the network gave numbers that cannot be ranked.
    """
    table = page_table([stem.lane for stem, _ in stems])
    made = recurrent.grow(roots, [_stem(*one) for one in stems], table, kv)
    return [
        Grown(
            pruned(stem.root, stem.vocab_size, bush.tokens, bush.parents, bush.scores),
            Ran(shape.topk, bush.run_tokens, bush.run_parents, bush.states),
        )
        for (stem, shape), bush in zip(stems, made, strict=True)
    ]


def _stem(stem: Stem, shape: Shape) -> BushStem:
    sampling, lane = stem.sampling, stem.lane
    first = stem.prefix_length
    coupled = RowLaw(sampling, stem.noise, first).coupled
    return BushStem(
        topk=shape.topk,
        num_steps=shape.num_steps,
        num_nodes=shape.num_nodes,
        position=lane.length,
        cached=lane.num_cached,
        noise=tuple(map(stem.noise.at, range(first, first + shape.num_steps))) if coupled else None,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
    )
