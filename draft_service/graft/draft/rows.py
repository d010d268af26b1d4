"""Rows of one draft forward, from the lanes of many sessions. Knows no tokens and no model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from graft.common.tree import IntArray
from graft.draft.kv import Lane
from graft.kernels.ops import StepRows


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """The rows of one lane.

    positions: [rows], absolute (RoPE).
    write_slots: [rows], physical.
    prefix_len: [rows], leading slots of the lane that a row sees.
    extra_slots: [rows, extra] or one array a row, physical slots that a row sees besides, in order
        of position; none for rows that see a prefix with themselves in it.
    """

    lane: Lane
    positions: IntArray
    write_slots: IntArray
    prefix_len: IntArray
    extra_slots: IntArray | Sequence[IntArray]


def prefix_part(lane: Lane, first: int, stop: int) -> Part:
    """Positions `first` to `stop` - 1 as plain rows; each sees all before it, and itself."""
    positions = np.arange(first, stop, dtype=np.int32)
    return Part(
        lane=lane,
        positions=positions,
        write_slots=lane.slots(first, stop),
        prefix_len=positions - np.int32(lane.base - 1),
        extra_slots=np.empty((len(positions), 0), np.int32),
    )


def tree_part(lane: Lane, positions: IntArray, paths: IntArray) -> Part:
    """Nodes of a tree: each sees what is committed and its own path.

    Shapes:
        positions: [nodes]; paths: [nodes, depth], physical slots from the first level to itself.
    """
    return Part(
        lane=lane,
        positions=positions,
        write_slots=np.ascontiguousarray(paths[:, -1]),
        prefix_len=np.full(len(positions), lane.num_cached, np.int32),
        extra_slots=paths,
    )


@dataclass(frozen=True, slots=True)
class Sight:
    """What rows of a block see. causal: nothing after themselves in the block.

    window: keys within it only, on either side and counting the row's own; 0 sees everything.
    """

    causal: bool
    window: int = 0


def block_part(lane: Lane, size: int, sight: Sight) -> Part:
    """A block of `size` rows right behind what is committed, in scratch slots.

    The window of a causal block is left to `Ops.attend`; here it differs from row to row.
    """
    first, stop = lane.length, lane.length + size
    positions = np.arange(first, stop, dtype=np.int32)
    plain = prefix_part(lane, first, stop)
    if sight.causal:
        return plain
    extra: list[IntArray] = [np.empty(0, np.int32)] * size
    prefix_len = np.full(size, stop - lane.base, np.int32)
    if sight.window:
        prefix_len = np.zeros(size, np.int32)
        extra = [
            lane.slots(max(lane.base, row - sight.window + 1), min(stop, row + sight.window))
            for row in positions.tolist()
        ]
    return Part(lane, positions, plain.write_slots, prefix_len, extra)


def step_rows(parts: Sequence[Part]) -> StepRows:
    """The parts side by side."""
    counts = [len(part.positions) for part in parts]
    extra_ptr = np.zeros(sum(counts) + 1, np.int32)
    np.cumsum(np.concatenate([_widths(part) for part in parts]), out=extra_ptr[1:])
    return StepRows(
        positions=torch.from_numpy(np.concatenate([part.positions for part in parts])),
        write_slots=torch.from_numpy(np.concatenate([part.write_slots for part in parts])),
        sequence=torch.from_numpy(np.repeat(np.arange(len(parts), dtype=np.int32), counts)),
        page_table=page_table([part.lane for part in parts]),
        prefix_len=torch.from_numpy(np.concatenate([part.prefix_len for part in parts])),
        extra_ptr=torch.from_numpy(extra_ptr),
        extra_slots=torch.from_numpy(np.concatenate([_flat(part) for part in parts])),
    )


def page_table(lanes: Sequence[Lane]) -> torch.Tensor:
    """[lanes, max_pages], int32: physical pages of each lane, -1 past its end."""
    most = max(len(lane.pages) for lane in lanes)
    table = np.full((len(lanes), most), -1, np.int32)
    for line, lane in zip(table, lanes, strict=True):
        line[: len(lane.pages)] = lane.pages
    return torch.from_numpy(table)


def _widths(part: Part) -> IntArray:
    """[rows]: extra slots of each row."""
    extra = part.extra_slots
    if isinstance(extra, np.ndarray):
        return np.full(len(extra), extra.shape[1], np.int32)
    return np.asarray([len(slots) for slots in extra], np.int32)


def _flat(part: Part) -> IntArray:
    """Extra slots of all rows, one row after the other."""
    extra = part.extra_slots
    return extra.reshape(-1) if isinstance(extra, np.ndarray) else np.concatenate(extra)
