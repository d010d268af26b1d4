"""Reads MTP layers: of DeepSeek (NextN), MiMo, MiMo-V2 and Step-3.5, from an export of their own
or from the target's folder, where they lie beside its layers.

All of it becomes one form on load: embedding before state in the projection, norms that multiply
by their weight, values as wide as keys. Experts and latent attention are refused by name.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor

from graft.common.errors import InvalidArgument, Mismatch, ModelNotFound, Unsupported
from graft.draft.checkpoints.borrowed import Borrowed
from graft.draft.checkpoints.detect import Checkpoint
from graft.draft.checkpoints.layers import draft_decoder_config
from graft.draft.checkpoints.mtp_layouts import LAYOUTS, Layout, StepShape
from graft.draft.nets.gated import Gates
from graft.draft.nets.mtp import MtpNet, MtpStep, MtpWeights, MultiLayerNet
from graft.kernels.ops import LayerSpec, Linear, Ops, RopeTable
from graft.models.config import DecoderConfig
from graft.models.rope import rope_table

_SHARED = (r"model\.embed_tokens\.weight", r"model\.norm\.weight", r"lm_head\.weight")
_COPIES = ("embed_tokens.weight", "shared_head.head.weight", "self_attn.rotary_emb.inv_freq")
_EXPERTS = re.compile(r"(mlp\.(experts\..*|gate\.weight|shared_experts?\..*)|moe\..*)")
_LATENT = re.compile(r"self_attn\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj)\..*")
_EXPERT_KEYS = ("num_experts", "num_local_experts", "n_routed_experts")
_STEP35 = ("step3p5", "step3_5")


def layout_of(checkpoint: Checkpoint) -> Layout:
    """The layout that the names of the tensors speak for.

    Raises:
        ModelNotFound: they speak for none.
    """
    config, tensors = checkpoint.config, checkpoint.tensors
    tensors.rename(lambda name: name.replace(".transformer.shared_head.", ".shared_head."))
    if str(config.get("model_type")) in _STEP35:
        return next(layout for layout in LAYOUTS if layout.name == "Step-3.5")
    for layout in LAYOUTS:
        if any(layout.mark.fullmatch(name) for name in tensors.shapes):
            return layout
    raise ModelNotFound(
        f"draft checkpoint {tensors.name} has no MTP layer, expected the tensors of"
        f" {' or '.join(layout.prefix.format('N') for layout in LAYOUTS[:3])}"
    )


def has_own_layers(checkpoint: Checkpoint) -> bool:
    """True when every token ahead has a step of its own, so that only multi-layer EAGLE runs it.

    Raises:
        ModelNotFound: as `layout_of`.
    """
    several = checkpoint.config.get("num_nextn_predict_layers", 1) != 1
    layout = layout_of(checkpoint)
    return layout.multi_layer_only or (several and not layout.recurrent_only)


def load_mtp(checkpoint: Checkpoint, target: Borrowed, ops: Ops) -> MtpNet:
    """One step that is applied over and over.

    Raises:
        ModelNotFound: a tensor is missing, left over or mis-shaped.
        Mismatch: the checkpoint is for another target.
        Unsupported: a layout or a block that is not read here.
    """
    layout, name = layout_of(checkpoint), checkpoint.tensors.name
    if layout.multi_layer_only:
        raise Unsupported(
            f"draft checkpoint {name} has the layout of {layout.name}, with a step of its own for"
            " every token ahead: enable_multi_layer_eagle runs it"
        )
    stated = checkpoint.config.get("num_nextn_predict_layers", 1)
    if stated != 1:
        raise Unsupported(
            f"draft checkpoint {name} has num_nextn_predict_layers {stated}, expected 1:"
            " enable_multi_layer_eagle runs more"
        )
    reader = _Reader(checkpoint, layout, target, ops)
    return MtpNet(reader.weights(1), ops, target.num_layers, target.config.context_length)


def load_multi_layer(
    checkpoint: Checkpoint, target: Borrowed, ops: Ops, num_steps: int | None = None
) -> MultiLayerNet:
    """One step for every token ahead. num_steps: how many of them; None takes all there are.

    Raises:
        InvalidArgument: more steps than the checkpoint has.
        ModelNotFound, Mismatch, Unsupported: as `load_mtp`.
    """
    layout, name = layout_of(checkpoint), checkpoint.tensors.name
    if layout.recurrent_only:
        raise Unsupported(
            f"draft checkpoint {name} has the layout of {layout.name}, whose one step is applied"
            " over and over: enable_multi_layer_eagle does not go with it"
        )
    reader = _Reader(checkpoint, layout, target, ops)
    count = num_steps or reader.num_steps
    if count > reader.num_steps:
        raise InvalidArgument(
            f"num_steps {count} is over the {reader.num_steps} of draft checkpoint {name}",
            field="num_steps",
        )
    context = target.config.context_length
    return MultiLayerNet(reader.weights(count), ops, target.num_layers, context, layout.chain)


class _Reader:
    """Reads the steps of one checkpoint."""

    def __init__(self, checkpoint: Checkpoint, layout: Layout, target: Borrowed, ops: Ops) -> None:
        self.config = checkpoint.config
        self.tensors = checkpoint.tensors
        self.layout = layout
        self.target = target
        self.ops = ops
        self.hidden = target.config.hidden_size
        stated = self.config.get("hidden_size")
        if stated != self.hidden:
            raise Mismatch(
                f"draft checkpoint {self.tensors.name} has hidden_size {stated},"
                f" the target {target.name} has {self.hidden}"
            )
        names = self.tensors.shapes
        self.first = layout.first_number(self.config, names)
        numbers = {layout.number_of(name) for name in names}
        self.num_steps = sum(1 for one in numbers if one is not None and one >= self.first)
        if not self.num_steps:
            raise ModelNotFound(
                f"draft checkpoint {self.tensors.name} lacks tensor"
                f" {self._step(0)}.{layout.project}.weight"
            )

    def weights(self, count: int) -> MtpWeights:
        """The first `count` steps; further ones are left alone."""
        self._refuse_blocks(count)
        shared = None if self.layout.head else self.target.head(self.ops)
        steps = tuple(self._read(number, shared) for number in range(count))
        if len({(one.layer.qkv.out_features, one.layer.head_dim) for one in steps}) != 1:
            raise Unsupported(
                f"draft checkpoint {self.tensors.name}: the heads of its steps differ,"
                " expected the same for all"
            )
        ours = range(self.first, self.first + count)
        others = [
            re.escape(name)
            for name in self.tensors.shapes
            if (number := self.layout.number_of(name)) is not None and number not in ours
        ]
        copies = [re.escape(f"{self._step(n)}.{copy}") for n in range(count) for copy in _COPIES]
        self.tensors.finish((*_SHARED, *others, *copies))
        embedding = self.target.embedding().to(self.ops.device)
        return MtpWeights(embedding, steps, self.layout.blank_start)

    def _step(self, number: int) -> str:
        return self.layout.prefix.format(self.first + number)

    def _refuse_blocks(self, count: int) -> None:
        steps = [f"{self._step(number)}." for number in range(count)]
        for name in self.tensors.shapes:
            for step in steps:
                rest = name.removeprefix(step) if name.startswith(step) else ""
                kind = "experts" if _EXPERTS.fullmatch(rest) else ""
                kind = "latent attention" if _LATENT.fullmatch(rest) else kind
                if kind:
                    raise Unsupported(
                        f"draft checkpoint {self.tensors.name}: {name} belongs to a block with"
                        f" {kind}, which is not offered, expected a dense one"
                    )

    def _read(self, number: int, shared: Linear | None) -> MtpStep:
        layout, hidden, step = self.layout, self.hidden, self._step(number)
        shape = layout.shape(self.config, number)
        config = _decoder_keys(shape)
        project = self.tensors.weight(f"{step}.{layout.project}.weight", hidden, 2 * hidden)
        if layout.hidden_first:
            project = torch.cat([project[:, hidden:], project[:, :hidden]], dim=1).contiguous()
        vocab = self.target.config.vocab_size
        return MtpStep(
            embedding_norm=self._norm(f"{step}.{layout.embedding_norm}.weight", hidden),
            hidden_norm=self._norm(f"{step}.{layout.hidden_norm}.weight", hidden),
            project=self.ops.pack([project], [None]),
            layer=self._layer(step, shape, config),
            final_norm=self._norm(f"{step}.{layout.final_norm}.weight", hidden),
            head=shared or self._linear([f"{step}.{layout.head}"], [vocab], hidden),
            gates=self._gates(f"{step}.self_attn", config.num_heads),
        )

    def _layer(self, step: str, shape: StepShape, config: DecoderConfig) -> LayerSpec:
        hidden, wide, attention = self.hidden, config.intermediate_size, f"{step}.self_attn"
        norms = [f"{attention}.{part}_norm.weight" for part in "qk"]
        q_norm, k_norm = (
            self._norm(norm, config.head_dim) if norms[0] in self.tensors else None
            for norm in norms
        )
        return LayerSpec(
            attention_norm=self._norm(f"{step}.input_layernorm.weight", hidden),
            qkv=self._qkv(attention, shape, config),
            q_norm=q_norm,
            k_norm=k_norm,
            output=self._output(f"{attention}.o_proj", shape, config),
            mlp_norm=self._norm(f"{step}.{self.layout.mlp_norm}.weight", hidden),
            gate_up=self._linear(
                [f"{step}.mlp.gate_proj", f"{step}.mlp.up_proj"], [wide, wide], hidden
            ),
            down=self._linear([f"{step}.mlp.down_proj"], [hidden], wide),
            rope=self._rope(shape, config),
            num_heads=config.num_heads,
            head_dim=config.head_dim,
            eps=config.rms_norm_eps,
            window=shape.window,
        )

    def _qkv(self, attention: str, shape: StepShape, config: DecoderConfig) -> Linear:
        """Values are widened to the keys' width with zeros, and carry their scale."""
        dim, groups = config.head_dim, config.num_kv_heads
        value_dim = shape.value_dim or dim
        rows = {"q": config.query_width, "k": config.kv_width, "v": groups * value_dim}
        weights: list[Tensor] = []
        biases: list[Tensor | None] = []
        for part, height in rows.items():
            name = f"{attention}.{part}_proj"
            weight = self.tensors.weight(f"{name}.weight", height, self.hidden)
            bias = self.tensors.optional(f"{name}.bias", height)
            if part == "v":
                weight = _widened(weight * shape.value_scale, groups, dim)
                bias = None if bias is None else _widened(bias * shape.value_scale, groups, dim)
            weights.append(weight)
            biases.append(bias)
        return self.ops.pack(weights, biases)

    def _output(self, name: str, shape: StepShape, config: DecoderConfig) -> Linear:
        heads, value_dim = config.num_heads, shape.value_dim or config.head_dim
        weight = self.tensors.weight(f"{name}.weight", self.hidden, heads * value_dim)
        weight = _widened(weight.T.contiguous(), heads, config.head_dim).T.contiguous()
        return self.ops.pack([weight], [self.tensors.optional(f"{name}.bias", self.hidden)])

    def _rope(self, shape: StepShape, config: DecoderConfig) -> RopeTable:
        rotary = int(config.head_dim * shape.rotary_factor) // 2 * 2
        table = rope_table(config.rope, rotary, self.target.config.context_length)
        return RopeTable(table.cos.to(self.ops.device), table.sin.to(self.ops.device))

    def _gates(self, attention: str, num_heads: int) -> Gates | None:
        sinks = self.tensors.optional(f"{attention}.attention_sink_bias", num_heads)
        gate = f"{attention}.g_proj"
        if sinks is None and f"{gate}.weight" not in self.tensors:
            return None
        heads = None
        if f"{gate}.weight" in self.tensors:
            heads = self._linear([gate], [num_heads], self.hidden)
        return Gates(sinks, heads)

    def _norm(self, name: str, width: int) -> Tensor:
        weight = self.tensors.weight(name, width)
        if self.layout.plus_one:
            weight = weight + 1
        return weight.to(self.ops.device)

    def _linear(self, names: list[str], rows: list[int], columns: int) -> Linear:
        sized = list(zip(names, rows, strict=True))
        weights = [self.tensors.weight(f"{name}.weight", height, columns) for name, height in sized]
        biases = [self.tensors.optional(f"{name}.bias", height) for name, height in sized]
        return self.ops.pack(weights, biases)


def _decoder_keys(shape: StepShape) -> DecoderConfig:
    """Keys of the target's other blocks are no business of this one."""
    config: dict[str, Any] = {
        key: value for key, value in shape.config.items() if key not in _EXPERT_KEYS
    }
    plain = {"layer_types": None, "use_sliding_window": False, "partial_rotary_factor": 1.0}
    return draft_decoder_config({**config, **plain})


def _widened(tensor: Tensor, heads: int, head_dim: int) -> Tensor:
    """[heads * any, ...] -> [heads * head_dim, ...], zeros behind each head's rows."""
    parts = tensor.reshape(heads, -1, *tensor.shape[1:])
    if parts.shape[1] == head_dim:
        return tensor
    wide = torch.zeros(heads, head_dim, *tensor.shape[1:])
    wide[:, : parts.shape[1]] = parts
    return wide.reshape(heads * head_dim, *tensor.shape[1:])
