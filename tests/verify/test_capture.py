"""Rows that cannot be sent cost their own session its features, and no other's."""

from __future__ import annotations

import numpy as np
import pytest

from graft.common.feature_codec import decode, encode
from graft.common.features import FeatureSpec
from graft.v1.features_pb2 import FeatureCodec
from graft.verify.capture import _payloads

WIDTH = 6


@pytest.mark.parametrize(
    "codec", [FeatureCodec.FEATURE_CODEC_BF16, FeatureCodec.FEATURE_CODEC_INT8]
)
def test_parts_are_the_bytes_of_their_own_rows(codec: FeatureCodec.ValueType) -> None:
    spec = FeatureSpec((0,), codec=codec)
    values = np.random.default_rng(0).standard_normal((7, WIDTH)).astype(np.float32)
    payloads = _payloads(values, [1, 4, 2], spec)
    assert payloads == [
        encode(values[start:stop], codec).tobytes() for start, stop in ((0, 1), (1, 5), (5, 7))
    ]
    values[3, 2] = np.inf
    spoiled = _payloads(values, [1, 4, 2], spec)
    assert spoiled == [payloads[0], None, payloads[2]]
    assert payloads[2] is not None
    assert decode(payloads[2], 2, WIDTH, codec).shape == (2, WIDTH)
    assert _payloads(values[1:5], [4], spec) == [None]
