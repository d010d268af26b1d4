"""Walks trees along the target's choices, one program a tree. Knows links and tokens, no logits.

A walk is a chase of scalar loads through lines that the first steps have brought in, so one warp
does it; trees run side by side. The meaning: graft.kernels.reference.accept.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.kernels.gpu.spec import KernelSpec, check_device, check_tensor
from graft.kernels.ops import TreeRows
from graft.kernels.trees import VerifyResult, VerifyTrees

FILL = 128


@triton.jit
def fill_none(start, count, end, FILL: tl.constexpr):
    """Writes -1 to entries count .. end - 1 from pointer start."""
    while count < end:
        place = count + tl.arange(0, FILL)
        tl.store(start + place, tl.full([FILL], -1, tl.int32), mask=place < end)
        count += FILL


@triton.jit
def accept_kernel(
    ptr, tokens, next_token, next_sibling, chosen, accepted, index, width, FILL: tl.constexpr
):
    """One ragged tree: number of accepted nodes and their path.

    A walk takes at most as many steps as the tree has nodes, whatever the links say.
    """
    tree = tl.program_id(0)
    first = tl.load(ptr + tree)
    nodes = tl.load(ptr + tree + 1) - first
    path = index + tree.to(tl.int64) * width
    count = tl.full([], 0, tl.int32)
    if nodes > 0:
        tl.store(path, 0)
        count += 1
        wanted = tl.load(chosen + first)
        child = tl.load(next_token + first)
        steps = tl.full([], 1, tl.int32)
        while (child >= 0) & (child < nodes) & (steps < nodes) & (count < width):
            row = first + child
            if (tl.load(tokens + row) == wanted) & (wanted >= 0):
                tl.store(path + count, child)
                count += 1
                wanted = tl.load(chosen + row)
                child = tl.load(next_token + row)
            else:
                child = tl.load(next_sibling + row)
            steps += 1
    tl.store(accepted + tree, tl.maximum(count - 1, 0))
    fill_none(path, count, width, FILL)


@triton.jit
def verify_tree_greedy_kernel(
    candidates, retrive_index, next_token, next_sibling, target_predict,
    predicts, accept_index, accepted, num_nodes, width,
):  # fmt: skip
    """One padded tree; predicts and accept_index come filled with -1."""
    tree = tl.program_id(0)
    first = tree.to(tl.int64) * num_nodes
    path = accept_index + tree.to(tl.int64) * width
    here = tl.load(retrive_index + first)
    wanted = tl.load(target_predict + first)
    child = tl.load(next_token + first)
    tl.store(path, here.to(tl.int32))
    count = tl.full([], 1, tl.int32)
    steps = tl.full([], 1, tl.int32)
    while (child >= 0) & (steps < num_nodes) & (count < width):
        row = first + child
        if tl.load(candidates + row) == wanted:
            tl.store(predicts + here, wanted.to(tl.int32))
            here = tl.load(retrive_index + row)
            tl.store(path + count, here.to(tl.int32))
            count += 1
            wanted = tl.load(target_predict + row)
            child = tl.load(next_token + row)
        else:
            child = tl.load(next_sibling + row)
        steps += 1
    tl.store(predicts + here, wanted.to(tl.int32))
    tl.store(accepted + tree, count - 1)


def accept(trees: TreeRows, chosen: Tensor, width: int | None = None) -> tuple[Tensor, Tensor]:
    """The deepest path whose every node is the target's choice at its parent.

    Shapes:
        chosen: [rows], int32, the target's token after each row; -1 matches nothing.
        width: longest path returned, the root included. None takes the number of rows: the size
            of the largest tree is on the device, and is not waited for.
        returns: accept_token_num [trees] and accept_index [trees, width], int32.
    Raises:
        ValueError: a shape, dtype, device or layout differs from the contract.
    """
    check_tensor("ptr", trees.ptr, torch.int32, (-1,))
    num_rows = chosen.shape[0]
    for name in ("tokens", "next_token", "next_sibling"):
        check_tensor(name, getattr(trees, name), torch.int32, (num_rows,))
    check_tensor("chosen", chosen, torch.int32, (num_rows,))
    device = check_device(ptr=trees.ptr, tokens=trees.tokens, chosen=chosen)
    num_trees = trees.ptr.numel() - 1
    columns = num_rows if width is None else width
    accepted = torch.empty(num_trees, dtype=torch.int32, device=device)
    index = torch.empty(num_trees, columns, dtype=torch.int32, device=device)
    if num_trees > 0:
        accept_kernel[(num_trees,)](
            trees.ptr, trees.tokens, trees.next_token, trees.next_sibling, chosen, accepted, index,
            columns, FILL=FILL, num_warps=1,
        )  # fmt: skip
    return accepted, index


def verify_tree_greedy(trees: VerifyTrees, target_predict: Tensor, width: int) -> VerifyResult:
    """The same walk over padded trees, at most width - 1 drafted tokens.

    Shapes:
        trees: [batch, N], int64; target_predict: [batch, N], int64.
        returns: predicts [batch * N], accept_index [batch, width], accept_token_num [batch].
    Raises:
        ValueError: a shape, dtype, device or layout differs.
    """
    batch, num_nodes = check_trees(trees)
    check_tensor("target_predict", target_predict, torch.int64, (batch, num_nodes))
    device = check_device(candidates=trees.candidates, target_predict=target_predict)
    result = empty_result(batch, num_nodes, width, device)
    if batch > 0:
        verify_tree_greedy_kernel[(batch,)](
            *trees, target_predict, *result, num_nodes, width, num_warps=1
        )
    return result


def check_trees(trees: VerifyTrees) -> tuple[int, int]:
    """Batch and node count of padded trees.

    Raises:
        ValueError: the tensors are not all [batch, N], int64, contiguous, on one device.
    """
    check_tensor("candidates", trees.candidates, torch.int64, (-1, -1))
    batch, num_nodes = trees.candidates.shape
    for name, tensor in zip(trees._fields, trees, strict=True):
        check_tensor(name, tensor, torch.int64, (batch, num_nodes))
    check_device(**trees._asdict())
    return batch, num_nodes


def empty_result(batch: int, num_nodes: int, width: int, device: torch.device) -> VerifyResult:
    """A result with -1 everywhere and nothing accepted."""
    flat = torch.full(
        (batch * num_nodes + batch * width + batch,), -1, dtype=torch.int32, device=device
    )
    predicts, index, accepted = flat.split([batch * num_nodes, batch * width, batch])
    return VerifyResult(predicts, index.view(batch, width), accepted.zero_())


SPECS = (
    KernelSpec(
        name="accept",
        kernel=accept_kernel,
        arguments="*i32 *i32 *i32 *i32 *i32 *i32 *i32 i32",
        constants={"FILL": FILL},
        num_warps=1,
    ),
    KernelSpec(
        name="verify tree greedy",
        kernel=verify_tree_greedy_kernel,
        arguments="*i64 *i64 *i64 *i64 *i64 *i32 *i32 *i32 i32 i32",
        num_warps=1,
    ),
)
