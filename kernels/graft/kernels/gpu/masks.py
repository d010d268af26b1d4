"""Writes ancestor visibility in the layouts that attention kernels read. Knows no links.

The meaning: `write_mask` and `pack_flashinfer` of graft.kernels.reference.build_tree.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from graft.kernels.gpu.spec import KernelSpec, check_device, check_tensor
from graft.kernels.trees import MAX_PACKED_NODES, MaskMode

COLUMNS = 512
SPLITS = 8
PACKED = 32


@triton.jit
def full_mask_kernel(
    visible, seq_lens, starts, mask, mask_length, num_nodes, COLUMNS: tl.constexpr
):
    """One row of a FULL_MASK: seq_len ones, then the row's visibility.

    Programs: (row of the batch, split); splits take turns at blocks of columns. starts: tokens
    of the prefixes of earlier trees.
    """
    row = tl.program_id(0).to(tl.int64)
    tree = row // num_nodes
    length = tl.load(seq_lens + tree)
    block = tl.load(starts + tree) * num_nodes + tree * num_nodes * num_nodes
    line = block + (row - tree * num_nodes) * (length + num_nodes)
    first = tl.program_id(1).to(tl.int64) * COLUMNS
    while first < length + num_nodes:
        column = first + tl.arange(0, COLUMNS)
        node = column - length
        inside = (node >= 0) & (node < num_nodes)
        seen = tl.load(visible + row * num_nodes + node, mask=inside, other=1)
        written = (node < num_nodes) & (line + column < mask_length)
        tl.store(mask + line + column, seen, mask=written)
        first += tl.num_programs(1) * COLUMNS


@triton.jit
def packed_mask_kernel(visible, mask, num_rows, num_nodes, ROWS: tl.constexpr, BITS: tl.constexpr):
    """Bit j of a row's integer is column j."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    bit = tl.arange(0, BITS)
    inside = (row < num_rows)[:, None] & (bit < num_nodes)[None, :]
    place = row.to(tl.int64)[:, None] * num_nodes + bit[None, :]
    seen = tl.load(visible + place, mask=inside, other=0).to(tl.int64)
    word = tl.sum(seen << bit[None, :], 1)
    tl.store(mask + row, word.to(mask.dtype.element_ty), mask=row < num_rows)


@triton.jit
def flashinfer_mask_kernel(
    visible, seq_lens, indptr, mask, num_bytes, num_nodes, COLUMNS: tl.constexpr
):
    """Bytes of one tree's flat FULL_MASK bits, lowest bit first.

    Programs: (tree, split); splits take turns at blocks of bytes.
    """
    tree = tl.program_id(0)
    length = tl.load(seq_lens + tree).to(tl.int32)
    width = length + num_nodes
    bits = width * num_nodes
    start = tl.load(indptr + tree)
    seen_by = visible + tree.to(tl.int64) * num_nodes * num_nodes
    first = tl.program_id(1) * COLUMNS
    while first * 8 < bits:
        byte = first + tl.arange(0, COLUMNS)
        value = tl.zeros([COLUMNS], tl.int32)
        for bit in tl.static_range(8):
            flat = byte * 8 + bit
            row = flat // width
            node = flat - row * width - length
            real = flat < bits
            in_tree = real & (node >= 0)
            seen = tl.load(seen_by + row * num_nodes + node, mask=in_tree, other=1).to(tl.int32)
            value += tl.where(real, seen, 0) << bit
        written = (byte * 8 < bits) & (start + byte < num_bytes)
        tl.store(mask + start + byte, value.to(tl.uint8), mask=written)
        first += tl.num_programs(1) * COLUMNS


def write_mask(
    visible: Tensor, seq_lens: Tensor, mode: MaskMode, mask_length: int | None = None
) -> Tensor:
    """The flat mask of [batch, N, N] bool visibility, for [batch] int64 sequence lengths.

    FULL_MASK: bool, N rows of seq_len + N columns a tree, prefix columns true. mask_length is its
        number of entries; None reads it from the device, and waits for it.
    QLEN_ONLY: bool, [batch * N * N].
    QLEN_ONLY_BITPACKING: [batch * N], uint8, uint16 or uint32 by N; bit j of a row is column j.

    Raises:
        ValueError: a shape, dtype, device or layout differs, or more nodes than a packed mask
            can hold.
    """
    batch, num_nodes = _check(visible, seq_lens)
    if mode is MaskMode.QLEN_ONLY:
        return visible.view(-1)
    if mode is MaskMode.QLEN_ONLY_BITPACKING:
        packed = torch.empty(
            batch * num_nodes, dtype=packed_dtype(num_nodes), device=visible.device
        )  # fmt: skip
        if packed.numel() > 0:
            packed_mask_kernel[(-(-packed.numel() // PACKED),)](
                visible.view(torch.int8), packed, packed.numel(), num_nodes,
                ROWS=PACKED, BITS=MAX_PACKED_NODES, num_warps=1,
            )  # fmt: skip
        return packed
    if mask_length is None:
        mask_length = num_nodes * (int(seq_lens.sum()) + batch * num_nodes)
    mask = torch.empty(mask_length, dtype=torch.bool, device=visible.device)
    if batch > 0 and num_nodes > 0:
        starts = seq_lens.cumsum(0) - seq_lens
        full_mask_kernel[(batch * num_nodes, SPLITS)](
            visible.view(torch.int8), seq_lens, starts, mask.view(torch.int8), mask_length,
            num_nodes, COLUMNS=COLUMNS, num_warps=4,
        )  # fmt: skip
    return mask


def pack_flashinfer(
    visible: Tensor, seq_lens: Tensor, num_bytes: int | None = None
) -> tuple[Tensor, Tensor]:
    """FlashInfer's packed custom mask: bytes and their start for each tree.

    The FULL_MASK bits of a tree, fewer than 2^31, flat and row by row, lowest bit first, each tree
    padded to a whole byte. num_bytes is the size of the mask or more; None reads it from the
    device, and waits for it.

    Shapes:
        returns: [num_bytes], uint8, and [batch + 1], int32.
    Raises:
        ValueError: a shape, dtype, device or layout differs.
    """
    batch, num_nodes = _check(visible, seq_lens)
    sizes = (num_nodes * (seq_lens + num_nodes) + 7) // 8
    indptr = torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).int()
    if num_bytes is None:
        num_bytes = int(indptr[-1])
    mask = torch.empty(num_bytes, dtype=torch.uint8, device=visible.device)
    if batch > 0 and num_nodes > 0:
        flashinfer_mask_kernel[(batch, SPLITS)](
            visible.view(torch.int8), seq_lens, indptr, mask, num_bytes,
            num_nodes, COLUMNS=COLUMNS, num_warps=4,
        )  # fmt: skip
    return mask, indptr


def packed_dtype(num_nodes: int) -> torch.dtype:
    """The integer that holds one row of a packed mask.

    Raises:
        ValueError: more than MAX_PACKED_NODES nodes.
    """
    if num_nodes > MAX_PACKED_NODES:
        raise ValueError(f"a packed row holds {MAX_PACKED_NODES} nodes, got {num_nodes}")
    return torch.uint8 if num_nodes <= 8 else torch.uint16 if num_nodes <= 16 else torch.uint32


def _check(visible: Tensor, seq_lens: Tensor) -> tuple[int, int]:
    check_tensor("visible", visible, torch.bool, (-1, -1, -1))
    batch, num_nodes, columns = visible.shape
    if columns != num_nodes:
        raise ValueError(f"visible has {columns} columns, expected its {num_nodes} rows")
    check_tensor("seq_lens", seq_lens, torch.int64, (batch,))
    check_device(visible=visible, seq_lens=seq_lens)
    return batch, num_nodes


SPECS = (
    KernelSpec(
        name="full mask",
        kernel=full_mask_kernel,
        arguments="*i8 *i64 *i64 *i8 i64 i32",
        constants={"COLUMNS": COLUMNS},
    ),
    *(
        KernelSpec(
            name=f"packed mask {name}",
            kernel=packed_mask_kernel,
            arguments=f"*i8 *{name} i32 i32",
            constants={"ROWS": PACKED, "BITS": MAX_PACKED_NODES},
            num_warps=1,
        )
        for name in ("u8", "u16", "u32")
    ),
    KernelSpec(
        name="flashinfer mask",
        kernel=flashinfer_mask_kernel,
        arguments="*i8 *i64 *i32 *u8 i64 i32",
        constants={"COLUMNS": COLUMNS},
    ),
)
