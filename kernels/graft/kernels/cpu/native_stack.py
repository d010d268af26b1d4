"""A run of decoder layers as one call into the native library."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import CDLL

from torch import Tensor

from graft.kernels.cpu.library import CDecoderLayer, Workers
from graft.kernels.cpu.native_linear import NativeLinear
from graft.kernels.cpu.native_views import CViews, floats
from graft.kernels.ops import KvCache, LayerSpec, Linear, StepRows


class NativeStack:
    """Layers in their C form; holds the tensors they point to."""

    def __init__(self, library: CDLL, workers: Workers, layers: Sequence[LayerSpec]) -> None:
        self._run = library.graft_layers
        self._workers = workers
        self._layers = tuple(layers)
        self._structs = (CDecoderLayer * len(layers))(*map(c_layer, layers))
        self._views = CViews()

    def run_(self, hidden: Tensor, layers: range, kv: KvCache, rows: StepRows) -> None:
        """In place: hidden [rows, width] passes through `layers`."""
        if not layers:
            return
        if not (layers.step == 1 and 0 <= layers.start and layers.stop <= len(self._layers)):
            raise ValueError(f"layers are {layers}, expected a run within 0..{len(self._layers)}")
        spec = self._layers[layers.start]
        expected = (rows.positions.shape[0], spec.qkv.in_features)
        if hidden.shape != expected:
            raise ValueError(f"hidden is {tuple(hidden.shape)}, expected {expected}")
        kv_heads, head_dim = kv.keys.shape[2:]
        width = (spec.num_heads + 2 * kv_heads) * head_dim
        if head_dim != spec.head_dim or width != spec.qkv.out_features:
            raise ValueError(
                f"the cache has {kv_heads} heads of {head_dim}, expected heads of "
                f"{spec.head_dim} that fit {spec.qkv.out_features} outputs of q, k and v"
            )
        first = ctypes.addressof(self._structs) + layers.start * ctypes.sizeof(CDecoderLayer)
        self._run(
            self._workers.address,
            first,
            self._views.layer(kv, layers.start),
            len(layers),
            self._views.step(rows),
            floats(hidden),
        )


def c_layer(spec: LayerSpec) -> CDecoderLayer:
    """The layer in its C form, which points into the tensors of `spec`."""
    return CDecoderLayer(
        floats(spec.attention_norm),
        address_of(spec.qkv),
        None if spec.q_norm is None else floats(spec.q_norm),
        None if spec.k_norm is None else floats(spec.k_norm),
        address_of(spec.output),
        floats(spec.mlp_norm),
        address_of(spec.gate_up),
        address_of(spec.down),
        floats(spec.rope.cos),
        floats(spec.rope.sin),
        spec.rope.cos.shape[1],
        spec.num_heads,
        spec.window,
        spec.eps,
        spec.head_dim**-0.5,
    )


def address_of(weight: Linear) -> int:
    """Where the C form of packed weights lies."""
    assert isinstance(weight, NativeLinear)
    return weight.address
