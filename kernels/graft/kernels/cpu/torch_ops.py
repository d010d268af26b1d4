"""The fallback device: every op in plain torch on the CPU.

Serves where no compiler built the native library. Its matrix products are torch's own, whose
reduction order depends on the number of rows, so it is not batch-invariant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from graft.kernels.cpu.accept import accept
from graft.kernels.cpu.choose import choose
from graft.kernels.cpu.gguf_blocks import unpack_q4_1, unpack_q8_0
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


@dataclass(frozen=True, slots=True, eq=False)
class TorchLinear:
    """weight: [out, in], float32; bias: [out] or None."""

    weight: Tensor
    bias: Tensor | None

    @property
    def in_features(self) -> int:
        """Width of the input."""
        return int(self.weight.shape[1])

    @property
    def out_features(self) -> int:
        """Width of the output."""
        return int(self.weight.shape[0])

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        bias = 0 if self.bias is None else self.bias.numel() * 4
        return int(self.weight.numel() * 4 + bias)


class TorchOps:
    """Ops by torch; `threads` sets torch's thread count for the whole process."""

    name = "torch"
    batch_invariant = False
    keeps_blocks = False

    def __init__(self, threads: int = 1) -> None:
        self.device = torch.device("cpu")
        torch.set_num_threads(threads)

    def pack(self, weights: list[Tensor], biases: list[Tensor | None]) -> Linear:
        """Stacks [out_i, in] weights by rows; a missing bias beside present ones is zeros."""
        weight = torch.cat([w.float() for w in weights]).contiguous()
        if all(b is None for b in biases):
            return TorchLinear(weight, None)
        parts = [
            torch.zeros(w.shape[0]) if b is None else b.float()
            for w, b in zip(weights, biases, strict=True)
        ]
        return TorchLinear(weight, torch.cat(parts))

    def pack_q8_0(self, blocks: list[Tensor], biases: list[Tensor | None]) -> Linear:
        """Unpacks GGUF Q8_0 blocks to float32."""
        return self.pack([unpack_q8_0(raw) for raw in blocks], biases)

    def pack_q4_1(self, blocks: list[Tensor], biases: list[Tensor | None]) -> Linear:
        """Unpacks GGUF Q4_1 blocks to float32."""
        return self.pack([unpack_q4_1(raw) for raw in blocks], biases)

    def linear(self, x: Tensor, weight: Linear) -> Tensor:
        """x: [rows, in] -> [rows, out]."""
        assert isinstance(weight, TorchLinear)
        return F.linear(x, weight.weight, weight.bias)

    def embed(self, tokens: Tensor, table: Tensor | Linear) -> Tensor:
        """tokens: [rows] -> [rows, hidden]; a packed head serves as the table of tied models."""
        weight = table.weight if isinstance(table, TorchLinear) else table
        assert isinstance(weight, Tensor)
        return weight[tokens.long()].float()

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x: [..., width] -> same shape."""
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight

    def add_(self, residual: Tensor, x: Tensor) -> None:
        """In place: residual += x."""
        residual.add_(x)

    def rope_(self, x: Tensor, positions: Tensor, table: RopeTable) -> None:
        """In place: rotates the first 2 * table width entries of every head."""
        half = table.cos.shape[1]
        cos = table.cos[positions.long()].unsqueeze(1)
        sin = table.sin[positions.long()].unsqueeze(1)
        first, second = x[..., :half].clone(), x[..., half : 2 * half].clone()
        x[..., :half] = first * cos - second * sin
        x[..., half : 2 * half] = second * cos + first * sin

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """[rows, 2 * width] -> [rows, width]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def write_kv(self, kv: KvCache, layer: int, rows: StepRows, k: Tensor, v: Tensor) -> None:
        """In place on kv: each row's key and value go to its write slot."""
        slots = rows.write_slots.long()
        kv.keys[layer].index_copy_(0, slots, k)
        kv.values[layer].index_copy_(0, slots, v)

    def attend(
        self, q: Tensor, kv: KvCache, layer: int, rows: StepRows, scale: float, window: int
    ) -> Tensor:
        """q: [rows, heads, head_dim] -> same shape; each sequence gathers its keys once."""
        out = torch.empty_like(q)
        for sequence in rows.sequence.unique().tolist():
            members = (rows.sequence == sequence).nonzero().squeeze(1)
            slots, visible = _keys_of(rows, sequence, members, kv.page_tokens, window)
            keys, values = kv.keys[layer][slots], kv.values[layer][slots]
            out[members] = _attend(q[members], keys, values, visible, scale)
        return out

    def stack(self, layers: Sequence[LayerSpec]) -> Stack | None:
        """None: layers run op by op."""
        return None

    def recurrent(self, spec: RecurrentSpec) -> Recurrent | None:
        """None: draft networks run op by op."""
        return None

    def choose(self, logits: Tensor, rows: ChoiceRows) -> Tensor:
        """logits: [rows, vocab] -> [rows], int32."""
        return choose(logits, rows)

    def choose_head(self, hidden: Tensor, head: Linear, rows: ChoiceRows) -> Tensor:
        """hidden: [rows, in] -> [rows], int32; by way of the logits."""
        return self.choose(self.linear(hidden, head), rows)

    def accept(self, trees: TreeRows, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """chosen: [rows] -> (accept_token_num [trees], accept_index [trees, width]), int32."""
        return accept(trees, chosen)

    def keep(self, kv: KvCache, source: Tensor, target: Tensor) -> None:
        """In place on kv: one move after the other, in all layers."""
        for old, new in zip(source.tolist(), target.tolist(), strict=True):
            kv.keys[:, new] = kv.keys[:, old]
            kv.values[:, new] = kv.values[:, old]


def _keys_of(
    rows: StepRows, sequence: int, members: Tensor, page_tokens: int, window: int
) -> tuple[Tensor, Tensor]:
    """Slots of all keys that some member sees: [keys], and who sees which: [members, keys], bool.

    Keys of the page table come first, then the extra slots of each member.
    """
    prefix = rows.prefix_len[members].long()
    begin, end = rows.extra_ptr[members].long(), rows.extra_ptr[members + 1].long()
    length = int(prefix.max())
    index = torch.arange(length)
    pages = rows.page_table[sequence].long()[index // page_tokens]
    slots = [pages * page_tokens + index % page_tokens]
    number = [index.expand(len(members), -1)]  # of the key, as each member counts
    owned = [index < prefix.unsqueeze(1)]
    for line, (low, high) in enumerate(zip(begin.tolist(), end.tolist(), strict=True)):
        slots.append(rows.extra_slots[low:high].long())
        number.append((torch.arange(high - low) + prefix[line]).expand(len(members), -1))
        mine = torch.zeros(len(members), high - low, dtype=torch.bool)
        mine[line] = True
        owned.append(mine)
    visible = torch.cat(owned, dim=1)
    if window > 0:
        first = (prefix + end - begin - window).unsqueeze(1)
        visible &= torch.cat(number, dim=1) >= first
    return torch.cat(slots), visible


def _attend(q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, scale: float) -> Tensor:
    """q: [rows, heads, dim], keys and values: [keys, kv_heads, dim], visible: [rows, keys]."""
    num_rows, heads, dim = q.shape
    kv_heads = keys.shape[1]
    grouped = q.view(num_rows, kv_heads, heads // kv_heads, dim)
    scores = torch.einsum("rhgd,khd->rhgk", grouped, keys) * scale
    scores = scores.masked_fill(~visible[:, None, None, :], float("-inf"))
    mixed = torch.einsum("rhgk,khd->rhgd", torch.softmax(scores, dim=-1), values)
    return mixed.reshape(num_rows, heads, dim)
