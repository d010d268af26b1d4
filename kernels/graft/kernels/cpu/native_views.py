"""Tensors as the native library takes them: checked addresses, and C forms of steps and caches."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from graft.kernels.cpu.library import CKvLayer, CStepRows
from graft.kernels.ops import KvCache, StepRows


def floats(x: Tensor) -> int:
    """Address of contiguous float32 values."""
    if x.dtype is not torch.float32 or not x.is_contiguous():
        raise ValueError(f"expected contiguous float32, got {x.dtype} with strides {x.stride()}")
    return int(x.data_ptr())


def heads_of(x: Tensor) -> int:
    """Address of float32 [rows, heads, head_dim] whose rows are contiguous in themselves."""
    if x.dtype is not torch.float32 or x.stride(2) != 1 or x.stride(1) != x.shape[2]:
        raise ValueError(f"expected float32 rows of heads, got {x.dtype}, strides {x.stride()}")
    return int(x.data_ptr())


def ints(x: Tensor) -> int:
    """Address of contiguous int32 values."""
    if x.dtype is not torch.int32 or not x.is_contiguous():
        raise ValueError(f"expected contiguous int32, got {x.dtype} with strides {x.stride()}")
    return int(x.data_ptr())


class CViews:
    """C forms of the last step and the last cache, made once for all layers of a forward pass.

    Addresses hold until the next call with another step or cache. One thread at a time.
    """

    def __init__(self) -> None:
        self._rows: StepRows | None = None
        self._step: CStepRows | None = None
        self._kv: KvCache | None = None
        self._layers: ctypes.Array[CKvLayer] | None = None

    def step(self, rows: StepRows) -> int:
        """Address of a StepRows of kv.h."""
        if self._rows is not rows or self._step is None:
            table = rows.page_table
            self._step = CStepRows(
                rows.positions.shape[0],
                table.shape[1],
                ints(rows.positions),
                ints(rows.write_slots),
                ints(rows.sequence),
                ints(table),
                ints(rows.prefix_len),
                ints(rows.extra_ptr),
                ints(rows.extra_slots),
            )
            self._rows = rows
        return ctypes.addressof(self._step)

    def layer(self, kv: KvCache, layer: int) -> int:
        """Address of the KvLayer of one layer; those of the next layers follow it."""
        if self._kv is not kv or self._layers is None:
            if kv.keys.shape != kv.values.shape:
                raise ValueError(
                    f"values are {tuple(kv.values.shape)}, expected {tuple(kv.keys.shape)}"
                )
            layers, slots, heads, dim = kv.keys.shape
            keys, values, size = floats(kv.keys), floats(kv.values), slots * heads * dim * 4
            self._layers = (CKvLayer * layers)(
                *(
                    CKvLayer(keys + i * size, values + i * size, heads, dim, kv.page_tokens)
                    for i in range(layers)
                )
            )
            self._kv = kv
        return ctypes.addressof(self._layers) + layer * ctypes.sizeof(CKvLayer)
