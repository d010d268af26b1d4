"""Rows of float32 as bytes and back: bf16, and int8 with one scale a row. numpy only.

Every row takes the same number of bytes, so rows are cut and joined without being decoded.
Decoding an int8 row gives each value within half a scale; the scale is the row's greatest
magnitude over 127.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from graft.common.errors import InvalidArgument, NumericFailure
from graft.common.tree import FloatArray
from graft.v1.features_pb2 import FeatureCodec

ByteArray = npt.NDArray[np.uint8]

CODECS = (FeatureCodec.FEATURE_CODEC_BF16, FeatureCodec.FEATURE_CODEC_INT8)
_SCALE_BYTES = 4
_INT8_MAX = 127.0
_BF16_EXPONENT = 0x7F80


def row_bytes(width: int, codec: FeatureCodec.ValueType) -> int:
    """Bytes of a row of `width` values.

    Raises:
        InvalidArgument: the codec is unknown.
    """
    _check_codec(codec)
    return 2 * width if codec == FeatureCodec.FEATURE_CODEC_BF16 else _SCALE_BYTES + width


def encode(rows: FloatArray, codec: FeatureCodec.ValueType) -> ByteArray:
    """rows: [rows, width], float32 -> [rows, row_bytes(width)], uint8.

    Raises:
        InvalidArgument: the codec is unknown.
        NumericFailure: a value is not finite, or too large for bf16.
    """
    _check_codec(codec)
    values = np.ascontiguousarray(rows, "<f4")
    if not np.isfinite(values).all():
        raise NumericFailure("a feature is not a finite number")
    if codec == FeatureCodec.FEATURE_CODEC_BF16:
        return _encode_bf16(values)
    return _encode_int8(values)


def decode(payload: bytes, num_rows: int, width: int, codec: FeatureCodec.ValueType) -> FloatArray:
    """[num_rows, width], float32.

    Raises:
        InvalidArgument: the codec is unknown, or the payload has another size.
        NumericFailure: a value is not finite, or a scale is below zero.
    """
    expected = num_rows * row_bytes(width, codec)
    if len(payload) != expected:
        raise InvalidArgument(
            f"{num_rows} feature rows of {width} values came as {len(payload)} bytes, "
            f"expected {expected}",
            field="features",
        )
    if codec == FeatureCodec.FEATURE_CODEC_BF16:
        halves = np.frombuffer(payload, "<u2").reshape(num_rows, width)
        values = (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)
        if not np.isfinite(values).all():
            raise NumericFailure("a feature that came is not a finite number")
        return values
    lines = np.frombuffer(payload, np.uint8).reshape(num_rows, _SCALE_BYTES + width)
    scales = lines[:, :_SCALE_BYTES].copy().view("<f4")
    if not (np.isfinite(scales) & (scales >= 0)).all():
        raise NumericFailure("the scale of a feature row is not a finite number from 0 on")
    steps = lines[:, _SCALE_BYTES:].view(np.int8)
    with np.errstate(over="ignore"):
        decoded: FloatArray = steps.astype(np.float32) * scales.astype(np.float32)
    if not np.isfinite(decoded).all():
        raise NumericFailure("a feature that came is not a finite number")
    return decoded


def _encode_bf16(values: npt.NDArray[Any]) -> ByteArray:
    """Round to nearest, ties to even, on the bits."""
    bits = values.view("<u4")
    half = np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    rounded = ((bits + half) >> np.uint32(16)).astype("<u2")
    if ((rounded & _BF16_EXPONENT) == _BF16_EXPONENT).any():
        raise NumericFailure("a feature is too large for bf16")
    lines: ByteArray = rounded.view(np.uint8).reshape(len(values), 2 * values.shape[1])
    return lines


def _encode_int8(values: npt.NDArray[Any]) -> ByteArray:
    scales = np.abs(values).max(axis=1, initial=0.0, keepdims=True) / np.float32(_INT8_MAX)
    # A scale that rounds to zero would lose the row; such values are zero for any use.
    divisors = np.where(scales > 0, scales, np.float32(1))
    steps = np.clip(np.rint(values / divisors), -_INT8_MAX, _INT8_MAX).astype(np.int8)
    steps[scales[:, 0] == 0] = 0
    lines = np.empty((len(values), _SCALE_BYTES + values.shape[1]), np.uint8)
    lines[:, :_SCALE_BYTES] = scales.astype("<f4").view(np.uint8)
    lines[:, _SCALE_BYTES:] = steps.view(np.uint8)
    return lines


def _check_codec(codec: int) -> None:
    if codec not in CODECS:
        raise InvalidArgument(f"feature codec {codec} is not known here", field="features.codec")
