"""Links, positions and masks of padded trees, all nodes at once. Knows no model.

The meaning: graft.kernels.reference.build_tree. What the reference refuses is on the device here
and is not waited for: a node whose parent does not precede it stays unlinked, sees itself alone
and can never be accepted; `malformed` tells which trees hold one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.kernels.gpu.masks import write_mask
from graft.kernels.gpu.spec import KernelSpec, check_device, check_tensor
from graft.kernels.trees import BuiltTrees, DraftResults, Links, MaskMode

ROWS = 64
COLUMNS = 32

NONE = tl.constexpr(2**31 - 1)


@triton.jit
def parents_kernel(
    parent_list, selected, parents, topk, list_width, num_nodes,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Parent nodes of some nodes of one tree: where the parent's candidate was picked.

    Programs: (tree, rows). The parent of candidate c is the root if c // topk is 0, otherwise
    the node that has candidate parent_list[c // topk]; -1 if no earlier node has.
    """
    tree = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    picked = selected + tree * (num_nodes - 1)
    drafted = (node > 0) & (node < num_nodes)
    entry = tl.load(picked + node - 1, mask=drafted, other=0) // topk
    listed = drafted & (entry > 0) & (entry < list_width)
    wanted = tl.load(parent_list + tree * list_width + entry, mask=listed, other=-1)
    found = tl.full([ROWS], NONE, tl.int32)
    for start in range(1, num_nodes, COLUMNS):
        other = start + tl.arange(0, COLUMNS)
        candidate = tl.load(picked + other - 1, mask=other < num_nodes, other=-2)
        match = (candidate[None, :] == wanted[:, None]) & (other[None, :] < node[:, None])
        found = tl.minimum(found, tl.min(tl.where(match, other[None, :], NONE), 1))
    parent = tl.where(listed & (found < NONE), found, -1)
    parent = tl.where(drafted & (entry == 0), 0, parent)
    tl.store(parents + tree * num_nodes + node, parent.to(tl.int64), mask=node < num_nodes)


@triton.jit
def _parent_of(parents_row, node, num_nodes):
    """Parent of each node, -1 for the root and where the given one does not precede."""
    parent = tl.load(
        parents_row + node, mask=(node > 0) & (node < num_nodes), other=-1
    ).to(tl.int32)  # fmt: skip
    return tl.where((parent >= 0) & (parent < node), parent, -1)


@triton.jit
def links_kernel(
    parents, seq_lens, bonus, drafted, depth, next_token, next_sibling, tokens, positions, index,
    visible, num_nodes, BUILD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Depth, links and visibility of some nodes of one tree; with BUILD tokens and positions too.

    Programs: (tree, rows). visible comes filled with zeros.
    """
    tree = tl.program_id(0).to(tl.int64)
    node = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = node < num_nodes
    parents_row = parents + tree * num_nodes
    parent = _parent_of(parents_row, node, num_nodes)
    child = tl.full([ROWS], NONE, tl.int32)
    sibling = tl.full([ROWS], NONE, tl.int32)
    for start in range(1, num_nodes, COLUMNS):
        other = start + tl.arange(0, COLUMNS)
        theirs = _parent_of(parents_row, other, num_nodes)
        number = tl.where(theirs >= 0, other, NONE)[None, :]
        mine = theirs[None, :] == node[:, None]
        child = tl.minimum(child, tl.min(tl.where(mine, number, NONE), 1))
        beside = (theirs[None, :] == parent[:, None]) & (other[None, :] > node[:, None])
        sibling = tl.minimum(sibling, tl.min(tl.where(beside, number, NONE), 1))
    child = tl.where(child < NONE, child, -1)
    sibling = tl.where(sibling < NONE, sibling, -1)
    level = tl.zeros([ROWS], tl.int32)
    here = tl.where(inside, node, -1)
    sees = visible + (tree * num_nodes + node) * num_nodes
    while tl.max(here, 0) >= 0:
        tl.store(sees + here, tl.full([ROWS], 1, tl.int8), mask=here >= 0)
        here = tl.where(here >= 0, _parent_of(parents_row, here, num_nodes), -1)
        level += (here >= 0).to(tl.int32)
    place = tree * num_nodes + node
    tl.store(depth + place, level.to(tl.int64), mask=inside)
    tl.store(next_token + place, child.to(tl.int64), mask=inside)
    tl.store(next_sibling + place, sibling.to(tl.int64), mask=inside)
    if BUILD:
        drafts = drafted + tree * (num_nodes - 1) + node - 1
        token = tl.load(drafts, mask=inside & (node > 0), other=0)
        token = tl.where(node == 0, tl.load(bonus + tree), token)
        tl.store(tokens + place, token, mask=inside)
        tl.store(positions + place, tl.load(seq_lens + tree) + level, mask=inside)
        tl.store(index + place, place, mask=inside)


def build_tree(
    bonus: Tensor,
    draft_tokens: Tensor,
    parents: Tensor,
    seq_lens: Tensor,
    mode: MaskMode,
    mask_length: int | None = None,
) -> BuiltTrees:
    """What a target forward needs of trees given by their parents.

    Shapes:
        bonus: [batch]; draft_tokens: [batch, N - 1]; seq_lens: [batch]. All int64.
        parents: [batch, N], int64, -1 for the root, otherwise below the node's own index.
        mask_length: entries of a FULL_MASK, N * (sum of seq_lens + batch * N). None reads the sum
            from the device, and waits for it.
    Raises:
        ValueError: a shape, dtype, device or layout differs, or more nodes than a packed mask
            can hold.
    """
    check_tensor("parents", parents, torch.int64, (-1, -1))
    batch, num_nodes = parents.shape
    check_tensor("bonus", bonus, torch.int64, (batch,))
    check_tensor("draft_tokens", draft_tokens, torch.int64, (batch, num_nodes - 1))
    check_tensor("seq_lens", seq_lens, torch.int64, (batch,))
    check_device(bonus=bonus, draft_tokens=draft_tokens, parents=parents, seq_lens=seq_lens)
    flat = torch.empty(6, batch, num_nodes, dtype=torch.int64, device=parents.device)
    _, next_token, next_sibling, tokens, positions, index = flat
    visible = _link(parents, (seq_lens, bonus, draft_tokens), tuple(flat))
    return BuiltTrees(
        draft_tokens=tokens.view(-1),
        positions=positions.view(-1),
        retrive_index=index,
        retrive_next_token=next_token,
        retrive_next_sibling=next_sibling,
        tree_mask=write_mask(visible, seq_lens, mode, mask_length),
    )


def parents_of_candidates(results: DraftResults, topk: int) -> Tensor:
    """[batch, N], int64: parent node of each node; -1 for the root and for a node without one.

    Raises:
        ValueError: a shape, dtype, device or layout differs.
    """
    selected, parent_list = results.top_scores_index, results.parent_list
    check_tensor("top_scores_index", selected, torch.int64, (-1, -1))
    batch, drafted = selected.shape
    check_tensor("parent_list", parent_list, torch.int64, (batch, -1))
    check_device(top_scores_index=selected, parent_list=parent_list)
    num_nodes = drafted + 1
    parents = torch.empty(batch, num_nodes, dtype=torch.int64, device=selected.device)
    if batch > 0:
        parents_kernel[(batch, -(-num_nodes // ROWS))](
            parent_list, selected, parents, topk, parent_list.shape[1], num_nodes,
            ROWS=ROWS, COLUMNS=COLUMNS, num_warps=2,
        )  # fmt: skip
    return parents


def links_from_parents(parents: Tensor) -> Links:
    """Depth and child links of [batch, N] parents, int64; siblings keep ascending node order."""
    check_tensor("parents", parents, torch.int64, (-1, -1))
    flat = torch.empty(3, *parents.shape, dtype=torch.int64, device=parents.device)
    _link(parents, None, tuple(flat))
    return Links(parents, *flat)


def links_from_mask(mask: Tensor) -> Links:
    """Links of trees given as [batch, N, N] bool, true where column is ancestor-or-self of row.

    A node's parent is its largest earlier ancestor.
    """
    check_tensor("mask", mask, torch.bool, (-1, -1, -1))
    number = torch.arange(mask.shape[1], device=mask.device)
    earlier = mask & (number[None, :] < number[:, None])
    return links_from_parents(torch.where(earlier, number, -1).amax(2))


def visibility(parents: Tensor) -> Tensor:
    """[batch, N, N], bool: true where column is ancestor-or-self of row."""
    check_tensor("parents", parents, torch.int64, (-1, -1))
    flat = torch.empty(3, *parents.shape, dtype=torch.int64, device=parents.device)
    return _link(parents, None, tuple(flat))


def malformed(parents: Tensor) -> Tensor:
    """[batch], bool: trees in which node 0 is not the only root or a parent does not precede."""
    number = torch.arange(parents.shape[1], device=parents.device)
    wrong = (parents < 0) | (parents >= number)
    wrong[:, 0] = parents[:, 0] != -1
    return wrong.any(1)


def _link(
    parents: Tensor, build: tuple[Tensor, Tensor, Tensor] | None, outputs: tuple[Tensor, ...]
) -> Tensor:
    """In place on outputs: runs the links kernel; returns visibility."""
    batch, num_nodes = parents.shape
    visible = torch.zeros(
        batch, num_nodes, num_nodes, dtype=torch.bool, device=parents.device
    )  # fmt: skip
    if batch > 0:
        links_kernel[(batch, -(-num_nodes // ROWS))](
            parents, *((parents,) * 3 if build is None else build), *outputs,
            *((parents,) * 3 if build is None else ()), visible.view(torch.int8), num_nodes,
            BUILD=build is not None, ROWS=ROWS, COLUMNS=COLUMNS, num_warps=2,
        )  # fmt: skip
    return visible


SPECS = (
    KernelSpec(
        name="tree parents",
        kernel=parents_kernel,
        arguments="*i64 *i64 *i64 i32 i32 i32",
        constants={"ROWS": ROWS, "COLUMNS": COLUMNS},
        num_warps=2,
    ),
    *(
        KernelSpec(
            name=f"tree links{suffix}",
            kernel=links_kernel,
            arguments=f"{'*i64 ' * 10}*i8 i32",
            constants={"BUILD": build, "ROWS": ROWS, "COLUMNS": COLUMNS},
            num_warps=2,
        )
        for suffix, build in (("", False), (" build", True))
    ),
)
