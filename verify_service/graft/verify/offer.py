"""Which hidden states a replica can send, and what draft services announced that they want.

Knows sizes and ids; knows no session and no tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from graft.common.errors import GraftError, Mismatch
from graft.common.feature_codec import CODECS
from graft.common.features import FeatureSpec
from graft.v1 import features_pb2


@dataclass(frozen=True, slots=True)
class ProjectionShape:
    """A drafter's projection as far as it is announced."""

    layers: tuple[int, ...]
    final_norm: bool
    width: int


@dataclass(frozen=True, slots=True)
class FeatureOffer:
    """What can be had of the target.

    share_bytes: room for recent rows of one session. kept_bytes: for those of cached pages.
    """

    hidden_size: int
    num_layers: int
    share_bytes: int
    projections: Mapping[str, ProjectionShape] = field(default_factory=dict)
    kept_bytes: int = 0

    def check(self, spec: FeatureSpec) -> None:
        """Raises:
        Mismatch: the target has no such state, or the projection is not here or another one.
        """
        beyond = [layer for layer in spec.layers if layer > self.num_layers]
        if beyond:
            raise Mismatch(
                f"hidden state {beyond[0]} was asked for, the target has 0 to {self.num_layers}",
                field="features.layers",
            )
        if not spec.fused_id:
            return
        shape = self.projections.get(spec.fused_id)
        if shape is None:
            here = ", ".join(self.projections) or "none"
            raise Mismatch(
                f"projection {spec.fused_id} was asked for, here is {here}",
                field="features.fused_id",
            )
        if (shape.layers, shape.final_norm) != (spec.layers, spec.final_norm):
            raise Mismatch(
                f"projection {spec.fused_id} takes states {list(shape.layers)}, "
                f"asked for with {list(spec.layers)}",
                field="features.layers",
            )

    def width(self, spec: FeatureSpec) -> int:
        """Values of a row."""
        fused_width = self.projections[spec.fused_id].width if spec.fused_id else 0
        return spec.width(self.hidden_size, fused_width)

    def row_bytes(self, spec: FeatureSpec) -> int:
        """Bytes of a row."""
        return spec.bytes_per_row(self.width(spec))

    def message(self) -> features_pb2.FeatureOffer:
        """What a peer is told."""
        return features_pb2.FeatureOffer(
            codecs=CODECS,
            window_bytes=self.share_bytes,
            projections=[
                features_pb2.FeatureProjection(
                    fused_id=fused_id,
                    layers=shape.layers,
                    before_final_norm=not shape.final_norm,
                    width=shape.width,
                )
                for fused_id, shape in self.projections.items()
            ],
        )


@dataclass(frozen=True, slots=True)
class FeatureWish:
    """What a join asks for. window_tokens: how many recent rows suffice; 0 wants all."""

    spec: FeatureSpec
    window_tokens: int = 0


class Announced:
    """What the draft services that are paired now may ask for."""

    def __init__(self, offer: FeatureOffer | None) -> None:
        self.offer = offer
        self._of_stream: dict[int, tuple[FeatureSpec, ...]] = {}

    @property
    def specs(self) -> tuple[FeatureSpec, ...]:
        """All of it, each once."""
        return tuple(dict.fromkeys(s for specs in self._of_stream.values() for s in specs))

    def check(self, spec: FeatureSpec) -> None:
        """Raises:
        Mismatch: it cannot be had here.
        """
        if self.offer is None:
            raise Mismatch("this replica sends no hidden states", field="features")
        self.offer.check(spec)

    def hello(self, stream: int, specs: tuple[FeatureSpec, ...]) -> None:
        """Notes what a new stream may ask for, as far as it can be had."""
        if self.offer is None:
            return
        possible = []
        for spec in specs:
            try:
                self.offer.check(spec)
            except GraftError:
                continue  # its joins will be refused, one by one
            possible.append(spec)
        if possible:
            self._of_stream[stream] = tuple(possible)

    def gone(self, stream: int) -> None:
        """A stream ended."""
        self._of_stream.pop(stream, None)
