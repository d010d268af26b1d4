"""Decides how each matrix of a model is held: as float32, or as the blocks of its GGUF file.

Knows block types, and which matrices are packed together; reads no weights. Vectors are always
float32.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from graft.common.errors import Unsupported
from graft.common.model_cache import Progress
from graft.common.model_files import ModelFiles, resolve
from graft.models.config import DecoderConfig
from graft.models.weights import (
    EMBEDDING,
    HEAD,
    GgufWeights,
    expected_shapes,
    layer_name,
    open_blocks,
)


class Precision(StrEnum):
    """What weights are held as. AUTO takes the file's blocks where there are kernels for them."""

    AUTO = "auto"
    FP32 = "fp32"
    Q8_0 = "q8_0"
    Q4_1 = "q4_1"


# Bytes that hold 32 weights.
_BLOCK_BYTES = {Precision.FP32: 128, Precision.Q8_0: 34, Precision.Q4_1: 20}
_KERNELS = {"Q8_0": Precision.Q8_0, "Q4_1": Precision.Q4_1}


@dataclass(frozen=True, slots=True)
class Storage:
    """How every matrix is held. forms: by the matrix's Hugging Face name, never AUTO.

    unpacked: block types of the file that are held as float32 instead.
    """

    forms: Mapping[str, Precision]
    shapes: Mapping[str, tuple[int, ...]]
    unpacked: tuple[str, ...] = ()

    @property
    def summary(self) -> str:
        """The forms in use, the one of most weights first: "fp32", "q4_1+q8_0"."""
        weights: Counter[Precision] = Counter()
        for name, form in self.forms.items():
            weights[form] += math.prod(self.shapes[name])
        return "+".join(form.value for form, _ in weights.most_common())

    def num_bytes(self, keeps_blocks: bool) -> int:
        """Bytes of all weights, by ops that keep blocks or not (`Ops.keeps_blocks`)."""
        total = 0
        for name, shape in self.shapes.items():
            form = self.forms.get(name, Precision.FP32) if keeps_blocks else Precision.FP32
            total += math.prod(shape) * _BLOCK_BYTES[form] // 32
        return total


def resolve_for(model: str, precision: Precision, progress: Progress | None = None) -> ModelFiles:
    """The files of a model; a GGUF file whose blocks will be used is not converted first.

    Raises:
        ModelNotFound, Unsupported: as `resolve`, or there is no GGUF file to take blocks from.
    """
    if precision is Precision.FP32:
        return resolve(model, weights=True, progress=progress)
    files = resolve(model, weights=False, progress=progress)
    if files.gguf is not None:
        return files
    if precision is Precision.AUTO:
        return resolve(model, weights=True, progress=progress)
    raise Unsupported(
        f"precision {precision} takes its blocks from a GGUF file, and model {files.name} has"
        " none: give a .gguf file as the model, or use fp32"
    )


def storage_of(
    files: ModelFiles, config: DecoderConfig, precision: Precision = Precision.FP32
) -> Storage:
    """How the weights of `files` will be held.

    Matrices that are packed together (q, k and v; gate and up) share a form; where their types
    differ they are float32.

    Raises:
        Unsupported: the file's matrices are mostly of another type than the one asked for.
        ModelNotFound: as `open_blocks`.
    """
    shapes = expected_shapes(config)
    groups = [[name] for name in (EMBEDDING, HEAD) if name in shapes] + _layer_groups(config)
    if precision is Precision.FP32 or (precision is Precision.AUTO and files.gguf is None):
        return _floats(groups, shapes)
    source = open_blocks(files, config)
    main = _main_type(source, _layer_groups(config), shapes)
    wanted = _KERNELS.get(main)
    if precision is Precision.AUTO and wanted is None:
        return _floats(groups, shapes)
    if precision is not Precision.AUTO and precision is not wanted:
        raise Unsupported(
            f"precision {precision} was asked for, and model {files.name} is stored as"
            f" {main.lower()}: ask for {'auto' if wanted else 'fp32'}"
        )
    forms: dict[str, Precision] = {}
    unpacked: set[str] = set()
    for group in groups:
        types = {source.block_type(name) for name in group}
        form = _KERNELS.get(next(iter(types))) if len(types) == 1 else None
        if form is None:
            unpacked |= types - {"F32"}
        forms.update(dict.fromkeys(group, form or Precision.FP32))
    return Storage(forms, shapes, tuple(sorted(unpacked)))


def _floats(groups: list[list[str]], shapes: Mapping[str, tuple[int, ...]]) -> Storage:
    return Storage({name: Precision.FP32 for group in groups for name in group}, shapes)


def _main_type(
    source: GgufWeights, groups: list[list[str]], shapes: Mapping[str, tuple[int, ...]]
) -> str:
    """The block type of most weights of the layers; embedding and head often have another."""
    weights: Counter[str] = Counter()
    for group in groups:
        for name in group:
            weights[source.block_type(name)] += math.prod(shapes[name])
    return weights.most_common(1)[0][0]


def _layer_groups(config: DecoderConfig) -> list[list[str]]:
    """Names of the layers' matrices that are packed together."""
    groups: list[list[str]] = []
    for number in range(config.num_layers):
        name = layer_name(number)
        for parts in (
            [f"self_attn.{part}_proj" for part in "qkv"],
            ["self_attn.o_proj"],
            ["mlp.gate_proj", "mlp.up_proj"],
            ["mlp.down_proj"],
        ):
            groups.append([f"{name}.{part}.weight" for part in parts])
    return groups
