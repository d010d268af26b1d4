"""Accept rules that compare coins with probabilities: target-only, rejection and block.

Knows probabilities that `graft.kernels.gpu.choose.target_probs` made, and coins of their own noise
domains. All sums of probabilities are integer, so the bits are those of
graft.kernels.reference.sample. What that module refuses, duplicate siblings, has to be refused
when a tree is admitted (`graft.common.tree.check`): nothing here waits for the device to look.
"""

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.kernels.gpu import float_math, pick
from graft.kernels.gpu.accept import check_trees, empty_result
from graft.kernels.gpu.spec import KernelSpec, check_device, check_tensor, power_of_two
from graft.kernels.reference.sample import LOWEST_THRESHOLD
from graft.kernels.trees import ChainResult, VerifyResult, VerifyTrees

BLOCK = 2048
WARPS = 8
MAX_STEPS = 16


@triton.jit
def target_only_kernel(
    candidates, retrive_index, next_token, next_sibling, coins, final_coins, target_probs,
    predicts, accept_index, accepted, single, accumulated, num_nodes, width, vocab,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One padded tree; predicts and accept_index come filled with -1."""
    tree = tl.program_id(0)
    first = tree.to(tl.int64) * num_nodes
    path = accept_index + tree.to(tl.int64) * width
    probs_row = target_probs + first * vocab
    here = tl.load(retrive_index + first)
    coin = tl.load(coins + first)
    child = tl.load(next_token + first)
    children = child
    mass = coin * 0.0
    tl.store(path, here.to(tl.int32))
    count = tl.full([], 1, tl.int32)
    steps = tl.full([], 1, tl.int32)
    while (child >= 0) & (steps < num_nodes) & (count < width):
        row = first + child
        token = tl.load(candidates + row)
        p = tl.load(probs_row + token)
        mass += p
        if (p > 0.0) & ((coin < tl.div_rn(mass, accumulated)) | (p >= single)):
            tl.store(predicts + here, token.to(tl.int32))
            here = tl.load(retrive_index + row)
            tl.store(path + count, here.to(tl.int32))
            count += 1
            probs_row = target_probs + row * vocab
            coin = tl.load(coins + row)
            child = tl.load(next_token + row)
            children = child
            mass = coin * 0.0
        else:
            child = tl.load(next_sibling + row)
        steps += 1
    rejected = tl.where(count < width, children, -1)
    bonus = pick.pick(
        probs_row, probs_row, 1.0, 0, candidates + first, next_sibling + first, rejected,
        num_nodes, tl.load(final_coins + tree), vocab, BLOCK,
    )  # fmt: skip
    tl.store(predicts + here, bonus)
    tl.store(accepted + tree, count - 1)


@triton.jit
def _finish_chain(
    drafts, target_probs, draft_probs, taken, length, ratio, final_coins, tokens, accepted,
    num_steps, vocab, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Draws the bonus after `taken` accepted drafts and writes the chain's result."""
    chain = tl.program_id(0).to(tl.int64)
    target_row = target_probs + (chain * (num_steps + 1) + taken) * vocab
    draft_row = draft_probs + (chain * num_steps + taken) * vocab
    draft_end = tl.where(taken < length, vocab, 0)
    nothing_removed = tl.full([], -1, tl.int64)
    bonus = pick.pick(
        target_row, draft_row, ratio, draft_end, drafts, drafts, nothing_removed, 0,
        tl.load(final_coins + chain), vocab, BLOCK,
    )  # fmt: skip
    step = tl.arange(0, STEPS)
    draft = tl.load(drafts + chain * num_steps + step, mask=step < taken, other=-1).to(tl.int32)
    row = tl.where(step == taken, bonus, draft)
    tl.store(tokens + chain * (num_steps + 1) + step, row, mask=step <= num_steps)
    tl.store(accepted + chain, taken)


@triton.jit
def chain_kernel(
    drafts, num_drafts, coins, final_coins, target_probs, draft_probs, tokens, accepted,
    num_steps, vocab, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One chain, draft by draft: accepted while coin * q < p."""
    chain = tl.program_id(0).to(tl.int64)
    length = tl.load(num_drafts + chain).to(tl.int32)
    taken = tl.full([], 0, tl.int32)
    running = length > 0
    while running:
        step = chain * num_steps + taken
        token = tl.load(drafts + step)
        p = tl.load(target_probs + (step + chain) * vocab + token)
        q = tl.load(draft_probs + step * vocab + token)
        if (q > 0.0) & (q <= 1.0) & (tl.load(coins + step) * q < p):
            taken += 1
            running = taken < length
        else:
            running = taken < 0
    _finish_chain(
        drafts, target_probs, draft_probs, taken, length, 1.0, final_coins, tokens, accepted,
        num_steps, vocab, STEPS, BLOCK,
    )  # fmt: skip


@triton.jit
def _block_ratio(drafts, target_probs, draft_probs, chain, steps, num_steps, vocab):
    """min(1, r * p / q) over the first `steps` drafts of a chain."""
    ratio = tl.full([], 1.0, tl.float32)
    for step in range(0, steps):
        place = chain * num_steps + step
        token = tl.load(drafts + place)
        p = tl.load(target_probs + (place + chain) * vocab + token)
        q = tl.load(draft_probs + place * vocab + token)
        usable = (q > 0.0) & (q <= 1.0)
        grown = tl.minimum(tl.div_rn(ratio * p, tl.where(usable, q, 1.0)), 1.0)
        ratio = tl.where(usable, grown, 0.0)
    return ratio


@triton.jit
def block_bars_kernel(
    drafts, num_drafts, target_probs, draft_probs, ratios, bars, num_steps, vocab,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Ratio after `step` drafts of one chain, and the bar that its coin has to stay below.

    Programs: (chain, step - 1).
    """
    chain = tl.program_id(0).to(tl.int64)
    step = tl.program_id(1) + 1
    length = tl.load(num_drafts + chain).to(tl.int32)
    if step <= length:
        ratio = _block_ratio(drafts, target_probs, draft_probs, chain, step, num_steps, vocab)
        bar = ratio
        if (step < length) & (ratio > 0.0) & (ratio < 1.0):
            target_row = target_probs + (chain * (num_steps + 1) + step) * vocab
            draft_row = draft_probs + (chain * num_steps + step) * vocab
            sums = tl.zeros([BLOCK], tl.int64)
            for first in range(0, vocab, BLOCK):
                lane = first + tl.arange(0, BLOCK)
                sums += pick.residual_weights(target_row, draft_row, ratio, vocab, lane, vocab)
            mass = (tl.sum(sums, 0).to(tl.float64) / float_math.WEIGHT_ONE).to(tl.float32)
            bar = tl.div_rn(mass, (mass + 1.0) - ratio)
        tl.store(ratios + chain * num_steps + step - 1, ratio)
        tl.store(bars + chain * num_steps + step - 1, bar)


@triton.jit
def block_kernel(
    drafts, num_drafts, coins, final_coins, target_probs, draft_probs, ratios, bars, tokens,
    accepted, num_steps, vocab, STEPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One chain, longest block first: the first whose coin stays below its bar is accepted."""
    chain = tl.program_id(0).to(tl.int64)
    length = tl.load(num_drafts + chain).to(tl.int32)
    taken = length
    ratio = tl.full([], 1.0, tl.float32)
    running = taken > 0
    while running:
        place = chain * num_steps + taken - 1
        if tl.load(coins + place) < tl.load(bars + place):
            ratio = tl.load(ratios + place)
            running = taken < 0
        else:
            taken -= 1
            running = taken > 0
    _finish_chain(
        drafts, target_probs, draft_probs, taken, length, tl.where(taken < length, ratio, 1.0),
        final_coins, tokens, accepted, num_steps, vocab, STEPS, BLOCK,
    )  # fmt: skip


def tree_speculative_sampling_target_only(
    trees: VerifyTrees,
    coins: tuple[Tensor, Tensor],
    target_probs: Tensor,
    thresholds: tuple[float, float],
    width: int,
) -> VerifyResult:
    """Walks trees by comparing one coin a node with the target's mass on the node's children.

    Shapes:
        trees: [batch, N], int64; children of a node hold distinct tokens, which the caller checks.
        coins: [batch, N] and the final ones [batch], float32.
        target_probs: [batch, N, vocab], float32.
        thresholds: threshold_single, threshold_acc; below 1 the law is lossy.
        width: 1 + the greatest number of drafted tokens that may be accepted.
    Raises:
        ValueError: a shape, dtype, device or layout differs.
    """
    batch, num_nodes = check_trees(trees)
    check_tensor("coins", coins[0], torch.float32, (batch, num_nodes))
    check_tensor("final coins", coins[1], torch.float32, (batch,))
    check_tensor("target_probs", target_probs, torch.float32, (batch, num_nodes, -1))
    device = check_device(candidates=trees.candidates, coins=coins[0], target_probs=target_probs)
    result = empty_result(batch, num_nodes, width, device)
    if batch > 0:
        target_only_kernel[(batch,)](
            *trees, *coins, target_probs, *result, float(np.float32(thresholds[0])),
            float(np.maximum(np.float32(thresholds[1]), LOWEST_THRESHOLD)),
            num_nodes, width, target_probs.shape[2],
            BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return result


def chain_speculative_sampling(
    drafts: Tensor,
    num_drafts: Tensor,
    coins: tuple[Tensor, Tensor],
    target_probs: Tensor,
    draft_probs: Tensor,
) -> ChainResult:
    """Accepts drafts of chains one by one, each with probability min(1, p / q).

    Shapes:
        drafts: [batch, S], int64; num_drafts: [batch], int64, how many of them count.
        coins: [batch, S] and the final ones [batch], float32.
        target_probs: [batch, S + 1, vocab]; draft_probs: [batch, S, vocab], float32.
    Raises:
        ValueError: a shape, dtype, device or layout differs.
    """
    result, sizes = _check_chains(drafts, num_drafts, coins, target_probs, draft_probs)
    if len(drafts) > 0:
        chain_kernel[(len(drafts),)](
            drafts, num_drafts, *coins, target_probs, draft_probs, *result, *sizes,
            STEPS=power_of_two(sizes[0] + 1), BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return result


def block_speculative_sampling(
    drafts: Tensor,
    num_drafts: Tensor,
    coins: tuple[Tensor, Tensor],
    target_probs: Tensor,
    draft_probs: Tensor,
) -> ChainResult:
    """Accepts the longest block of drafts whose joint test succeeds; same law, longer on average.

    Shapes and errors: as `chain_speculative_sampling`.
    """
    result, sizes = _check_chains(drafts, num_drafts, coins, target_probs, draft_probs)
    if len(drafts) > 0:
        ratios, bars = torch.empty(2, *drafts.shape, dtype=torch.float32, device=drafts.device)
        if sizes[0] > 0:
            block_bars_kernel[(len(drafts), sizes[0])](
                drafts, num_drafts, target_probs, draft_probs, ratios, bars, *sizes,
                BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False,
            )  # fmt: skip
        block_kernel[(len(drafts),)](
            drafts, num_drafts, *coins, target_probs, draft_probs, ratios, bars, *result, *sizes,
            STEPS=power_of_two(sizes[0] + 1), BLOCK=BLOCK, num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
    return result


def _check_chains(
    drafts: Tensor,
    num_drafts: Tensor,
    coins: tuple[Tensor, Tensor],
    target_probs: Tensor,
    draft_probs: Tensor,
) -> tuple[ChainResult, tuple[int, int]]:
    """An empty result, and the number of steps and of tokens."""
    check_tensor("drafts", drafts, torch.int64, (-1, -1))
    batch, num_steps = drafts.shape
    check_tensor("num_drafts", num_drafts, torch.int64, (batch,))
    check_tensor("coins", coins[0], torch.float32, (batch, num_steps))
    check_tensor("final coins", coins[1], torch.float32, (batch,))
    check_tensor("target_probs", target_probs, torch.float32, (batch, num_steps + 1, -1))
    vocab = target_probs.shape[2]
    check_tensor("draft_probs", draft_probs, torch.float32, (batch, num_steps, vocab))
    device = check_device(drafts=drafts, target_probs=target_probs, draft_probs=draft_probs)
    tokens = torch.empty(batch, num_steps + 1, dtype=torch.int32, device=device)
    accepted = torch.empty(batch, dtype=torch.int32, device=device)
    return ChainResult(tokens, accepted), (num_steps, vocab)


_CHAIN = "*i64 *i64 *fp32 *fp32 *fp32 *fp32"
SPECS = (
    KernelSpec(
        name="target only",
        kernel=target_only_kernel,
        arguments=f"*i64 *i64 *i64 *i64 *fp32 *fp32 *fp32 *i32 *i32 *i32 fp32 fp32 {'i32 ' * 3}",
        constants={"BLOCK": BLOCK},
        num_warps=WARPS,
    ),
    KernelSpec(
        name="chain rejection",
        kernel=chain_kernel,
        arguments=f"{_CHAIN} *i32 *i32 i32 i32",
        constants={"STEPS": MAX_STEPS, "BLOCK": BLOCK},
        num_warps=WARPS,
    ),
    KernelSpec(
        name="block bars",
        kernel=block_bars_kernel,
        arguments="*i64 *i64 *fp32 *fp32 *fp32 *fp32 i32 i32",
        constants={"BLOCK": BLOCK},
        num_warps=WARPS,
    ),
    KernelSpec(
        name="block rejection",
        kernel=block_kernel,
        arguments=f"{_CHAIN} *fp32 *fp32 *i32 *i32 i32 i32",
        constants={"STEPS": MAX_STEPS, "BLOCK": BLOCK},
        num_warps=WARPS,
    ),
)
