"""The file of a drafter's projection: what goes in comes out, and nonsense is named."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from graft.common.errors import InvalidArgument, ModelNotFound
from graft.common.features import FeatureSpec, spec_from_proto, spec_to_proto
from graft.common.projection import Projection, read_projection, write_projection
from graft.v1.features_pb2 import FeatureCodec
from graft.v1.features_pb2 import FeatureSpec as SpecMessage

RNG = np.random.default_rng(1)


def values(*shape: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return RNG.standard_normal(shape).astype(np.float32)


FULL = Projection(
    layers=(1, 4, 6),
    weight=values(8, 12),
    final_norm=False,
    bias=values(8),
    state_norms=(values(4), values(4), values(4)),
    out_norm=values(8),
    eps=1e-5,
)


@pytest.mark.parametrize(
    "projection",
    [FULL, Projection((2,), values(4, 4)), replace(FULL, state_norms=(), joined_norm=values(12))],
)
def test_a_projection_survives_its_file(projection: Projection, tmp_path: Path) -> None:
    path = tmp_path / "fused.safetensors"
    write_projection(projection, path)
    read = read_projection(path)
    assert read.fused_id == projection.fused_id
    assert (read.layers, read.final_norm, read.eps) == (
        projection.layers,
        projection.final_norm,
        projection.eps,
    )
    assert read.tensors().keys() == projection.tensors().keys()


@pytest.mark.parametrize(
    "changed",
    [
        replace(FULL, weight=FULL.weight + np.float32(1e-3)),
        replace(FULL, layers=(1, 4, 5)),
        replace(FULL, final_norm=True),
        replace(FULL, eps=1e-6),
        replace(FULL, bias=None),
    ],
)
def test_whatever_changes_the_result_changes_the_id(changed: Projection) -> None:
    assert changed.fused_id != FULL.fused_id


def test_shapes_that_do_not_go_together_are_named() -> None:
    with pytest.raises(InvalidArgument, match=r"hidden_norm.weight is \[7\], expected \[8\]"):
        replace(FULL, out_norm=values(7))
    with pytest.raises(InvalidArgument, match="2 norms were given for 3 states"):
        replace(FULL, state_norms=(values(4), values(4)))
    with pytest.raises(InvalidArgument, match="exclude each other"):
        replace(FULL, joined_norm=values(12))


def test_files_that_are_no_projection_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "other.safetensors"
    with pytest.raises(ModelNotFound, match="cannot read"):
        read_projection(path)
    path.write_bytes(b"nonsense")
    with pytest.raises(ModelNotFound, match="cannot read"):
        read_projection(path)
    save_file({"fc.weight": values(2, 2)}, path)
    with pytest.raises(ModelNotFound, match="not a feature projection"):
        read_projection(path)
    write_projection(FULL, path)
    save_file(
        {**FULL.tensors(), "odd": values(1)},
        path,
        {"layers": "1,4,6", "final_norm": "false", "eps": "1e-5"},
    )
    with pytest.raises(ModelNotFound, match="odd"):
        read_projection(path)


def test_a_spec_survives_the_wire_and_no_codec_is_bf16() -> None:
    spec = FeatureSpec((2, 0), False, FeatureCodec.FEATURE_CODEC_INT8, "ab")
    assert spec_from_proto(spec_to_proto(spec)) == spec
    assert spec_from_proto(SpecMessage(layers=[3])) == FeatureSpec((3,))
    with pytest.raises(InvalidArgument, match="0 layers"):
        spec_from_proto(SpecMessage())
    with pytest.raises(InvalidArgument, match="codec 7"):
        spec_from_proto(SpecMessage(layers=[1], codec=7))  # type: ignore[arg-type]
