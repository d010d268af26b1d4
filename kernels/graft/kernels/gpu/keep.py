"""Compaction of accepted keys and values in all layers. Knows slots, knows no pages' owners.

The meaning: graft.kernels.reference.keep.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.kernels.gpu.spec import KernelSpec, check_device, check_tensor
from graft.kernels.ops import KvCache

MOVES = 16
COLUMNS = 256
PATH = 128

NO_MOVE = tl.constexpr(-1)


@triton.jit
def keep_moves_kernel(
    ptr, accepted, accept_index, write_slots, source, target, width, PATH: tl.constexpr
):
    """One tree: where each node of the accepted path comes from and goes to, -1 where it stays."""
    tree = tl.program_id(0)
    first = tl.load(ptr + tree)
    nodes = tl.load(ptr + tree + 1) - first
    length = tl.minimum(tl.load(accepted + tree) + 1, nodes)
    row = tree.to(tl.int64) * width
    start = tl.full([], 0, tl.int32)
    while start < width:
        j = start + tl.arange(0, PATH)
        node = tl.load(accept_index + row + j, mask=j < width, other=-1)
        moved = (j < length) & (node != j) & (node >= 0)
        take = tl.load(write_slots + first + node, mask=moved, other=NO_MOVE)
        put = tl.load(write_slots + first + j, mask=moved, other=NO_MOVE)
        tl.store(source + row + j, take, mask=j < width)
        tl.store(target + row + j, put, mask=j < width)
        start += PATH


@triton.jit
def keep_kernel(
    keys, values, source, target, num_moves, num_slots, row_size,
    MOVES: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """In place: all moves in a few columns of one layer's keys or values.

    Programs: (layer, columns, keys or values). Moves go in groups: all rows of a group are read
    before any is written, which is the same as one after the other unless a move reads or writes
    what an earlier one of its group has written. Such a group goes one by one.
    """
    layer = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < row_size
    cache = keys
    if tl.program_id(2) == 1:
        cache = values
    cache += layer * num_slots * row_size
    number = tl.arange(0, MOVES)
    first = tl.full([], 0, tl.int32)
    while first < num_moves:
        here = first + number < num_moves
        take = tl.load(source + first + number, mask=here, other=NO_MOVE)
        put = tl.load(target + first + number, mask=here, other=NO_MOVE)
        live = (take >= 0) & (put >= 0) & (take != put)
        earlier = number[:, None] < number[None, :]
        met = (put[:, None] == take[None, :]) | (put[:, None] == put[None, :])
        clash = earlier & met & live[:, None] & live[None, :]
        if tl.max(tl.max(clash.to(tl.int32), 1), 0) == 0:
            moved = live[:, None] & inside[None, :]
            taken = cache + take.to(tl.int64)[:, None] * row_size + column[None, :]
            rows = tl.load(taken, mask=moved, other=0.0)
            tl.debug_barrier()
            given = cache + put.to(tl.int64)[:, None] * row_size + column[None, :]
            tl.store(given, rows, mask=moved)
        else:
            for move in range(first, tl.minimum(first + MOVES, num_moves)):
                old = tl.load(source + move).to(tl.int64)
                new = tl.load(target + move).to(tl.int64)
                if (old >= 0) & (new >= 0):
                    row = tl.load(cache + old * row_size + column, mask=inside, other=0.0)
                    tl.debug_barrier()
                    tl.store(cache + new * row_size + column, row, mask=inside)
                    tl.debug_barrier()
        tl.debug_barrier()
        first += MOVES


def keep_moves(
    ptr: Tensor, accept_token_num: Tensor, accept_index: Tensor, write_slots: Tensor
) -> tuple[Tensor, Tensor]:
    """The copies that bring accepted rows to the front of their tree's slots.

    The reference returns only real moves; their number is on the device, so here every place of
    accept_index has an entry, -1 in both where nothing moves. `keep` passes over those.

    Shapes:
        ptr: [trees + 1]; accept_token_num: [trees]; accept_index: [trees, width], local nodes;
        write_slots: [rows], the slot each row's key was written to. All int32.
        returns: source and target slots, each [trees * width], int32.
    Raises:
        ValueError: a shape, dtype, device or layout differs.
    """
    num_trees, width = accept_index.shape
    check_tensor("ptr", ptr, torch.int32, (num_trees + 1,))
    check_tensor("accept_token_num", accept_token_num, torch.int32, (num_trees,))
    check_tensor("accept_index", accept_index, torch.int32, (num_trees, width))
    check_tensor("write_slots", write_slots, torch.int32, (-1,))
    device = check_device(ptr=ptr, accept_index=accept_index, write_slots=write_slots)
    source, target = torch.empty(2, num_trees * width, dtype=torch.int32, device=device)
    if num_trees > 0:
        keep_moves_kernel[(num_trees,)](
            ptr, accept_token_num, accept_index, write_slots, source, target, width,
            PATH=PATH, num_warps=1,
        )  # fmt: skip
    return source, target


def keep(kv: KvCache, source: Tensor, target: Tensor) -> None:
    """In place on kv: copies slot source[i] to slot target[i] in all layers, in order of i.

    Shapes:
        source, target: [moves], int32; an entry of -1 is no move.
    Raises:
        ValueError: a shape, dtype, device or layout differs.
    """
    num_moves = source.numel()
    check_tensor("source", source, torch.int32, (num_moves,))
    check_tensor("target", target, torch.int32, (num_moves,))
    check_tensor("values", kv.values, kv.keys.dtype, tuple(kv.keys.shape))
    check_tensor("keys", kv.keys, kv.keys.dtype, (-1, -1, -1, -1))
    check_device(keys=kv.keys, values=kv.values, source=source, target=target)
    num_layers, num_slots, kv_heads, head_dim = kv.keys.shape
    if num_moves == 0 or kv.keys.numel() == 0:
        return
    row_size = kv_heads * head_dim
    keep_kernel[(num_layers, -(-row_size // COLUMNS), 2)](
        kv.keys, kv.values, source, target, num_moves, num_slots, row_size,
        MOVES=MOVES, COLUMNS=COLUMNS, num_warps=4,
    )  # fmt: skip


SPECS = (
    KernelSpec(
        name="keep moves",
        kernel=keep_moves_kernel,
        arguments="*i32 *i32 *i32 *i32 *i32 *i32 i32",
        constants={"PATH": PATH},
        num_warps=1,
    ),
    *(
        KernelSpec(
            name=f"keep {name}",
            kernel=keep_kernel,
            arguments=f"*{name} *{name} *i32 *i32 i32 i32 i32",
            constants={"MOVES": MOVES, "COLUMNS": COLUMNS},
        )
        for name in ("fp32", "bf16")
    ),
)
