"""Weights of linear layers in the native layout, and the memory that holds them."""

from __future__ import annotations

import ctypes
import weakref
from ctypes import CDLL

from graft.kernels.cpu.library import CLinear

PANEL = 32


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
    """Weights in panels of 32 outputs, see native/linear.h."""

    __slots__ = ("_memory", "address", "in_features", "nbytes", "out_features", "struct")

    def __init__(self, struct: CLinear, nbytes: int, memory: WeightMemory) -> None:
        self.struct = struct
        self.address = ctypes.addressof(struct)
        self.in_features: int = struct.inputs
        self.out_features: int = struct.outputs
        self.nbytes = nbytes
        self._memory = memory
