"""The two halves of a decoder layer, op by op. Knows weights and rows; knows no model.

Both take what is already normed and return what is added to the residual, so a layer that norms
or joins its inputs differently is written from the same halves.
"""

from __future__ import annotations

from torch import Tensor

from graft.kernels.ops import KvCache, LayerSpec, Ops, StepRows


def attention(
    ops: Ops, layer: LayerSpec, number: int, x: Tensor, rows: StepRows, kv: KvCache
) -> Tensor:
    """What each row reads from the keys it sees; writes the rows' own keys and values first.

    Shapes:
        x: [rows, layer.qkv.in_features], normed.
        returns: [rows, hidden], after the output projection.
    """
    q, k, v = heads(ops, layer, ops.linear(x, layer.qkv), rows)
    ops.write_kv(kv, number, rows, k, v)
    seen = ops.attend(q, kv, number, rows, layer.head_dim**-0.5, layer.window)
    return ops.linear(seen.view(len(seen), -1), layer.output)


def heads(ops: Ops, layer: LayerSpec, qkv: Tensor, rows: StepRows) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of rows, normed where the layer norms heads, and rotated.

    Shapes:
        qkv: [rows, layer.qkv.out_features].
        returns: [rows, heads, head_dim] and twice [rows, kv_heads, head_dim].
    """
    query = layer.num_heads * layer.head_dim
    other = (layer.qkv.out_features - query) // 2
    flat = qkv.split((query, other, other), dim=1)
    q, k, v = (part.contiguous().view(len(part), -1, layer.head_dim) for part in flat)
    if layer.q_norm is not None and layer.k_norm is not None:
        q = ops.rms_norm(q, layer.q_norm, layer.eps)
        k = ops.rms_norm(k, layer.k_norm, layer.eps)
    ops.rope_(q, rows.positions, layer.rope)
    ops.rope_(k, rows.positions, layer.rope)
    return q, k, v


def mlp(ops: Ops, layer: LayerSpec, x: Tensor) -> Tensor:
    """x: [rows, hidden], normed -> [rows, hidden]."""
    return ops.linear(ops.silu_mul(ops.linear(x, layer.gate_up)), layer.down)


def layer_(
    ops: Ops, layer: LayerSpec, number: int, hidden: Tensor, rows: StepRows, kv: KvCache
) -> None:
    """In place: hidden [rows, width] passes through one layer of the common kind."""
    normed = ops.rms_norm(hidden, layer.attention_norm, layer.eps)
    ops.add_(hidden, attention(ops, layer, number, normed, rows, kv))
    ops.add_(hidden, mlp(ops, layer, ops.rms_norm(hidden, layer.mlp_norm, layer.eps)))
