"""Accept rules that compare coins with probabilities: target-only, rejection and block.

Coins and final coins are uniforms of their own noise domains. They must not share bits with the
noise that chose the drafted tokens: shared noise and a ratio test together are biased.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch
from torch import Tensor

from graft.common.tree import FloatArray
from graft.kernels.reference.float_math import WEIGHT_ONE, pick, to_weights
from graft.kernels.trees import ChainResult, VerifyResult, VerifyTrees

LOWEST_THRESHOLD: Final = np.float32(1e-9)


def tree_speculative_sampling_target_only(
    trees: VerifyTrees,
    coins: tuple[Tensor, Tensor],
    target_probs: Tensor,
    thresholds: tuple[float, float],
    width: int,
) -> VerifyResult:
    """Walks trees by comparing one coin a node with the target's mass on the node's children.

    At thresholds 1 the law of the output is the target's. Below, it is lossy: threshold_single
    accepts a reached child of that probability, threshold_acc divides the mass so far.

    Shapes:
        trees: [batch, N]; children of a node hold distinct tokens.
        coins: [batch, N] and the final ones [batch], float32.
        target_probs: [batch, N, vocab], float32.
        thresholds: threshold_single, threshold_acc.
        width: 1 + the greatest number of drafted tokens that may be accepted.
    Raises:
        ValueError: two children of one node hold the same token.
    Source:
        SGLang's TreeSpeculativeSamplingTargetOnly; reference goldens T4 to T6.
    """
    refuse_duplicate_siblings(trees)
    batch, num_nodes = trees.candidates.shape
    node_coins, final_coins = coins
    single = np.float32(thresholds[0])
    accumulated = np.maximum(np.float32(thresholds[1]), LOWEST_THRESHOLD)
    predicts = np.full(batch * num_nodes, -1, np.int32)
    accept_index = np.full((batch, width), -1, np.int32)
    accept_token_num = np.zeros(batch, np.int32)
    for b in range(batch):
        node = 0
        accept_index[b, 0] = trees.retrive_index[b, 0]
        probs = target_probs[b, 0].numpy().copy()
        for step in range(1, width):
            coin = np.float32(node_coins[b, node].item())
            mass = np.float32(0)
            child = int(trees.retrive_next_token[b, node])
            while child >= 0:
                token = int(trees.candidates[b, child])
                p = probs[token]
                mass = mass + p
                if p > 0 and (coin < mass / accumulated or p >= single):
                    break
                probs[token] = 0
                child = int(trees.retrive_next_sibling[b, child])
            if child < 0:
                break
            predicts[int(trees.retrive_index[b, node])] = token
            accept_index[b, step] = trees.retrive_index[b, child]
            accept_token_num[b] += 1
            node = child
            probs = target_probs[b, node].numpy().copy()
        bonus = _pick_token(probs, float(final_coins[b]))
        predicts[int(trees.retrive_index[b, node])] = bonus
    return VerifyResult(
        torch.from_numpy(predicts),
        torch.from_numpy(accept_index),
        torch.from_numpy(accept_token_num),
    )


def refuse_duplicate_siblings(trees: VerifyTrees) -> None:
    """Raises ValueError when two children of one node hold the same token."""
    for b in range(trees.candidates.shape[0]):
        for node in range(trees.candidates.shape[1]):
            seen: set[int] = set()
            child = int(trees.retrive_next_token[b, node])
            while child >= 0:
                token = int(trees.candidates[b, child])
                if token in seen:
                    raise ValueError(f"two children of node {node} of tree {b} hold token {token}")
                seen.add(token)
                child = int(trees.retrive_next_sibling[b, child])


def chain_speculative_sampling(
    drafts: Tensor,
    num_drafts: Tensor,
    coins: tuple[Tensor, Tensor],
    target_probs: Tensor,
    draft_probs: Tensor,
) -> ChainResult:
    """Accepts drafts of chains one by one, each with probability min(1, p / q).

    Shapes:
        drafts: [batch, S]; num_drafts: [batch], how many of them count.
        coins: [batch, S] and the final ones [batch], float32.
        target_probs: [batch, S + 1, vocab]; draft_probs: [batch, S, vocab], float32.
    Source:
        Leviathan et al. 2023; reference golden T7.
    """
    batch, num_steps = drafts.shape
    step_coins, final_coins = coins
    tokens = np.full((batch, num_steps + 1), -1, np.int32)
    accepted = np.zeros(batch, np.int32)
    for b in range(batch):
        taken = 0
        while taken < int(num_drafts[b]):
            token = int(drafts[b, taken])
            p = target_probs[b, taken, token].numpy()
            q = draft_probs[b, taken, token].numpy()
            coin = step_coins[b, taken].numpy()
            if not (0 < q <= 1 and coin * q < p):
                break
            tokens[b, taken] = token
            taken += 1
        left = target_probs[b, taken].numpy()
        if taken < int(num_drafts[b]):
            left = _residual(np.float32(1), left, draft_probs[b, taken].numpy())
        tokens[b, taken] = _pick_token(left, float(final_coins[b]))
        accepted[b] = taken
    return ChainResult(torch.from_numpy(tokens), torch.from_numpy(accepted))


def block_speculative_sampling(
    drafts: Tensor,
    num_drafts: Tensor,
    coins: tuple[Tensor, Tensor],
    target_probs: Tensor,
    draft_probs: Tensor,
) -> ChainResult:
    """Accepts the longest block of drafts whose joint test succeeds; same law, longer on average.

    Shapes: as `chain_speculative_sampling`.
    Source:
        Sun et al. 2024, "Block verification accelerates speculative decoding", algorithm 2.
    """
    batch, num_steps = drafts.shape
    step_coins, final_coins = coins
    tokens = np.full((batch, num_steps + 1), -1, np.int32)
    accepted = np.zeros(batch, np.int32)
    for b in range(batch):
        length = int(num_drafts[b])
        ratios = _block_ratios(drafts[b], length, target_probs[b], draft_probs[b])
        taken = length
        while taken > 0:
            bar = ratios[taken]
            if taken < length and 0 < bar < 1:
                rest = _residual(bar, target_probs[b, taken].numpy(), draft_probs[b, taken].numpy())
                mass = np.float32(float(to_weights(rest).sum()) / WEIGHT_ONE)
                bar = mass / ((mass + np.float32(1)) - bar)
            if step_coins[b, taken - 1].numpy() < bar:
                break
            taken -= 1
        left = target_probs[b, taken].numpy()
        if taken < length:
            left = _residual(ratios[taken], left, draft_probs[b, taken].numpy())
        tokens[b, :taken] = drafts[b, :taken].numpy()
        tokens[b, taken] = _pick_token(left, float(final_coins[b]))
        accepted[b] = taken
    return ChainResult(torch.from_numpy(tokens), torch.from_numpy(accepted))


def _block_ratios(drafts: Tensor, length: int, target: Tensor, draft: Tensor) -> list[np.float32]:
    ratios = [np.float32(1)]
    for step in range(length):
        token = int(drafts[step])
        p, q = target[step, token].numpy(), draft[step, token].numpy()
        if not 0 < q <= 1:
            ratios.append(np.float32(0))
            continue
        with np.errstate(over="ignore"):
            ratios.append(np.minimum(ratios[-1] * p / q, np.float32(1)))
    return ratios


def _residual(ratio: np.float32, target: FloatArray, draft: FloatArray) -> FloatArray:
    usable = np.where((draft >= 0) & (draft <= 1), draft, np.float32(0))
    return np.asarray(np.maximum(ratio * target - usable, np.float32(0)), np.float32)


def _pick_token(probs: FloatArray, uniform: float) -> int:
    token = pick(to_weights(probs), uniform)
    return token if token >= 0 else len(probs) - 1
