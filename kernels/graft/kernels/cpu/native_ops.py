"""Ops by the native library: same bits for a row in every batch, chunk and tree."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import CDLL

import torch
from torch import Tensor

from graft.kernels.cpu.accept import accept
from graft.kernels.cpu.choose import Native, choose
from graft.kernels.cpu.choose_head import choose_head, filtered
from graft.kernels.cpu.library import Workers
from graft.kernels.cpu.native_linear import Kind, NativeLinear, Packer
from graft.kernels.cpu.native_recurrent import NativeRecurrent
from graft.kernels.cpu.native_stack import NativeStack
from graft.kernels.cpu.native_views import CViews, floats, heads_of, ints
from graft.kernels.ops import (
    ChoiceRows,
    KvCache,
    LayerSpec,
    Linear,
    Recurrent,
    RecurrentSpec,
    RopeTable,
    Stack,
    StepRows,
    TreeRows,
)


class NativeOps:
    """Ops over one library with its own threads; calls from several threads at once are safe."""

    name = "native"
    batch_invariant = True
    keeps_blocks = True

    def __init__(self, library: CDLL, isa: str, threads: int = 1) -> None:
        self.device = torch.device("cpu")
        self.isa = isa
        self.threads = threads
        self._c = library
        self._workers = Workers(library, threads)
        self._pool = self._workers.address
        self._native = Native(library, self._pool)
        self._packer = Packer(library, self._workers)
        self._views = CViews()

    def pack(self, weights: list[Tensor], biases: list[Tensor | None]) -> Linear:
        """Stacks [out_i, in] weights by rows; a missing bias beside present ones is zeros."""
        return self._packer.floats(weights, biases)

    def pack_q8_0(self, blocks: list[Tensor], biases: list[Tensor | None]) -> Linear:
        """GGUF Q8_0 blocks; activations are rounded to 8 bits in blocks of 32."""
        return self._packer.blocks(Kind.Q8_0, blocks, biases)

    def pack_q4_1(self, blocks: list[Tensor], biases: list[Tensor | None]) -> Linear:
        """GGUF Q4_1 blocks; activations are rounded to 8 bits in blocks of 32."""
        return self._packer.blocks(Kind.Q4_1, blocks, biases)

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        """x: [rows, in] -> [rows, out]."""
        assert isinstance(weight, NativeLinear)
        rows, width = x.shape
        if width != weight.in_features:
            raise ValueError(f"x has {width} columns, expected {weight.in_features}")
        out = torch.empty((rows, weight.out_features))
        self._c.graft_linear(self._pool, weight.address, floats(x), rows, out.data_ptr())
        return out

    def embed(self, tokens: Tensor, table: Tensor | Linear) -> Tensor:
        """tokens: [rows] int32, table: [vocab, hidden] or a packed head -> [rows, hidden]."""
        rows = tokens.shape[0]
        if isinstance(table, NativeLinear):
            out = torch.empty((rows, table.in_features))
            self._c.graft_linear_rows(table.address, ints(tokens), rows, out.data_ptr())
            return out
        assert isinstance(table, Tensor)
        hidden = table.shape[1]
        out = torch.empty((rows, hidden))
        self._c.graft_embed(ints(tokens), rows, floats(table), hidden, out.data_ptr())
        return out

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x: [..., width] -> same shape."""
        width = x.shape[-1]
        if weight.shape != (width,):
            raise ValueError(f"weight is {tuple(weight.shape)}, expected ({width},)")
        out = torch.empty(x.shape)
        self._c.graft_rms_norm(
            self._pool, floats(x), floats(weight), eps, x.numel() // width, width, out.data_ptr()
        )
        return out

    def add_(self, residual: Tensor, x: Tensor) -> None:
        """In place: residual += x."""
        if residual.shape != x.shape:
            raise ValueError(f"x is {tuple(x.shape)}, expected {tuple(residual.shape)}")
        self._c.graft_add(self._pool, floats(residual), floats(x), x.numel())

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
            heads_of(x),
            x.stride(0),
            rows,
            heads,
            dim,
            ints(positions),
            floats(table.cos),
            floats(table.sin),
            half,
        )

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[rows, 2 * width] -> [rows, width]."""
        rows, double = gate_up.shape
        out = torch.empty((rows, double // 2))
        self._c.graft_silu_mul(self._pool, floats(gate_up), rows, double // 2, out.data_ptr())
        return out

    def write_kv(self, kv: KvCache, layer: int, rows: StepRows, k: Tensor, v: Tensor) -> None:
        """In place on kv: k, v [rows, kv_heads, head_dim]; their rows may lie apart."""
        if k.shape != v.shape or k.shape[1:] != kv.keys.shape[2:]:
            raise ValueError(
                f"k is {tuple(k.shape)} and v {tuple(v.shape)}, "
                f"expected [rows, *{tuple(kv.keys.shape[2:])}]"
            )
        self._c.graft_write_kv(
            self._views.layer(kv, layer),
            self._views.step(rows),
            heads_of(k),
            heads_of(v),
            k.stride(0),
            v.stride(0),
        )

    def attend(
        self, q: Tensor, kv: KvCache, layer: int, rows: StepRows, scale: float, window: int
    ) -> Tensor:
        """q: [rows, heads, head_dim], its rows may lie apart -> [rows, heads, head_dim]."""
        num_rows, heads, dim = q.shape
        kv_heads = kv.keys.shape[2]
        if dim != kv.keys.shape[3] or heads % kv_heads or dim > 512 or heads > 128 * kv_heads:
            raise ValueError(
                f"q has {heads} heads of {dim}, expected {kv_heads} times 1 to 128 heads "
                f"of {kv.keys.shape[3]}, at most 512"
            )
        out = torch.empty((num_rows, heads, dim))
        self._c.graft_attend(
            self._pool,
            self._views.layer(kv, layer),
            self._views.step(rows),
            heads_of(q),
            q.stride(0),
            heads,
            scale,
            window,
            out.data_ptr(),
        )
        return out

    def stack(self, layers: Sequence[LayerSpec]) -> Stack | None:
        """The layers as one call into the library."""
        return NativeStack(self._c, self._workers, layers)

    def recurrent(self, spec: RecurrentSpec) -> Recurrent | None:
        """The network as one call for a forward and one for all levels of trees."""
        return NativeRecurrent(self._c, self._workers, spec)

    def choose(self, logits: Tensor, rows: ChoiceRows) -> Tensor:
        """logits: [rows, vocab] -> [rows], int32."""
        return choose(logits, rows, self._native)

    def choose_head(self, hidden: Tensor, head: Linear, rows: ChoiceRows) -> Tensor:
        """hidden: [rows, in] -> [rows], int32; in one pass where no row has a filter or a mask."""
        assert isinstance(head, NativeLinear)
        if filtered(rows, head.out_features):
            return self.choose(self.linear(hidden, head), rows)
        return choose_head(self._native, floats(hidden), head, rows)

    def accept(self, trees: TreeRows, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """chosen: [rows] -> (accept_token_num [trees], accept_index [trees, width]), int32."""
        return accept(trees, chosen, self._native)

    def keep(self, kv: KvCache, source: Tensor, target: Tensor) -> None:
        """In place on kv: one move after the other, in all layers."""
        if source.numel() == 0:
            return
        layers, slots, heads, dim = kv.keys.shape
        self._c.graft_keep(
            floats(kv.keys),
            floats(kv.values),
            layers,
            slots,
            heads * dim,
            ints(source),
            ints(target),
            source.numel(),
        )
