"""Ops by the native library: same bits for a row in every batch, chunk and tree."""

from __future__ import annotations

import ctypes
import weakref
from ctypes import CDLL

import torch
from torch import Tensor

from graft.kernels.cpu.library import CKvLayer, CLinear, CStepRows
from graft.kernels.cpu.plain_choice import accept, choose
from graft.kernels.ops import ChoiceRows, KvCache, Linear, RopeTable, StepRows, TreeRows

PANEL = 32
_CHUNK_BYTES = 32 << 20


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


class NativeOps:
    """Ops over one library with its own threads; calls from several threads at once are safe."""

    name = "native"
    batch_invariant = True

    def __init__(self, library: CDLL, isa: str, threads: int = 1) -> None:
        self.device = torch.device("cpu")
        self.isa = isa
        self.threads = threads
        self._c = library
        self._pool: int = library.graft_pool_create(threads)
        weakref.finalize(self, library.graft_pool_destroy, self._pool)
        self._memory: WeightMemory | None = None
        self._rows: tuple[StepRows, CStepRows] | None = None
        self._kv: tuple[KvCache, list[CKvLayer]] | None = None

    def pack(self, weights: list[Tensor], biases: list[Tensor | None]) -> Linear:
        """Stacks [out_i, in] weights by rows into panels; a missing bias is zeros beside others."""
        width = weights[0].shape[1]
        outputs = sum(w.shape[0] for w in weights)
        padded = (outputs + PANEL - 1) // PANEL * PANEL
        has_bias = any(b is not None for b in biases)
        nbytes = padded * 4 * (width + has_bias)
        start, memory = self._take(nbytes)
        bias = start + padded * width * 4 if has_bias else None
        row = 0
        for weight, part in zip(weights, biases, strict=True):
            rows = _ready(weight, (weight.shape[0], width))
            self._c.graft_linear_pack(self._pool, start, width, row, rows.data_ptr(), rows.shape[0])
            if part is not None and bias is not None:
                values = _ready(part, (rows.shape[0],))
                ctypes.memmove(bias + row * 4, values.data_ptr(), rows.shape[0] * 4)
            row += rows.shape[0]
        return NativeLinear(CLinear(width, outputs, start, bias), nbytes, memory)

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        """x: [rows, in] -> [rows, out]."""
        assert isinstance(weight, NativeLinear)
        rows, width = x.shape
        if width != weight.in_features:
            raise ValueError(f"x has {width} columns, expected {weight.in_features}")
        out = torch.empty((rows, weight.out_features))
        self._c.graft_linear(self._pool, weight.address, _floats(x), rows, out.data_ptr())
        return out

    def embed(self, tokens: Tensor, table: Tensor | Linear) -> Tensor:
        """tokens: [rows] int32, table: [vocab, hidden] or a packed head -> [rows, hidden]."""
        rows = tokens.shape[0]
        if isinstance(table, NativeLinear):
            out = torch.empty((rows, table.in_features))
            self._c.graft_linear_rows(table.address, _ints(tokens), rows, out.data_ptr())
            return out
        assert isinstance(table, Tensor)
        hidden = table.shape[1]
        out = torch.empty((rows, hidden))
        self._c.graft_embed(_ints(tokens), rows, _floats(table), hidden, out.data_ptr())
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x: [..., width] -> same shape."""
        width = x.shape[-1]
        if weight.shape != (width,):
            raise ValueError(f"weight is {tuple(weight.shape)}, expected ({width},)")
        out = torch.empty(x.shape)
        self._c.graft_rms_norm(
            self._pool, _floats(x), _floats(weight), eps, x.numel() // width, width, out.data_ptr()
        )
        return out

    def add_(self, residual: Tensor, x: Tensor) -> None:
        """In place: residual += x."""
        if residual.shape != x.shape:
            raise ValueError(f"x is {tuple(x.shape)}, expected {tuple(residual.shape)}")
        self._c.graft_add(self._pool, _floats(residual), _floats(x), x.numel())

    def rope_(self, x: Tensor, positions: Tensor, table: RopeTable) -> None:
        """In place: rotates x [rows, heads, head_dim]; rows may lie apart."""
        rows, heads, dim = x.shape
        half = table.cos.shape[1]
        if positions.shape != (rows,) or 2 * half > dim:
            raise ValueError(
                f"positions are {tuple(positions.shape)} and {2 * half} entries rotate, "
                f"expected ({rows},) and at most {dim}"
            )
        self._c.graft_rope(
            self._pool,
            _heads(x),
            x.stride(0),
            rows,
            heads,
            dim,
            _ints(positions),
            _floats(table.cos),
            _floats(table.sin),
            half,
        )

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[rows, 2 * width] -> [rows, width]."""
        rows, double = gate_up.shape
        out = torch.empty((rows, double // 2))
        self._c.graft_silu_mul(self._pool, _floats(gate_up), rows, double // 2, out.data_ptr())
        return out

    def write_kv(self, kv: KvCache, layer: int, rows: StepRows, k: Tensor, v: Tensor) -> None:
        """In place on kv: k, v [rows, kv_heads, head_dim]; their rows may lie apart."""
        if k.shape != v.shape or k.shape[1:] != kv.keys.shape[2:]:
            raise ValueError(
                f"k is {tuple(k.shape)} and v {tuple(v.shape)}, "
                f"expected [rows, *{tuple(kv.keys.shape[2:])}]"
            )
        self._c.graft_write_kv(
            self._layer(kv, layer),
            self._step(rows),
            _heads(k),
            _heads(v),
            k.stride(0),
            v.stride(0),
        )

    def attend(
        self, q: Tensor, kv: KvCache, layer: int, rows: StepRows, scale: float, window: int
    ) -> Tensor:
        """q: [rows, heads, head_dim], its rows may lie apart -> [rows, heads, head_dim]."""
        num_rows, heads, dim = q.shape
        if dim != kv.keys.shape[3] or heads % kv.keys.shape[2] or dim > 512:
            raise ValueError(
                f"q has {heads} heads of {dim}, expected a multiple of {kv.keys.shape[2]} "
                f"heads of {kv.keys.shape[3]}, at most 512 wide"
            )
        out = torch.empty((num_rows, heads, dim))
        self._c.graft_attend(
            self._pool,
            self._layer(kv, layer),
            self._step(rows),
            _heads(q),
            q.stride(0),
            heads,
            scale,
            window,
            out.data_ptr(),
        )
        return out

    def choose(self, logits: Tensor, rows: ChoiceRows) -> Tensor:
        """logits: [rows, vocab] -> [rows], int32."""
        return choose(logits, rows)

    def accept(self, trees: TreeRows, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """chosen: [rows] -> (accept_token_num [trees], accept_index [trees, width]), int32."""
        return accept(trees, chosen)

    def keep(self, kv: KvCache, source: Tensor, target: Tensor) -> None:
        """In place on kv: one move after the other, in all layers."""
        if source.numel() == 0:
            return
        layers, slots, heads, dim = kv.keys.shape
        self._c.graft_keep(
            _floats(kv.keys),
            _floats(kv.values),
            layers,
            slots,
            heads * dim,
            _ints(source),
            _ints(target),
            source.numel(),
        )

    def _take(self, nbytes: int) -> tuple[int, WeightMemory]:
        if self._memory is not None:
            start = self._memory.take(nbytes)
            if start is not None:
                return start, self._memory
        self._memory = WeightMemory(self._c, max(nbytes, _CHUNK_BYTES))
        start = self._memory.take(nbytes)
        assert start is not None
        return start, self._memory

    def _step(self, rows: StepRows) -> int:
        """Address of the C form, kept while the same step goes through the layers."""
        last = self._rows
        if last is None or last[0] is not rows:
            table = rows.page_table
            struct = CStepRows(
                rows.positions.shape[0],
                table.shape[1],
                _ints(rows.positions),
                _ints(rows.write_slots),
                _ints(rows.sequence),
                _ints(table),
                _ints(rows.prefix_len),
                _ints(rows.extra_ptr),
                _ints(rows.extra_slots),
            )
            self._rows = last = (rows, struct)
        return ctypes.addressof(last[1])

    def _layer(self, kv: KvCache, layer: int) -> int:
        """Address of the C form of one layer."""
        last = self._kv
        if last is None or last[0] is not kv:
            if kv.keys.shape != kv.values.shape:
                raise ValueError(
                    f"values are {tuple(kv.values.shape)}, expected {tuple(kv.keys.shape)}"
                )
            layers, slots, heads, dim = kv.keys.shape
            keys, values, step = _floats(kv.keys), _floats(kv.values), slots * heads * dim * 4
            structs = [
                CKvLayer(keys + i * step, values + i * step, heads, dim, kv.page_tokens)
                for i in range(layers)
            ]
            self._kv = last = (kv, structs)
        return ctypes.addressof(last[1][layer])


def _ready(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    if x.shape != shape:
        raise ValueError(f"weights are {tuple(x.shape)}, expected {shape}")
    return x.to(torch.float32).contiguous()


def _floats(x: Tensor) -> int:
    """Address of contiguous float32 values."""
    if x.dtype is not torch.float32 or not x.is_contiguous():
        raise ValueError(f"expected contiguous float32, got {x.dtype} with strides {x.stride()}")
    return int(x.data_ptr())


def _heads(x: Tensor) -> int:
    """Address of float32 [rows, heads, head_dim] whose rows are contiguous in themselves."""
    if x.dtype is not torch.float32 or x.stride(2) != 1 or x.stride(1) != x.shape[2]:
        raise ValueError(f"expected float32 rows of heads, got {x.dtype}, strides {x.stride()}")
    return int(x.data_ptr())


def _ints(x: Tensor) -> int:
    """Address of contiguous int32 values."""
    if x.dtype is not torch.int32 or not x.is_contiguous():
        raise ValueError(f"expected contiguous int32, got {x.dtype} with strides {x.stride()}")
    return int(x.data_ptr())
