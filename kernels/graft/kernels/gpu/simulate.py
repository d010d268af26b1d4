"""Simulated acceptance for benchmarks: accept lengths drawn from a law instead of decided.

The text it gives means nothing. The meaning and the values: graft.kernels.reference.simulate.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.common.noise import Domain
from graft.kernels.gpu import noise
from graft.kernels.gpu.accept import check_trees
from graft.kernels.gpu.spec import KernelSpec, check_device, check_tensor, power_of_two
from graft.kernels.reference.simulate import (
    FIXED_TOKEN,
    SimulatedMethod,
    SimulatedTokens,
    Simulation,
)
from graft.kernels.trees import VerifyResult, VerifyTrees

SESSIONS = 128

SIMULATE = tl.constexpr(int(Domain.SIMULATE))
FIXED = tl.constexpr(FIXED_TOKEN)


@triton.jit
def simulated_lengths_kernel(
    seeds, positions, wanted, lengths, low, bar, width, batch,
    MATCH_EXPECTED: tl.constexpr, SESSIONS: tl.constexpr,
):  # fmt: skip
    """Accept lengths of some sessions.

    MATCH_EXPECTED adds one to low where a 23-bit draw is below bar. Otherwise wanted, one
    float64, plus a sum of twelve uniforms less 6 is rounded and clamped to 1 .. width.
    """
    session = tl.program_id(0) * SESSIONS + tl.arange(0, SESSIONS)
    inside = session < batch
    seed = tl.load(seeds + session, mask=inside, other=0)
    position = tl.load(positions + session, mask=inside, other=0).to(tl.uint32)
    zero = position * 0
    if MATCH_EXPECTED:
        w0, _, _, _ = tl.philox(seed, zero, position, zero, zero + SIMULATE)
        length = low + ((w0 >> 9).to(tl.int32) < bar).to(tl.int32)
    else:
        ticks = tl.zeros([SESSIONS], tl.int64)
        for quad in tl.static_range(3):
            w0, w1, w2, w3 = tl.philox(seed, zero + quad, position, zero, zero + SIMULATE)
            ticks += (w0 >> 9).to(tl.int64) + (w1 >> 9).to(tl.int64)
            ticks += (w2 >> 9).to(tl.int64) + (w3 >> 9).to(tl.int64)
        normal = (ticks + 6).to(tl.float64) * noise.UNIFORM_STEP - 6.0
        drawn = tl.floor(tl.load(wanted) + normal + 0.5).to(tl.int32)
        length = tl.minimum(tl.maximum(drawn, 1), width)
    tl.store(lengths + session, length, mask=inside)


@triton.jit
def simulate_accept_kernel(
    candidates, target_predict, lengths, predicts, accept_index, accepted, num_nodes, width,
    FIXED_TOKENS: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """One session: its first `length` nodes are accepted, whatever they hold."""
    session = tl.program_id(0).to(tl.int64)
    length = tl.load(lengths + session)
    node = tl.arange(0, NODES)
    row = session * num_nodes
    if FIXED_TOKENS:
        token = tl.full([NODES], FIXED, tl.int64)
    else:
        drafted = node + 1 < tl.minimum(length, num_nodes)
        token = tl.load(candidates + row + node + 1, mask=drafted, other=-1)
        bonus = tl.load(target_predict + row + length - 1)
        token = tl.where(node == length - 1, bonus, token)
    token = tl.where(node < length, token, -1).to(tl.int32)
    tl.store(predicts + row + node, token, mask=node < num_nodes)
    index = tl.where(node < length, row + node, -1).to(tl.int32)
    tl.store(accept_index + session * width + node, index, mask=node < width)
    tl.store(accepted + session, length - 1)


def simulated_lengths(
    simulation: Simulation, seeds: Tensor, positions: Tensor, width: int
) -> Tensor:
    """Accept lengths in 1 .. width, bonus included.

    Shapes:
        seeds: [batch], int64 bits of unsigned seeds; positions: [batch], int32.
        returns: [batch], int32.
    Raises:
        ValueError: a shape, dtype, device or layout differs.
    """
    batch = seeds.numel()
    check_tensor("seeds", seeds, torch.int64, (batch,))
    check_tensor("positions", positions, torch.int32, (batch,))
    device = check_device(seeds=seeds, positions=positions)
    lengths = torch.empty(batch, dtype=torch.int32, device=device)
    if batch > 0:
        expected = min(simulation.accept_length, float(width))
        low = math.floor(expected)
        wanted = torch.full((1,), simulation.accept_length, dtype=torch.float64, device=device)
        simulated_lengths_kernel[(-(-batch // SESSIONS),)](
            seeds, positions, wanted, lengths, low, _bar(expected - low), width, batch,
            MATCH_EXPECTED=simulation.method is SimulatedMethod.MATCH_EXPECTED,
            SESSIONS=SESSIONS, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return lengths


def simulate_accept(
    simulation: Simulation, trees: VerifyTrees, target_predict: Tensor, lengths: Tensor, width: int
) -> VerifyResult:
    """The result of a verify step that accepted `lengths`, the first nodes of each row.

    Shapes: as `verify_tree_greedy`; lengths: [batch], int32, in 1 .. min(width, N).
    Raises:
        ValueError: a shape, dtype, device or layout differs.
    """
    batch, num_nodes = check_trees(trees)
    check_tensor("target_predict", target_predict, torch.int64, (batch, num_nodes))
    check_tensor("lengths", lengths, torch.int32, (batch,))
    device = check_device(candidates=trees.candidates, lengths=lengths)
    result = VerifyResult(
        torch.empty(batch * num_nodes, dtype=torch.int32, device=device),
        torch.empty(batch, width, dtype=torch.int32, device=device),
        torch.empty(batch, dtype=torch.int32, device=device),
    )
    if batch > 0:
        simulate_accept_kernel[(batch,)](
            trees.candidates, target_predict, lengths, *result, num_nodes, width,
            FIXED_TOKENS=simulation.tokens is SimulatedTokens.FIXED,
            NODES=power_of_two(max(num_nodes, width)), num_warps=1,
        )  # fmt: skip
    return result


def _bar(share: float) -> int:
    """Number of 23-bit draws w whose uniform (w + 0.5) * 2^-23 is below share."""
    return max(0, math.ceil(share * 2.0**23 - 0.5))


SPECS = (
    *(
        KernelSpec(
            name=f"simulated lengths {name}",
            kernel=simulated_lengths_kernel,
            arguments="*i64 *i32 *fp64 *i32 i32 i32 i32 i32",
            constants={"MATCH_EXPECTED": matched, "SESSIONS": SESSIONS},
        )
        for name, matched in (("expected", True), ("multinomial", False))
    ),
    *(
        KernelSpec(
            name=f"simulate accept {name}",
            kernel=simulate_accept_kernel,
            arguments="*i64 *i64 *i32 *i32 *i32 *i32 i32 i32",
            constants={"FIXED_TOKENS": fixed, "NODES": SESSIONS},
            num_warps=1,
        )
        for name, fixed in (("fixed", True), ("drafts", False))
    ),
)
