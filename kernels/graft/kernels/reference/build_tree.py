"""Links, positions and masks of padded trees, one node after the other. Knows no model.

The same trees come in three ways: as picked candidates (`parents_of_candidates`), as parents
(`links_from_parents`), or as an ancestor mask (`links_from_mask`). `build_tree` makes from their
parents what a target forward needs.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from graft.common.tree import TreeRefused
from graft.kernels.trees import MAX_PACKED_NODES, BuiltTrees, DraftResults, Links, MaskMode
from graft.v1.tree_pb2 import TreeRefusal


def build_tree(
    bonus: Tensor, draft_tokens: Tensor, parents: Tensor, seq_lens: Tensor, mode: MaskMode
) -> BuiltTrees:
    """What a target forward needs of trees given by their parents.

    Shapes:
        bonus: [batch]; draft_tokens: [batch, N - 1]; seq_lens: [batch].
        parents: [batch, N], -1 for the root, otherwise below the node's own index.
    Raises:
        TreeRefused: MALFORMED, when a parent does not precede its child.
        ValueError: more nodes than a packed mask can hold.
    Source:
        SGLang's build_tree_kernel_efficient.
    """
    links = links_from_parents(parents)
    batch, num_nodes = parents.shape
    tokens = torch.cat([bonus.long().unsqueeze(1), draft_tokens.long()], dim=1)
    positions = seq_lens.long().unsqueeze(1) + links.depth
    index = torch.arange(batch * num_nodes, dtype=torch.int64).reshape(batch, num_nodes)
    return BuiltTrees(
        draft_tokens=tokens.flatten(),
        positions=positions.flatten(),
        retrive_index=index,
        retrive_next_token=links.retrive_next_token,
        retrive_next_sibling=links.retrive_next_sibling,
        tree_mask=write_mask(visibility(parents), seq_lens, mode),
    )


def parents_of_candidates(results: DraftResults, topk: int) -> Tensor:
    """[batch, N], int64: parent node of each node; -1 for the root.

    The picked candidates of a tree are distinct and parents come first; any such order will do.

    Raises:
        TreeRefused: MALFORMED, when the parent of a node was not picked before it.
    """
    batch, drafted = results.top_scores_index.shape
    parents = torch.full((batch, drafted + 1), -1, dtype=torch.int64)
    for b in range(batch):
        place: dict[int, int] = {}
        for i, candidate in enumerate(results.top_scores_index[b].tolist()):
            row = candidate // topk
            if row == 0:
                parents[b, i + 1] = 0
            else:
                known = row < results.parent_list.shape[1]
                wanted = int(results.parent_list[b, row]) if known else -1
                if wanted not in place:
                    raise TreeRefused(
                        TreeRefusal.TREE_REFUSAL_MALFORMED,
                        f"node {i + 1} of tree {b} has candidate {wanted} as parent, "
                        "which is no earlier node",
                    )
                parents[b, i + 1] = place[wanted]
            place[candidate] = i + 1
    return parents


def links_from_parents(parents: Tensor) -> Links:
    """Depth and child links of [batch, N] parents; siblings keep ascending node order.

    Raises:
        TreeRefused: MALFORMED, when node 0 is not the only root or a parent does not precede.
    """
    batch, num_nodes = parents.shape
    depth = np.zeros((batch, num_nodes), np.int64)
    next_token = np.full((batch, num_nodes), -1, np.int64)
    next_sibling = np.full((batch, num_nodes), -1, np.int64)
    for b in range(batch):
        for node in range(num_nodes):
            parent = int(parents[b, node])
            if not (parent == -1 if node == 0 else 0 <= parent < node):
                raise TreeRefused(
                    TreeRefusal.TREE_REFUSAL_MALFORMED,
                    f"node {node} of tree {b} has parent {parent}, which does not precede it",
                )
            if node > 0:
                depth[b, node] = depth[b, parent] + 1
        for node in range(num_nodes - 1, 0, -1):
            parent = int(parents[b, node])
            next_sibling[b, node] = next_token[b, parent]
            next_token[b, parent] = node
    return Links(
        parents.long(),
        torch.from_numpy(depth),
        torch.from_numpy(next_token),
        torch.from_numpy(next_sibling),
    )


def links_from_mask(mask: Tensor) -> Links:
    """Links of trees given as [batch, N, N] bool, true where column is ancestor-or-self of row.

    A node's parent is its largest earlier ancestor.

    Raises:
        TreeRefused: MALFORMED, when a row sees no earlier node or the mask is not the one its
            own parents give.
    """
    batch, num_nodes, _ = mask.shape
    parents = torch.full((batch, num_nodes), -1, dtype=torch.int64)
    for b in range(batch):
        for node in range(1, num_nodes):
            earlier = [j for j in range(node) if bool(mask[b, node, j])]
            if not earlier:
                raise TreeRefused(
                    TreeRefusal.TREE_REFUSAL_MALFORMED,
                    f"node {node} of tree {b} sees no earlier node",
                )
            parents[b, node] = earlier[-1]
    if not torch.equal(visibility(parents), mask.bool()):
        raise TreeRefused(
            TreeRefusal.TREE_REFUSAL_MALFORMED, "the mask is not closed under ancestors"
        )
    return links_from_parents(parents)


def visibility(parents: Tensor) -> Tensor:
    """[batch, N, N], bool: true where column is ancestor-or-self of row."""
    batch, num_nodes = parents.shape
    mask = torch.zeros(batch, num_nodes, num_nodes, dtype=torch.bool)
    for b in range(batch):
        for node in range(num_nodes):
            ancestor = node
            while ancestor >= 0:
                mask[b, node, ancestor] = True
                ancestor = int(parents[b, ancestor])
    return mask


def write_mask(visible: Tensor, seq_lens: Tensor, mode: MaskMode) -> Tensor:
    """The flat mask of [batch, N, N] visibility.

    FULL_MASK: bool, N rows of seq_len + N columns a tree, prefix columns true.
    QLEN_ONLY: bool, [batch * N * N].
    QLEN_ONLY_BITPACKING: [batch * N], uint8, uint16 or uint32 by N; bit j of a row is column j.
    """
    batch, num_nodes, _ = visible.shape
    if mode is MaskMode.QLEN_ONLY:
        return visible.flatten()
    if mode is MaskMode.FULL_MASK:
        blocks = [
            torch.cat([torch.ones(num_nodes, length, dtype=torch.bool), visible[b]], dim=1)
            for b, length in enumerate(seq_lens.tolist())
        ]
        return torch.cat([block.flatten() for block in blocks])
    packed = np.zeros((batch, num_nodes), packed_dtype(num_nodes))
    for b in range(batch):
        for node in range(num_nodes):
            bits = sum(1 << j for j in range(num_nodes) if bool(visible[b, node, j]))
            packed[b, node] = bits
    return torch.from_numpy(packed.reshape(-1))


def packed_dtype(num_nodes: int) -> type[np.unsignedinteger]:
    """The integer that holds one row of a packed mask.

    Raises:
        ValueError: more than MAX_PACKED_NODES nodes.
    """
    if num_nodes > MAX_PACKED_NODES:
        raise ValueError(f"a packed row holds {MAX_PACKED_NODES} nodes, got {num_nodes}")
    return np.uint8 if num_nodes <= 8 else np.uint16 if num_nodes <= 16 else np.uint32


def pack_flashinfer(visible: Tensor, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
    """FlashInfer's packed custom mask: bytes and their start for each tree.

    The FULL_MASK bits of a tree, flat and row by row, lowest bit first, each tree padded to a
    whole byte.

    Shapes:
        returns: [bytes], uint8, and [batch + 1], int32.
    """
    pieces = []
    indptr = [0]
    for b, length in enumerate(seq_lens.tolist()):
        prefix = torch.ones(visible.shape[1], length, dtype=torch.bool)
        bits = torch.cat([prefix, visible[b]], dim=1).flatten().numpy()
        pieces.append(np.packbits(bits, bitorder="little"))
        indptr.append(indptr[-1] + len(pieces[-1]))
    joined = np.concatenate(pieces) if pieces else np.zeros(0, np.uint8)
    return torch.from_numpy(joined), torch.tensor(indptr, dtype=torch.int32)
