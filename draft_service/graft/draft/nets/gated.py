"""Attention with what some MTP layers add to it: sinks in the softmax, gates on the heads.

Plain torch, row by row; the rows of a drafter are few. Knows weights and rows; knows no model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graft.kernels.ops import KvCache, LayerSpec, Linear, Ops, StepRows
from graft.models.block import heads


@dataclass(frozen=True, slots=True, eq=False)
class Gates:
    """sinks: [heads], a logit that each head may spend on nothing; None has none.

    heads: hidden -> heads, how much each head's output counts, through a sigmoid; None is all.
    """

    sinks: Tensor | None = None
    heads: Linear | None = None


def gated_attention(
    ops: Ops, layer: LayerSpec, number: int, x: Tensor, rows: StepRows, kv: KvCache, gates: Gates
) -> Tensor:
    """As `graft.models.block.attention`, with sinks and gates. x: [rows, hidden], normed."""
    q, k, v = heads(ops, layer, ops.linear(x, layer.qkv), rows)
    ops.write_kv(kv, number, rows, k, v)
    scale = layer.head_dim**-0.5
    if gates.sinks is None:
        seen = ops.attend(q, kv, number, rows, scale, layer.window)
    else:
        seen = _attend(q * scale, kv, number, rows, layer.window, gates.sinks)
    if gates.heads is not None:
        # In double, so that a row's bits do not hang on where the vector units split the rows.
        shares = torch.sigmoid(ops.linear(x, gates.heads).double()).float()
        seen = seen * shares[:, :, None]
    return ops.linear(seen.reshape(len(seen), -1), layer.output)


def _attend(
    q: Tensor, kv: KvCache, number: int, rows: StepRows, window: int, sinks: Tensor
) -> Tensor:
    """q: [rows, heads, head_dim], scaled -> same shape."""
    out = torch.empty_like(q)
    num_rows, num_heads, _ = q.shape
    for row in range(num_rows):
        slots = _slots(rows, row, kv.page_tokens, window)
        keys, values = kv.keys[number][slots], kv.values[number][slots]
        groups = num_heads // keys.shape[1]
        keys, values = (one.repeat_interleave(groups, dim=1) for one in (keys, values))
        scores = torch.einsum("hd,khd->hk", q[row], keys)
        weights = torch.softmax(torch.cat([scores, sinks[:, None]], dim=1), dim=1)[:, :-1]
        out[row] = torch.einsum("hk,khd->hd", weights, values)
    return out


def _slots(rows: StepRows, row: int, page_tokens: int, window: int) -> Tensor:
    """[keys], int64: what one row sees."""
    index = torch.arange(int(rows.prefix_len[row]))
    pages = rows.page_table[int(rows.sequence[row])].long()[index // page_tokens]
    extra = rows.extra_slots[int(rows.extra_ptr[row]) : int(rows.extra_ptr[row + 1])].long()
    slots = torch.cat([pages * page_tokens + index % page_tokens, extra])
    return slots[-window:] if window else slots
