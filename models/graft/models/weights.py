"""Reads a model's tensors by their Hugging Face names, from safetensors or GGUF.

Knows which tensors a decoder needs and their shapes; knows nothing of how they are laid out for
a device.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from graft.common.errors import ModelNotFound, Unsupported
from graft.common.gguf_file import GgufFile
from graft.common.gguf_model import hf_names, row_order, weight_of
from graft.common.model_files import ModelFiles, weight_files
from graft.models.config import DecoderConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

# Buffers that older checkpoints saved beside their weights; they are computed, not read.
_COMPUTED = re.compile(r".*\.(rotary_emb\.inv_freq|masked_bias|attention\.bias)")
_FLOATS = ("F32", "F16", "BF16", "F64")
_SHOWN = 3


class WeightSource(Protocol):
    """Named tensors on disk."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape by name."""

    def read(self, name: str) -> Tensor:
        """One tensor as float32; the caller may keep it."""


class SafetensorsWeights:
    """Tensors of one or several safetensors files."""

    def __init__(self, paths: list[Path]) -> None:
        """Opens all files and checks that none is cut short.

        Raises:
            ModelNotFound: a file is damaged, or two of them hold the same tensor.
            Unsupported: a tensor is not stored as floats.
        """
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._files: dict[str, Any] = {}
        for path in paths:
            try:
                file: Any = safe_open(str(path), framework="pt")
            except (SafetensorError, OSError) as error:
                raise ModelNotFound(f"{path} is damaged or cut short: {error}") from None
            for name in file.keys():
                if name in self._files:
                    raise ModelNotFound(f"{path} holds {name}, which another file holds too")
                stored = file.get_slice(name)
                if stored.get_dtype() not in _FLOATS:
                    raise Unsupported(
                        f"{path}: {name} is stored as {stored.get_dtype()},"
                        f" expected one of {', '.join(_FLOATS)}"
                    )
                self._shapes[name] = tuple(stored.get_shape())
                self._files[name] = file

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape by name."""
        return self._shapes

    def read(self, name: str) -> Tensor:
        """One tensor as float32, copied out of the mapped file."""
        stored: Tensor = self._files[name].get_tensor(name)
        return stored.to(torch.float32, copy=True)


class GgufWeights:
    """Tensors of a GGUF file, dequantised on the way or as blocks."""

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        self._names = hf_names(self._file)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor's shape by its Hugging Face name."""
        return {name: self._file.tensors[stored].shape for name, stored in self._names.items()}

    def read(self, name: str) -> Tensor:
        """One tensor as float32."""
        return torch.from_numpy(weight_of(self._file, self._names[name]).copy())

    def block_type(self, name: str) -> str:
        """The type of a tensor's blocks, for example Q4_1."""
        return self._file.tensors[self._names[name]].type_name

    def blocks(self, name: str) -> Tensor:
        """[rows, bytes of a row], uint8: the blocks as stored, rows in Hugging Face order."""
        stored = self._names[name]
        raw = self._file.blocks(stored)[row_order(self._file, stored)]
        return torch.from_numpy(raw.copy())


def open_weights(files: ModelFiles, config: DecoderConfig) -> WeightSource:
    """The tensors of a model, checked against what its decoder needs.

    Raises:
        ModelNotFound: no weights, damaged ones, or tensors missing, left over or mis-shaped.
        Unsupported: tensors of a type that is not read here.
    """
    paths = weight_files(files.folder)
    source: WeightSource
    if paths:
        source = SafetensorsWeights(paths)
    elif files.gguf is not None:
        source = GgufWeights(files.gguf)
    else:
        raise ModelNotFound(f"{files.folder} has no model.safetensors")
    _check(source.shapes(), expected_shapes(config), files.name)
    return source


def open_blocks(files: ModelFiles, config: DecoderConfig) -> GgufWeights:
    """The tensors of a model's GGUF file, checked as by `open_weights`.

    Raises:
        ModelNotFound: there is no such file, or its tensors are not what the decoder needs.
    """
    if files.gguf is None:
        raise ModelNotFound(f"model {files.name} has no GGUF file")
    source = GgufWeights(files.gguf)
    _check(source.shapes(), expected_shapes(config), files.name)
    return source


def expected_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the decoder needs."""
    hidden, wide = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {
        EMBEDDING: (config.vocab_size, hidden),
        FINAL_NORM: (hidden,),
    }
    if not config.tied_embeddings:
        shapes[HEAD] = (config.vocab_size, hidden)
    for layer in range(config.num_layers):
        name = layer_name(layer)
        shapes[f"{name}.input_layernorm.weight"] = (hidden,)
        shapes[f"{name}.post_attention_layernorm.weight"] = (hidden,)
        widths = {"q": config.query_width, "k": config.kv_width, "v": config.kv_width}
        for part, width in widths.items():
            shapes[f"{name}.self_attn.{part}_proj.weight"] = (width, hidden)
            if config.qkv_bias:
                shapes[f"{name}.self_attn.{part}_proj.bias"] = (width,)
            if config.head_norms and part != "v":
                shapes[f"{name}.self_attn.{part}_norm.weight"] = (config.head_dim,)
        shapes[f"{name}.self_attn.o_proj.weight"] = (hidden, config.query_width)
        if config.output_bias:
            shapes[f"{name}.self_attn.o_proj.bias"] = (hidden,)
        for part, rows, columns in (
            ("gate", wide, hidden),
            ("up", wide, hidden),
            ("down", hidden, wide),
        ):
            shapes[f"{name}.mlp.{part}_proj.weight"] = (rows, columns)
            if config.mlp_bias:
                shapes[f"{name}.mlp.{part}_proj.bias"] = (rows,)
    return shapes


def layer_name(layer: int) -> str:
    """The prefix of a layer's tensors."""
    return f"model.layers.{layer}"


def _check(
    found: dict[str, tuple[int, ...]], expected: dict[str, tuple[int, ...]], name: str
) -> None:
    missing = expected.keys() - found.keys()
    if missing:
        raise ModelNotFound(f"model {name} lacks {_listed(missing)}")
    for tensor, shape in expected.items():
        if found[tensor] != shape:
            raise ModelNotFound(
                f"model {name}: {tensor} has the shape {list(found[tensor])},"
                f" expected {list(shape)} from config.json"
            )
    # A saved copy of a tied head is never read, as in transformers.
    left = {one for one in found.keys() - expected.keys() if not _COMPUTED.fullmatch(one)} - {HEAD}
    if left:
        raise ModelNotFound(
            f"model {name} has {_listed(left)} left over: its layers are not what config.json says"
        )


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - _SHOWN} more" if len(ordered) > _SHOWN else ""
    word = "tensor" if len(ordered) == 1 else "tensors"
    return f"{word} {', '.join(ordered[:_SHOWN])}{more}"
