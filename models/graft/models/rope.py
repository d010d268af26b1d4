"""Tables of rotary positions for every scaling we offer. Knows no model and no device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from graft.common.errors import ModelNotFound
from graft.kernels.ops import RopeTable
from graft.models.config import RopeConfig, RopeKind


def rope_table(rope: RopeConfig, head_dim: int, max_positions: int) -> RopeTable:
    """cos and sin of positions 0 .. max_positions - 1, scaled by the attention factor."""
    frequencies = inverse_frequencies(rope, head_dim)
    scale = attention_factor(rope)
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * frequencies[None, :]
    return RopeTable(cos=angles.cos() * scale, sin=angles.sin() * scale)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """[head_dim / 2], float32: the angle that one position adds to each pair.

    Source: "YaRN" (Peng et al. 2023) and the Llama 3.1 model card's scaling; the order of the
    float32 operations follows transformers, so that the tables agree bit for bit.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    wavelengths = rope.theta**exponents
    frequencies = 1.0 / wavelengths
    if rope.kind is RopeKind.LINEAR:
        return frequencies / rope.factor
    if rope.kind is RopeKind.LLAMA3:
        return _llama3(rope, frequencies)
    if rope.kind is RopeKind.YARN:
        return _yarn(rope, wavelengths, head_dim)
    if rope.kind is RopeKind.FACTORS:
        if len(rope.factors) != head_dim // 2:
            raise ModelNotFound(
                f"the model has {len(rope.factors)} rope factors, expected {head_dim // 2}"
            )
        return frequencies / torch.tensor(rope.factors, dtype=torch.float32)
    return frequencies


def attention_factor(rope: RopeConfig) -> float:
    """The factor on cos and sin; only yarn has one that is not 1."""
    if rope.kind is not RopeKind.YARN:
        return 1.0
    if rope.attention_factor is not None:
        return rope.attention_factor
    if rope.mscale and rope.mscale_all_dim:
        return _mscale(rope.factor, rope.mscale) / _mscale(rope.factor, rope.mscale_all_dim)
    return _mscale(rope.factor, 1.0)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _llama3(rope: RopeConfig, frequencies: Tensor) -> Tensor:
    """Long waves are stretched by the factor, short ones kept, those between blended."""
    longest_kept = rope.original_context / rope.high
    shortest_stretched = rope.original_context / rope.low
    wave = 2 * math.pi / frequencies
    stretched = torch.where(wave > shortest_stretched, frequencies / rope.factor, frequencies)
    smooth = (rope.original_context / wave - rope.low) / (rope.high - rope.low)
    blended = (1 - smooth) * stretched / rope.factor + smooth * stretched
    between = (wave >= longest_kept) & (wave <= shortest_stretched)
    return torch.where(between, blended, stretched)


def _yarn(rope: RopeConfig, wavelengths: Tensor, head_dim: int) -> Tensor:
    """Blends kept and stretched frequencies by how often each turns within the old context."""

    def pair_turning(turns: float) -> float:
        ratio = rope.original_context / (turns * 2 * math.pi)
        return head_dim * math.log(ratio) / (2 * math.log(rope.theta))

    first, last = pair_turning(rope.high), pair_turning(rope.low)
    if rope.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, head_dim - 1)
    if first == last:
        last += 0.001
    ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - first) / (last - first)
    kept = 1 - ramp.clamp(0, 1)
    return 1.0 / (rope.factor * wavelengths) * (1 - kept) + 1.0 / wavelengths * kept
