"""Which hidden states of the target travel, and how a row of them is named on the wire.

Knows specs and sizes; the bytes of a row are in `feature_codec`. Knows no model and no session.
"""

from __future__ import annotations

from dataclasses import dataclass

from graft.common.errors import InvalidArgument
from graft.common.feature_codec import CODECS, row_bytes
from graft.v1.features_pb2 import FeatureCodec
from graft.v1.features_pb2 import FeatureSpec as SpecMessage

MAX_LAYERS = 64


@dataclass(frozen=True, slots=True)
class FeatureSpec:
    """What one row holds. Equal specs give equal bytes.

    layers: in the numbering of Hugging Face, side by side in this order: 0 is the embedding, i
        what layer i - 1 (from zero) left behind.
    final_norm: the last state of all is taken after the target's final norm, else before it.
    fused_id: the projection that verify applies before it writes a row; empty applies none.
    """

    layers: tuple[int, ...]
    final_norm: bool = True
    codec: FeatureCodec.ValueType = FeatureCodec.FEATURE_CODEC_BF16
    fused_id: str = ""

    def width(self, hidden_size: int, fused_width: int = 0) -> int:
        """Values of a row; `fused_width` is what the projection makes of it."""
        return fused_width if self.fused_id else len(self.layers) * hidden_size

    def bytes_per_row(self, width: int) -> int:
        """Bytes of a row of `width` values."""
        return row_bytes(width, self.codec)


def spec_from_proto(message: SpecMessage) -> FeatureSpec:
    """Reads the wire form, where no codec is bf16.

    Raises:
        InvalidArgument: no layer is named, or far too many, or the codec is unknown.
    """
    if not 0 < len(message.layers) <= MAX_LAYERS:
        raise InvalidArgument(
            f"features name {len(message.layers)} layers, expected 1 to {MAX_LAYERS}",
            field="features.layers",
        )
    codec = message.codec or FeatureCodec.FEATURE_CODEC_BF16
    if codec not in CODECS:
        raise InvalidArgument(f"feature codec {codec} is not known here", field="features.codec")
    return FeatureSpec(
        layers=tuple(message.layers),
        final_norm=not message.before_final_norm,
        codec=codec,
        fused_id=message.fused_id,
    )


def spec_to_proto(spec: FeatureSpec) -> SpecMessage:
    """The wire form."""
    return SpecMessage(
        layers=spec.layers,
        before_final_norm=not spec.final_norm,
        codec=spec.codec,
        fused_id=spec.fused_id,
    )
