"""Links, positions and masks of padded trees, all nodes at once. Knows no model.

Loops run over levels, never over nodes. Meaning: graft.kernels.reference.build_tree.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from graft.common.tree import TreeRefused
from graft.kernels.reference.build_tree import packed_dtype
from graft.kernels.trees import BuiltTrees, DraftResults, Links, MaskMode
from graft.v1.tree_pb2 import TreeRefusal

LongArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


def build_tree(
    bonus: Tensor, draft_tokens: Tensor, parents: Tensor, seq_lens: Tensor, mode: MaskMode
) -> BuiltTrees:
    """What a target forward needs of trees given by their parents; as the reference."""
    links = links_from_parents(parents)
    batch, num_nodes = parents.shape
    tokens = torch.cat([bonus.long().unsqueeze(1), draft_tokens.long()], dim=1)
    positions = seq_lens.long().unsqueeze(1) + links.depth
    return BuiltTrees(
        draft_tokens=tokens.flatten(),
        positions=positions.flatten(),
        retrive_index=torch.arange(batch * num_nodes).reshape(batch, num_nodes),
        retrive_next_token=links.retrive_next_token,
        retrive_next_sibling=links.retrive_next_sibling,
        tree_mask=write_mask(visibility(parents), seq_lens, mode),
    )


def parents_of_candidates(results: DraftResults, topk: int) -> Tensor:
    """[batch, N], int64: parent node of each node; -1 for the root.

    Raises:
        TreeRefused: MALFORMED, when the parent of a node was not picked before it.
    """
    picked = results.top_scores_index.numpy()
    batch, drafted = picked.shape
    rows = picked // topk
    width = results.parent_list.shape[1]
    wanted = np.full_like(picked, -1)
    if width:
        named = np.take_along_axis(results.parent_list.numpy(), np.minimum(rows, width - 1), 1)
        wanted = np.where(rows < width, named, -1)
    earlier = np.tri(drafted, k=-1, dtype=np.bool_)
    found = (picked[:, None, :] == wanted[:, :, None]) & earlier
    orphan = (rows > 0) & ~found.any(axis=2)
    if orphan.any():
        b, i = (int(x) for x in np.argwhere(orphan)[0])
        raise TreeRefused(
            TreeRefusal.TREE_REFUSAL_MALFORMED,
            f"node {i + 1} of tree {b} has candidate {wanted[b, i]} as parent, "
            "which is no earlier node",
        )
    parents = np.full((batch, drafted + 1), -1, np.int64)
    if drafted:
        parents[:, 1:] = np.where(rows > 0, found.argmax(axis=2) + 1, 0)
    return torch.from_numpy(parents)


def links_from_parents(parents: Tensor) -> Links:
    """Depth and child links of [batch, N] parents; siblings keep ascending node order.

    Raises:
        TreeRefused: MALFORMED, when node 0 is not the only root or a parent does not precede.
    """
    parent = parents.long().numpy()
    num_nodes = parent.shape[1]
    index = np.arange(num_nodes)
    bad = np.where(index == 0, parent != -1, (parent < 0) | (parent >= index))
    if bad.any():
        b, i = (int(x) for x in np.argwhere(bad)[0])
        raise TreeRefused(
            TreeRefusal.TREE_REFUSAL_MALFORMED,
            f"node {i} of tree {b} has parent {parent[b, i]}, which does not precede it",
        )
    depth = np.zeros_like(parent)
    for above in _levels_up(parent):
        depth += above >= 0
    next_token = np.full_like(parent, -1)
    next_sibling = np.full_like(parent, -1)
    # Nodes side by side in this order are siblings, unless their parents differ.
    order = np.argsort(parent, axis=1, kind="stable")
    grouped = np.take_along_axis(parent, order, 1)
    same = grouped[:, 1:] == grouped[:, :-1]
    line, place = np.nonzero(same)
    next_sibling[line, order[line, place]] = order[line, place + 1]
    line, place = np.nonzero(~same)
    next_token[line, grouped[line, place + 1]] = order[line, place + 1]
    return Links(
        torch.from_numpy(parent),
        torch.from_numpy(depth),
        torch.from_numpy(next_token),
        torch.from_numpy(next_sibling),
    )


def links_from_mask(mask: Tensor) -> Links:
    """Links of trees given as [batch, N, N] bool ancestor-or-self masks; as the reference.

    Raises:
        TreeRefused: MALFORMED, when a row sees no earlier node or the mask is not the one its
            own parents give.
    """
    num_nodes = mask.shape[1]
    earlier = mask.bool().numpy() & np.tri(num_nodes, k=-1, dtype=np.bool_)
    lonely = ~earlier.any(axis=2)
    lonely[:, 0] = False
    if lonely.any():
        b, i = (int(x) for x in np.argwhere(lonely)[0])
        raise TreeRefused(
            TreeRefusal.TREE_REFUSAL_MALFORMED, f"node {i} of tree {b} sees no earlier node"
        )
    parent = num_nodes - 1 - earlier[:, :, ::-1].argmax(axis=2).astype(np.int64)
    parent[:, 0] = -1
    parents = torch.from_numpy(parent)
    if not torch.equal(visibility(parents), mask.bool()):
        raise TreeRefused(
            TreeRefusal.TREE_REFUSAL_MALFORMED, "the mask is not closed under ancestors"
        )
    return links_from_parents(parents)


def visibility(parents: Tensor) -> Tensor:
    """[batch, N, N], bool: true where column is ancestor-or-self of row."""
    parent = parents.long().numpy()
    batch, num_nodes = parent.shape
    mask = np.zeros((batch, num_nodes, num_nodes), np.bool_)
    mask[:, np.arange(num_nodes), np.arange(num_nodes)] = True
    for above in _levels_up(parent):
        line, node = np.nonzero(above >= 0)
        mask[line, node, above[line, node]] = True
    return torch.from_numpy(mask)


def write_mask(visible: Tensor, seq_lens: Tensor, mode: MaskMode) -> Tensor:
    """The flat mask of [batch, N, N] visibility, in the layouts of the reference."""
    if mode is MaskMode.QLEN_ONLY:
        return visible.flatten()
    seen = visible.numpy()
    batch, num_nodes, _ = seen.shape
    if mode is MaskMode.FULL_MASK:
        lengths = seq_lens.long().numpy()
        sizes = num_nodes * (lengths + num_nodes)
        flat = np.ones(int(sizes.sum()), np.bool_)
        flat[_tree_columns(np.cumsum(sizes) - sizes, lengths, num_nodes)] = seen
        return torch.from_numpy(flat)
    dtype = packed_dtype(num_nodes)
    powers = np.uint32(1) << np.arange(num_nodes, dtype=np.uint32)
    packed = np.where(seen, powers, np.uint32(0)).sum(axis=2, dtype=np.uint32)
    return torch.from_numpy(packed.astype(dtype).reshape(batch * num_nodes))


def pack_flashinfer(visible: Tensor, seq_lens: Tensor) -> tuple[Tensor, Tensor]:
    """FlashInfer's packed custom mask: bytes and their start for each tree; as the reference."""
    seen = visible.numpy()
    batch, num_nodes, _ = seen.shape
    lengths = seq_lens.long().numpy()
    bits = num_nodes * (lengths + num_nodes)
    indptr = np.zeros(batch + 1, np.int32)
    np.cumsum((bits + 7) // 8, out=indptr[1:])
    starts = indptr[:-1].astype(np.int64) * 8
    flat = np.zeros(int(indptr[-1]) * 8, np.bool_)
    flat[np.repeat(starts - (np.cumsum(bits) - bits), bits) + np.arange(int(bits.sum()))] = True
    flat[_tree_columns(starts, lengths, num_nodes)] = seen
    return torch.from_numpy(np.packbits(flat, bitorder="little")), torch.from_numpy(indptr)


def _levels_up(parent: LongArray) -> list[LongArray]:
    """Each node's ancestors one, two, ... levels up, -1 above the root, until none is left."""
    levels = []
    above = parent
    while (above >= 0).any():
        levels.append(above)
        above = np.where(above >= 0, np.take_along_axis(parent, np.maximum(above, 0), 1), -1)
    return levels


def _tree_columns(starts: LongArray, lengths: LongArray, num_nodes: int) -> LongArray:
    """[batch, N, N]: flat places of the tree's own columns, trees starting at `starts`."""
    row = np.arange(num_nodes)[None, :, None]
    column = np.arange(num_nodes)[None, None, :]
    width = (lengths + num_nodes)[:, None, None]
    return np.asarray(starts[:, None, None] + row * width + lengths[:, None, None] + column)
