"""Rows of hidden states as bytes: exact sizes, exact rounding, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from graft.common.errors import InvalidArgument, NumericFailure
from graft.common.feature_codec import decode, encode, row_bytes
from graft.v1.features_pb2 import FeatureCodec

BF16 = FeatureCodec.FEATURE_CODEC_BF16
INT8 = FeatureCodec.FEATURE_CODEC_INT8


def random_rows(
    num_rows: int = 7, width: int = 33
) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    rng = np.random.default_rng(3)
    magnitudes = np.exp(rng.uniform(-20, 20, (num_rows, 1)))
    return (rng.standard_normal((num_rows, width)) * magnitudes).astype(np.float32)


def test_bf16_rounds_as_torch_does() -> None:
    rows = random_rows()
    rows[0, :4] = [1.00390625, 1.01171875, -1.00390625, 1e-40]  # ties, and a denormal
    decoded = decode(encode(rows, BF16).tobytes(), *rows.shape, BF16)
    expected = torch.from_numpy(rows).to(torch.bfloat16).float().numpy()
    assert np.array_equal(decoded, expected)


def test_int8_is_within_half_a_scale_of_every_value() -> None:
    rows = random_rows()
    decoded = decode(encode(rows, INT8).tobytes(), *rows.shape, INT8)
    scale = np.abs(rows).max(axis=1, keepdims=True) / 127
    assert (np.abs(decoded - rows) <= 0.5001 * scale).all()


@pytest.mark.parametrize("codec", [BF16, INT8])
def test_rows_of_zeros_stay_zeros(codec: FeatureCodec.ValueType) -> None:
    rows = np.zeros((2, 5), np.float32)
    rows[1] = 1e-45
    decoded = decode(encode(rows, codec).tobytes(), 2, 5, codec)
    assert np.array_equal(decoded, np.zeros((2, 5)))


def test_sizes_are_exact() -> None:
    assert row_bytes(576, BF16) == 1152 == encode(np.ones((1, 576), np.float32), BF16).size
    assert row_bytes(576, INT8) == 580 == encode(np.ones((1, 576), np.float32), INT8).size
    assert encode(np.ones((0, 8), np.float32), INT8).shape == (0, 12)
    assert encode(np.ones((0, 8), np.float32), BF16).size == 0


@pytest.mark.parametrize("codec", [BF16, INT8])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_values_that_are_no_numbers_are_not_encoded(
    codec: FeatureCodec.ValueType, bad: float
) -> None:
    rows = np.ones((2, 3), np.float32)
    rows[1, 2] = bad
    with pytest.raises(NumericFailure):
        encode(rows, codec)


def test_a_value_that_rounds_to_infinity_is_not_encoded() -> None:
    with pytest.raises(NumericFailure, match="too large"):
        encode(np.full((1, 2), np.finfo(np.float32).max, np.float32), BF16)


@pytest.mark.parametrize("payload", [b"\x80\x7f" * 4, b"\xc0\xff" * 4])
def test_bf16_bytes_that_are_no_numbers_are_refused(payload: bytes) -> None:
    with pytest.raises(NumericFailure):
        decode(payload, 2, 2, BF16)


@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0, 3e38])
def test_int8_scales_that_are_no_numbers_are_refused(scale: float) -> None:
    payload = np.float32(scale).tobytes() + b"\x7f\x01"
    with pytest.raises(NumericFailure):
        decode(payload, 1, 2, INT8)


@pytest.mark.parametrize("codec", [BF16, INT8])
@pytest.mark.parametrize("change", [-1, 1])
def test_payloads_of_another_size_are_refused(codec: FeatureCodec.ValueType, change: int) -> None:
    payload = bytes(row_bytes(4, codec) * 3 + change)
    with pytest.raises(InvalidArgument, match="3 feature rows of 4 values"):
        decode(payload, 3, 4, codec)


def test_an_unknown_codec_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="codec 9"):
        encode(np.ones((1, 1), np.float32), 9)  # type: ignore[arg-type]
