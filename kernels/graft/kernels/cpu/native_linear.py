"""Weights of linear layers in the native layouts, and the memory that holds them."""

from __future__ import annotations

import ctypes
import weakref
from ctypes import CDLL
from enum import IntEnum

import torch
from torch import Tensor

from graft.kernels.cpu.library import CLinear, Workers

PANEL = 32
BLOCK = 32
_CHUNK_BYTES = 32 << 20


class Kind(IntEnum):
    """Weights of native/linear.h."""

    F32 = 0
    Q8_0 = 1
    Q4_1 = 2


BLOCK_BYTES = {Kind.Q8_0: 34, Kind.Q4_1: 20}


class WeightMemory:
    """Memory on huge pages, handed out from the front and freed as a whole.

    Raises:
        MemoryError: the machine has no more.
    """

    def __init__(self, library: CDLL, nbytes: int) -> None:
        self._next = library.graft_alloc(nbytes)
        if not self._next:
            raise MemoryError(f"{nbytes} bytes for weights")
        self._end = self._next + nbytes
        weakref.finalize(self, library.graft_free, self._next)

    def take(self, nbytes: int) -> int | None:
        """Address of `nbytes` zero bytes on a cache line; None when they do not fit."""
        start = self._next
        if start + nbytes > self._end:
            return None
        self._next = start + (nbytes + 63) // 64 * 64
        return int(start)


class NativeLinear:
    """Weights in panels of 32 outputs, see native/linear.h and native/quant.h."""

    __slots__ = ("_memory", "address", "in_features", "nbytes", "out_features", "struct")

    def __init__(self, struct: CLinear, nbytes: int, memory: WeightMemory) -> None:
        self.struct = struct
        self.address = ctypes.addressof(struct)
        self.in_features: int = struct.inputs
        self.out_features: int = struct.outputs
        self.nbytes = nbytes
        self._memory = memory


class Packer:
    """Lays weights out in memory of its own."""

    def __init__(self, library: CDLL, workers: Workers) -> None:
        self._c = library
        self._workers = workers
        self._memory: WeightMemory | None = None

    def floats(self, weights: list[Tensor], biases: list[Tensor | None]) -> NativeLinear:
        """[out_i, in] weights of any float type, stacked by rows."""
        width = weights[0].shape[1]
        made, start = self._room(Kind.F32, width, weights, biases, width * 4)
        first = 0
        for weight in weights:
            if weight.shape[1] != width:
                raise ValueError(f"weights are {weight.shape[1]} wide, expected {width}")
            rows = weight.to(torch.float32).contiguous()
            self._c.graft_linear_pack(
                self._workers.address, start, width, first, rows.data_ptr(), len(rows)
            )
            first += len(rows)
        return made

    def blocks(
        self, kind: Kind, weights: list[Tensor], biases: list[Tensor | None]
    ) -> NativeLinear:
        """[out_i, in / 32 * block bytes] of a GGUF file, stacked by rows."""
        row_bytes = weights[0].shape[1]
        count, rest = divmod(row_bytes, BLOCK_BYTES[kind])
        if rest:
            raise ValueError(f"rows have {row_bytes} bytes, expected {BLOCK_BYTES[kind]} a block")
        width = count * BLOCK
        made, start = self._room(kind, width, weights, biases, row_bytes)
        first = 0
        for weight in weights:
            if weight.shape[1] != row_bytes or weight.dtype is not torch.uint8:
                raise ValueError(
                    f"blocks are {weight.dtype} {tuple(weight.shape)}, "
                    f"expected uint8 [rows, {row_bytes}]"
                )
            rows = weight.contiguous()
            self._c.graft_quant_pack(
                self._workers.address, start, kind, width, first, rows.data_ptr(), len(rows)
            )
            first += len(rows)
        return made

    def _room(
        self,
        kind: Kind,
        width: int,
        weights: list[Tensor],
        biases: list[Tensor | None],
        row_bytes: int,
    ) -> tuple[NativeLinear, int]:
        """A layer whose bias is in place and whose weights, from the address on, are not yet."""
        outputs = sum(len(weight) for weight in weights)
        padded = (outputs + PANEL - 1) // PANEL * PANEL
        bias_bytes = padded * 4 if any(part is not None for part in biases) else 0
        nbytes = padded * row_bytes + bias_bytes
        start, memory = self._take(nbytes)
        bias = start + padded * row_bytes if bias_bytes else None
        first = 0
        for weight, part in zip(weights, biases, strict=True):
            if part is not None and bias is not None:
                if part.shape != (len(weight),):
                    raise ValueError(f"bias is {tuple(part.shape)}, expected ({len(weight)},)")
                values = part.to(torch.float32).contiguous()
                ctypes.memmove(bias + first * 4, values.data_ptr(), len(weight) * 4)
            first += len(weight)
        return NativeLinear(CLinear(width, outputs, start, bias, kind), nbytes, memory), start

    def _take(self, nbytes: int) -> tuple[int, WeightMemory]:
        if self._memory is not None:
            start = self._memory.take(nbytes)
            if start is not None:
                return start, self._memory
        self._memory = WeightMemory(self._c, max(nbytes, _CHUNK_BYTES))
        start = self._memory.take(nbytes)
        assert start is not None
        return start, self._memory
