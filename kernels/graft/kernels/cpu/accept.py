"""The walk along the target's own choices, natively where the library was built.

Meaning: graft.kernels.reference.accept, which also serves where there is no library.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from graft.kernels.cpu.choose import Native, native
from graft.kernels.ops import TreeRows
from graft.kernels.reference import accept as plain
from graft.kernels.trees import VerifyResult, VerifyTrees


def accept(trees: TreeRows, chosen: Tensor, by: Native | None = None) -> tuple[Tensor, Tensor]:
    """accept_token_num [trees] and accept_index [trees, width], int32; as the reference.

    Raises:
        ValueError: a tensor is not contiguous int32 of the number of rows.
    """
    num_rows = len(trees.tokens)
    for tensor in (trees.tokens, trees.next_token, trees.next_sibling, chosen):
        if tensor.dtype is not torch.int32 or tensor.shape != (num_rows,):
            raise ValueError(
                f"expected int32 ({num_rows},), got {tensor.dtype} {tuple(tensor.shape)}"
            )
    by = by or native()
    if by is None:
        return plain.accept(trees, chosen)
    num_trees = len(trees.ptr) - 1
    width = max((stop - start for start, stop in pairwise(trees.ptr.tolist())), default=0)
    accept_token_num = torch.empty(num_trees, dtype=torch.int32)
    accept_index = torch.empty((num_trees, width), dtype=torch.int32)
    ready = [
        tensor.contiguous()
        for tensor in (trees.ptr, trees.tokens, trees.next_token, trees.next_sibling, chosen)
    ]
    by.library.graft_accept(
        num_trees,
        *(tensor.data_ptr() for tensor in ready),
        width,
        accept_token_num.data_ptr(),
        accept_index.data_ptr(),
    )
    return accept_token_num, accept_index


def verify_tree_greedy(trees: VerifyTrees, target_predict: Tensor, width: int) -> VerifyResult:
    """The same walk over padded trees, at most width - 1 drafted tokens; as the reference."""
    batch, num_nodes = trees.candidates.shape
    rows = TreeRows(
        ptr=torch.arange(0, batch * num_nodes + 1, num_nodes, dtype=torch.int32),
        tokens=trees.candidates.int().flatten(),
        next_token=trees.retrive_next_token.int().flatten(),
        next_sibling=trees.retrive_next_sibling.int().flatten(),
    )
    wanted = target_predict.int()
    walked, local = accept(rows, wanted.flatten())
    count = walked.clamp(max=width - 1)
    column = torch.arange(width)
    inside = column <= count.unsqueeze(1)
    path = torch.zeros(batch, width, dtype=torch.int64)
    shared = min(width, local.shape[1])
    path[:, :shared] = local[:, :shared].clamp(min=0)
    index = trees.retrive_index.gather(1, path)
    predicts = torch.full((batch * num_nodes,), -1, dtype=torch.int32)
    predicts[index[inside]] = wanted.gather(1, path)[inside]
    accept_index = torch.where(inside, index, -1).int()
    return VerifyResult(predicts, accept_index, count)
