"""Accept rules that compare coins with probabilities, all sessions of a batch at once.

Loops run over the visited children or steps, never over the batch. Meaning, and what the coins
must not share: graft.kernels.reference.sample.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from graft.common.tree import FloatArray
from graft.kernels.reference.float_math import WEIGHT_ONE, to_weights
from graft.kernels.reference.sample import LOWEST_THRESHOLD
from graft.kernels.trees import ChainResult, VerifyResult, VerifyTrees

LongArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


def tree_speculative_sampling_target_only(
    trees: VerifyTrees,
    coins: tuple[Tensor, Tensor],
    target_probs: Tensor,
    thresholds: tuple[float, float],
    width: int,
) -> VerifyResult:
    """Walks trees by one coin a node against the target's mass on its children; as the reference.

    Raises:
        ValueError: two children of one node hold the same token.
    """
    refuse_duplicate_siblings(trees)
    tokens, index = trees.candidates.numpy(), trees.retrive_index.numpy()
    first, sibling = trees.retrive_next_token.numpy(), trees.retrive_next_sibling.numpy()
    batch, num_nodes = tokens.shape
    node_coins, probs = coins[0].numpy(), target_probs.numpy()
    single = np.float32(thresholds[0])
    accumulated = np.maximum(np.float32(thresholds[1]), LOWEST_THRESHOLD)
    predicts = np.full(batch * num_nodes, -1, np.int32)
    accept_index = np.full((batch, width), -1, np.int32)
    accept_index[:, 0] = index[:, 0]
    count = np.zeros(batch, np.int32)
    node = np.zeros(batch, np.int64)
    child = first[:, 0].copy()
    mass = np.zeros(batch, np.float32)
    rejected = np.zeros((batch, num_nodes), np.bool_)
    while True:
        line = np.flatnonzero((child >= 0) & (count < width - 1))
        if not line.size:
            break
        at, tried = node[line], child[line]
        token = tokens[line, tried]
        p = probs[line, at, token]
        mass[line] += p
        taken = (p > 0) & ((node_coins[line, at] < mass[line] / accumulated) | (p >= single))
        lost, won = line[~taken], line[taken]
        rejected[lost, tried[~taken]] = True
        child[lost] = sibling[lost, tried[~taken]]
        predicts[index[won, at[taken]]] = token[taken]
        count[won] += 1
        accept_index[won, count[won]] = index[won, tried[taken]]
        node[won] = tried[taken]
        mass[won] = 0
        rejected[won] = False
        child[won] = first[won, node[won]]
    lines = np.arange(batch)
    left = probs[lines, node].copy()
    line, tried = np.nonzero(rejected)
    left[line, tokens[line, tried]] = 0
    predicts[index[lines, node]] = _pick(left, coins[1].numpy())
    return VerifyResult(
        torch.from_numpy(predicts), torch.from_numpy(accept_index), torch.from_numpy(count)
    )


def refuse_duplicate_siblings(trees: VerifyTrees) -> None:
    """Raises ValueError when two children of one node hold the same token."""
    tokens = trees.candidates.numpy()
    parent = _parents(trees.retrive_next_token.numpy(), trees.retrive_next_sibling.numpy())
    line, node = np.nonzero(parent >= 0)
    edges = np.stack([line, parent[line, node], tokens[line, node]])
    ordered = edges[:, np.lexsort(edges)]
    same = (ordered[:, 1:] == ordered[:, :-1]).all(axis=0)
    if same.any():
        b, at, token = ordered[:, int(np.argmax(same))]
        raise ValueError(f"two children of node {at} of tree {b} hold token {token}")


def chain_speculative_sampling(
    drafts: Tensor,
    num_drafts: Tensor,
    coins: tuple[Tensor, Tensor],
    target_probs: Tensor,
    draft_probs: Tensor,
) -> ChainResult:
    """Accepts drafts one by one, each with probability min(1, p / q); as the reference."""
    p, q = _drafted(drafts, target_probs, draft_probs)
    step_coins = coins[0].numpy()
    with np.errstate(invalid="ignore"):
        passed = (q > 0) & (q <= 1) & (step_coins * q < p)
    passed &= np.arange(drafts.shape[1]) < num_drafts.numpy()[:, None]
    taken = np.cumprod(passed, axis=1).sum(axis=1).astype(np.int64)
    ratio = np.ones(len(taken), np.float32)
    return _finish(drafts, num_drafts, (taken, ratio), coins[1], (target_probs, draft_probs))


def block_speculative_sampling(
    drafts: Tensor,
    num_drafts: Tensor,
    coins: tuple[Tensor, Tensor],
    target_probs: Tensor,
    draft_probs: Tensor,
) -> ChainResult:
    """Accepts the longest block whose joint test succeeds; as the reference."""
    p, q = _drafted(drafts, target_probs, draft_probs)
    batch, num_steps = drafts.shape
    length = num_drafts.numpy().astype(np.int64)
    usable = (q > 0) & (q <= 1)
    ratios = np.ones((batch, num_steps + 1), np.float32)
    for step in range(num_steps):
        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            grown = np.minimum(ratios[:, step] * p[:, step] / q[:, step], np.float32(1))
        ratios[:, step + 1] = np.where(usable[:, step], grown, np.float32(0))
    taken = np.zeros(batch, np.int64)
    for step in range(1, num_steps + 1):
        bar = ratios[:, step].copy()
        line = np.flatnonzero((step < length) & (bar > 0) & (bar < 1))
        if line.size:
            rest = _residual(
                bar[line], target_probs[line, step].numpy(), draft_probs[line, step].numpy()
            )
            total = to_weights(rest).sum(axis=1).astype(np.float64)
            mass = (total / WEIGHT_ONE).astype(np.float32)
            bar[line] = mass / ((mass + np.float32(1)) - bar[line])
        passed = (step <= length) & (coins[0][:, step - 1].numpy() < bar)
        taken = np.where(passed, step, taken)
    ratio = np.take_along_axis(ratios, taken[:, None], 1)[:, 0]
    return _finish(drafts, num_drafts, (taken, ratio), coins[1], (target_probs, draft_probs))


def _drafted(
    drafts: Tensor, target_probs: Tensor, draft_probs: Tensor
) -> tuple[FloatArray, FloatArray]:
    """[batch, S] target and draft probability of every draft."""
    at = drafts.long().unsqueeze(2)
    target = target_probs[:, : drafts.shape[1]].gather(2, at).squeeze(2)
    return target.numpy(), draft_probs.gather(2, at).squeeze(2).numpy()


def _finish(
    drafts: Tensor,
    num_drafts: Tensor,
    accepted: tuple[LongArray, FloatArray],
    final_coins: Tensor,
    probs: tuple[Tensor, Tensor],
) -> ChainResult:
    taken, ratio = accepted
    batch, num_steps = drafts.shape
    lines = np.arange(batch)
    left = probs[0].numpy()[lines, taken]
    line = np.flatnonzero(taken < num_drafts.numpy())
    if line.size:
        left[line] = _residual(ratio[line], left[line], probs[1].numpy()[line, taken[line]])
    padded = np.full((batch, num_steps + 1), -1, np.int32)
    padded[:, :num_steps] = drafts.numpy()
    tokens = np.where(np.arange(num_steps + 1) < taken[:, None], padded, np.int32(-1))
    tokens[lines, taken] = _pick(left, final_coins.numpy())
    return ChainResult(torch.from_numpy(tokens), torch.from_numpy(taken.astype(np.int32)))


def _residual(ratio: FloatArray, target: FloatArray, draft: FloatArray) -> FloatArray:
    usable = np.where((draft >= 0) & (draft <= 1), draft, np.float32(0))
    return np.asarray(np.maximum(ratio[:, None] * target - usable, np.float32(0)), np.float32)


def _pick(probs: FloatArray, uniforms: FloatArray) -> LongArray:
    """[batch]: the first token of each row whose running weight exceeds its coin's share."""
    running = np.cumsum(to_weights(probs), axis=1)
    total = running[:, -1]
    share = (uniforms.astype(np.float64) * total.astype(np.float64)).astype(np.int64)
    bar = np.minimum(share, total - 1)
    token = (running <= bar[:, None]).sum(axis=1)
    return np.asarray(np.where(total > 0, token, probs.shape[1] - 1), np.int64)


def _parents(next_token: LongArray, next_sibling: LongArray) -> LongArray:
    """[batch, N]: parent of each linked node, -1 elsewhere."""
    parent = np.full_like(next_token, -1)
    line, node = np.nonzero(next_token >= 0)
    parent[line, next_token[line, node]] = node
    eldest = np.broadcast_to(np.arange(next_token.shape[1]), next_token.shape).copy()
    line, node = np.nonzero(next_sibling >= 0)
    eldest[line, next_sibling[line, node]] = node
    for _ in range(int(next_token.shape[1]).bit_length()):
        eldest = np.take_along_axis(eldest, eldest, 1)
    return np.asarray(np.take_along_axis(parent, eldest, 1))
