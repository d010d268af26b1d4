"""Loads a model to serve or to draft with: its config, and weights laid out for a device.

Knows files and the order of packing; how memory is shared out is decided by its caller, with
`estimate_memory` before anything is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graft.common.errors import InvalidArgument, ModelNotFound
from graft.common.model_cache import Progress
from graft.common.model_files import ModelFiles, read_json, tokenizer_digest
from graft.kernels.ops import LayerSpec, Linear, Ops, RopeTable
from graft.models.config import DecoderConfig, decoder_config
from graft.models.decoder import Decoder, DecoderWeights
from graft.models.rope import rope_table
from graft.models.storage import Precision, Storage, storage_of
from graft.models.weights import (
    EMBEDDING,
    FINAL_NORM,
    HEAD,
    GgufWeights,
    WeightSource,
    layer_name,
    open_blocks,
    open_weights,
)

_FLOAT_BYTES = 4


@dataclass(frozen=True, slots=True, eq=False)
class Target:
    """A model that is ready to run. context_length counts tokens, prompt and answer together.

    precision: what the matrices are held as, the form of most weights first: `Storage.summary`.
    """

    name: str
    decoder: Decoder
    config: DecoderConfig
    eos_token_ids: tuple[int, ...]
    vocab_size: int
    context_length: int
    tokenizer_digest: str
    precision: str = "fp32"


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes that serving needs: the weights once, keys and values for every cached token."""

    weight_bytes: int
    kv_bytes_per_token: int


def read_config(files: ModelFiles) -> DecoderConfig:
    """The decoder's shape, without touching weights.

    Raises:
        ModelNotFound: config.json is missing or damaged.
        Unsupported: the decoder cannot run such a model.
    """
    return decoder_config(read_json(files.folder / "config.json"))


def estimate_memory(
    config: DecoderConfig, storage: Storage, ops: Ops, context_length: int = 0
) -> MemoryEstimate:
    """What weights, rope tables and key-value slots of this shape take.

    storage, context_length: what `load_target` will be given.
    """
    rope = (context_length or config.context_length) * config.head_dim
    return MemoryEstimate(
        weight_bytes=storage.num_bytes(ops.keeps_blocks) + rope * _FLOAT_BYTES,
        kv_bytes_per_token=2 * config.num_layers * config.kv_width * _FLOAT_BYTES,
    )


def load_target(
    files: ModelFiles,
    ops: Ops,
    progress: Progress | None = None,
    context_length: int = 0,
    storage: Storage | None = None,
) -> Target:
    """Reads and packs a model; `progress` hears the share that is done.

    context_length: shortens the model's own; 0 keeps it.
    storage: of `storage_of` for these files; None holds everything as float32.

    Raises:
        InvalidArgument: context_length is longer than the model's.
        ModelNotFound: a file is missing, damaged or at odds with config.json.
        Unsupported: the decoder cannot run such a model.
    """
    config = read_config(files)
    if context_length > config.context_length:
        raise InvalidArgument(
            f"context_length {context_length} is over the {config.context_length}"
            f" of model {files.name}",
            field="context_length",
        )
    context = context_length or config.context_length
    digest = tokenizer_digest(files.folder)
    eos = _eos_token_ids(files, config)
    held = storage or storage_of(files, config)
    table = rope_table(config.rope, config.head_dim, context)
    rope = RopeTable(cos=table.cos.to(ops.device), sin=table.sin.to(ops.device))
    weights = _Packer(_source(files, config, held), ops, config, held).packed(rope, progress)
    return Target(
        name=files.name,
        decoder=Decoder(config, weights, ops),
        config=config,
        eos_token_ids=eos,
        vocab_size=config.vocab_size,
        context_length=context,
        tokenizer_digest=digest,
        precision=held.summary,
    )


class _Packer:
    """Moves tensors from disk into the device's layout, one layer at a time."""

    def __init__(
        self, source: WeightSource, ops: Ops, config: DecoderConfig, storage: Storage
    ) -> None:
        self.source = source
        self.ops = ops
        self.config = config
        self.forms = storage.forms

    def packed(self, rope: RopeTable, progress: Progress | None) -> DecoderWeights:
        layers = []
        for number in range(self.config.num_layers):
            layers.append(self._layer(number, rope))
            if progress is not None:
                progress("loading weights", (number + 1) / (self.config.num_layers + 1))
        tied = self.config.tied_embeddings
        head = self._linear([EMBEDDING if tied else HEAD], bias=False)
        weights = DecoderWeights(
            embedding=head if tied else self._table(),
            layers=tuple(layers),
            final_norm=self._tensor(FINAL_NORM),
            head=head,
        )
        if progress is not None:
            progress("loading weights", 1.0)
        return weights

    def _layer(self, number: int, rope: RopeTable) -> LayerSpec:
        config, name = self.config, layer_name(number)
        norms = [f"{name}.self_attn.{part}_norm.weight" for part in "qk"]
        q_norm, k_norm = (self._tensor(one) if config.head_norms else None for one in norms)
        queries = [f"{name}.self_attn.{part}_proj.weight" for part in "qkv"]
        wide = [f"{name}.mlp.{part}_proj.weight" for part in ("gate", "up")]
        return LayerSpec(
            attention_norm=self._tensor(f"{name}.input_layernorm.weight"),
            qkv=self._linear(queries, config.qkv_bias),
            q_norm=q_norm,
            k_norm=k_norm,
            output=self._linear([f"{name}.self_attn.o_proj.weight"], config.output_bias),
            mlp_norm=self._tensor(f"{name}.post_attention_layernorm.weight"),
            gate_up=self._linear(wide, config.mlp_bias),
            down=self._linear([f"{name}.mlp.down_proj.weight"], config.mlp_bias),
            rope=rope,
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            window=config.windows[number],
        )

    def _table(self) -> Tensor | Linear:
        """The embedding of a model whose head is another matrix."""
        if self.forms[EMBEDDING] is Precision.FP32:
            return self._tensor(EMBEDDING)
        return self._linear([EMBEDDING], bias=False)

    def _linear(self, names: list[str], bias: bool) -> Linear:
        biases: list[Tensor | None] = [
            self._tensor(name.removesuffix("weight") + "bias") if bias else None for name in names
        ]
        form = self.forms[names[0]]
        if form is Precision.FP32:
            return self.ops.pack([self._tensor(name) for name in names], biases)
        assert isinstance(self.source, GgufWeights)
        blocks = [self.source.blocks(name).to(self.ops.device) for name in names]
        pack = self.ops.pack_q8_0 if form is Precision.Q8_0 else self.ops.pack_q4_1
        return pack(blocks, biases)

    def _tensor(self, name: str) -> Tensor:
        return self.source.read(name).to(self.ops.device, torch.float32)


def _source(files: ModelFiles, config: DecoderConfig, storage: Storage) -> WeightSource:
    """The file that the forms are in; blocks are only in a GGUF file."""
    if all(form is Precision.FP32 for form in storage.forms.values()):
        return open_weights(files, config)
    return open_blocks(files, config)


def _eos_token_ids(files: ModelFiles, config: DecoderConfig) -> tuple[int, ...]:
    """generation_config.json's word, else config.json's; a model may have none."""
    stated = None
    if (files.folder / "generation_config.json").is_file():
        stated = read_json(files.folder / "generation_config.json").get("eos_token_id")
    if stated is None:
        stated = read_json(files.folder / "config.json").get("eos_token_id")
    listed = stated if isinstance(stated, list) else [] if stated is None else [stated]
    for token in listed:
        if not isinstance(token, int) or not 0 <= token < config.vocab_size:
            raise ModelNotFound(
                f"model {files.name}: eos_token_id {token!r} is no id below {config.vocab_size}"
            )
    return tuple(dict.fromkeys(listed))
