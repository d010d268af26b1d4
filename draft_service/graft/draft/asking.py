"""How the hidden states that proposers need are asked for, by settings. Knows no proposer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from graft.common import log
from graft.common.errors import InvalidArgument
from graft.draft.features import FeatureNeed
from graft.draft.proposers.base import ProposerInfo
from graft.draft.settings import DraftSettings
from graft.v1.features_pb2 import FeatureCodec

_log = log.get("asking")
_CODECS = {
    "bf16": FeatureCodec.FEATURE_CODEC_BF16,
    "int8": FeatureCodec.FEATURE_CODEC_INT8,
}


def asking(infos: Mapping[str, ProposerInfo], settings: DraftSettings) -> dict[str, ProposerInfo]:
    """The infos with codec, window and projection filled in where hidden states are needed.

    Raises:
        InvalidArgument: no proposer has a projection that verify could apply.
    """
    asked = {
        name: replace(info, needs=_asked(info.needs, settings)) if info.needs else info
        for name, info in infos.items()
    }
    needs = [info.needs for info in asked.values() if info.needs is not None]
    if settings.feature_fused and not any(need.fused for need in needs):
        raise InvalidArgument(
            f"none of {', '.join(infos)} has a projection of hidden states that verify could apply",
            field="feature_fused",
        )
    if not needs and (settings.feature_codec != "bf16" or settings.feature_window):
        _log.warning(
            "settings are inactive",
            settings=["feature_codec", "feature_window"],
            reason="no proposer works from hidden states",
        )
    return asked


def _asked(need: FeatureNeed, settings: DraftSettings) -> FeatureNeed:
    return replace(
        need,
        codec=_CODECS[settings.feature_codec],
        window_tokens=settings.feature_window or need.window_tokens,
        fused=need.fused or (settings.feature_fused and bool(need.fused_id)),
    )
