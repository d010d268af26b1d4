"""What penalties, logit bias and forbidden tokens do at each node, all nodes at once.

Meaning: graft.kernels.reference.history. Every node gets the named and the committed tokens as
one block, in which the counts of its own path are raised, and the path's other tokens after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from graft.common.sampling import Sampling
from graft.common.tree import FloatArray, Tree
from graft.kernels.ops import Adjust
from graft.kernels.reference.history import History

__all__ = ["History", "adjust_rows"]

LongArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
DoubleArray = npt.NDArray[np.float64]


class _Block(NamedTuple):
    """The tokens every node names, ascending, and what the committed text says of them."""

    tokens: LongArray
    times: LongArray
    seen: BoolArray
    bias: DoubleArray
    forbidden: BoolArray


def adjust_rows(sampling: Sampling, history: History, tree: Tree) -> Adjust | None:
    """The adjust entries of every node's row; None when there is nothing to adjust.

    As the reference, but for the order of entries inside a row.
    """
    block = _block(sampling, history)
    num_nodes, width = tree.num_nodes, len(block.tokens)
    times = np.repeat(block.times[None], num_nodes, 0)
    seen = np.repeat(block.seen[None], num_nodes, 0)
    node, token, repeats = _path_counts(tree)
    place = np.searchsorted(block.tokens, token)
    inside = np.isin(token, block.tokens)
    times[node[inside], place[inside]] += repeats[inside]
    seen[node[inside], place[inside]] = True
    outside = ~inside if sampling.has_penalties else np.zeros(len(node), np.bool_)
    if not width and not outside.any():
        return None
    shift = _shift(sampling, times) - block.bias
    shift += np.where(times > 0, sampling.presence_penalty, 0.0)
    shift[(tree.depth < history.forbidden_depth)[:, None] & block.forbidden] = np.inf
    rows = np.concatenate([np.repeat(np.arange(num_nodes), width), node[outside]])
    order = np.argsort(rows, kind="stable")
    ptr = np.zeros(num_nodes + 1, np.int32)
    np.cumsum(np.bincount(rows, minlength=num_nodes), out=ptr[1:])
    tokens = np.concatenate([np.tile(block.tokens, num_nodes), token[outside]])
    ratio = np.where(seen, sampling.repetition_penalty, 1.0).reshape(-1)
    path_ratio = np.full(int(outside.sum()), sampling.repetition_penalty)
    path_shift = _shift(sampling, repeats[outside]) + sampling.presence_penalty
    return Adjust(
        torch.from_numpy(ptr),
        torch.from_numpy(tokens[order].astype(np.int32)),
        torch.from_numpy(_float32(np.concatenate([ratio, path_ratio])[order])),
        torch.from_numpy(_float32(np.concatenate([shift.reshape(-1), path_shift])[order])),
    )


def _block(sampling: Sampling, history: History) -> _Block:
    parts = [_longs(sampling.logit_bias)]
    if history.forbidden_depth > 0:
        parts.append(_longs(history.forbidden))
    if sampling.has_penalties:
        parts += [_longs(history.prompt), _longs(history.generated)]
    tokens = np.unique(np.concatenate(parts))
    times = np.zeros(len(tokens), np.int64)
    seen = np.isin(tokens, _longs(history.prompt))
    generated = _longs(history.generated)
    known = np.isin(generated, tokens)
    counts = np.fromiter(history.generated.values(), np.int64, len(history.generated))
    times[np.searchsorted(tokens, generated[known])] = counts[known]
    bias = np.zeros(len(tokens), np.float64)
    for token, value in sampling.logit_bias.items():
        bias[np.searchsorted(tokens, token)] = value
    forbidden = np.isin(tokens, _longs(history.forbidden))
    return _Block(tokens, times, seen | (times > 0), bias, forbidden)


def _path_counts(tree: Tree) -> tuple[LongArray, LongArray, LongArray]:
    """(node, token, times): how often each token stands on a node's path, the root left out."""
    nodes, tokens = [], []
    above = np.arange(tree.num_nodes)
    while (above > 0).any():
        drafted = np.flatnonzero(above > 0)
        nodes.append(drafted)
        tokens.append(tree.tokens[above[drafted]].astype(np.int64))
        above = np.where(above > 0, tree.parent[np.maximum(above, 0)], 0)
    if not nodes:
        nothing = np.zeros(0, np.int64)
        return nothing, nothing, nothing
    pairs = np.concatenate(nodes) << np.int64(32) | np.concatenate(tokens)
    unique, times = np.unique(pairs, return_counts=True)
    return unique >> np.int64(32), unique & np.int64(0xFFFFFFFF), times


def _shift(sampling: Sampling, times: LongArray) -> DoubleArray:
    return np.asarray(sampling.frequency_penalty * times, np.float64)


def _longs(tokens: Iterable[int]) -> LongArray:
    return np.fromiter(tokens, np.dtype(np.int64))


def _float32(values: DoubleArray) -> FloatArray:
    return values.astype(np.float32)
