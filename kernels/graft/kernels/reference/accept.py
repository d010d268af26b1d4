"""The walk from the root along the target's own choices: the meaning of `Ops.accept`."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from graft.kernels.ops import TreeRows
from graft.kernels.trees import VerifyResult, VerifyTrees


def accept(trees: TreeRows, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """The deepest path whose every node is the target's choice at its parent.

    Shapes:
        trees: ragged, local links; -1 is none.
        chosen: [rows], int32, the target's token after each row; -1 matches nothing.
        returns: accept_token_num [trees] and accept_index [trees, width], int32, where width is
            the number of nodes of the largest tree, and -1 follows the end of a path.
    Source:
        SpecInfer's tree walk (Miao et al. 2023), greedy case.
    """
    ptr = trees.ptr.tolist()
    num_trees = len(ptr) - 1
    width = max((ptr[i + 1] - ptr[i] for i in range(num_trees)), default=0)
    accept_token_num = np.zeros(num_trees, np.int32)
    accept_index = np.full((num_trees, width), -1, np.int32)
    for i in range(num_trees):
        start = ptr[i]
        if ptr[i + 1] == start:
            continue
        node = 0
        path = [node]
        while True:
            child = _matching_child(trees, start, node, int(chosen[start + node]))
            if child < 0:
                break
            node = child
            path.append(node)
        accept_token_num[i] = len(path) - 1
        accept_index[i, : len(path)] = path
    return torch.from_numpy(accept_token_num), torch.from_numpy(accept_index)


def verify_tree_greedy(trees: VerifyTrees, target_predict: Tensor, width: int) -> VerifyResult:
    """The same walk over padded trees, at most width - 1 drafted tokens.

    Shapes:
        trees: [batch, N], int64.
        target_predict: [batch, N], the target's token after each node.
        returns: predicts [batch * N], accept_index [batch, width], accept_token_num [batch].
    """
    batch, num_nodes = trees.candidates.shape
    predicts = np.full(batch * num_nodes, -1, np.int32)
    accept_index = np.full((batch, width), -1, np.int32)
    accept_token_num = np.zeros(batch, np.int32)
    for b in range(batch):
        node = 0
        accept_index[b, 0] = trees.retrive_index[b, 0]
        for step in range(1, width):
            wanted = int(target_predict[b, node])
            child = int(trees.retrive_next_token[b, node])
            while child >= 0 and int(trees.candidates[b, child]) != wanted:
                child = int(trees.retrive_next_sibling[b, child])
            if child < 0:
                break
            predicts[int(trees.retrive_index[b, node])] = wanted
            accept_index[b, step] = trees.retrive_index[b, child]
            accept_token_num[b] += 1
            node = child
        predicts[int(trees.retrive_index[b, node])] = target_predict[b, node]
    return VerifyResult(
        torch.from_numpy(predicts),
        torch.from_numpy(accept_index),
        torch.from_numpy(accept_token_num),
    )


def _matching_child(trees: TreeRows, start: int, node: int, wanted: int) -> int:
    if wanted < 0:
        return -1
    child = int(trees.next_token[start + node])
    while child >= 0 and int(trees.tokens[start + child]) != wanted:
        child = int(trees.next_sibling[start + child])
    return child
