"""DFlash a second time, in plain torch over whole sequences, by the published tensor names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from graft.common.tree import FloatArray

_ALIASES = {
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
}


class DenseDflash:
    """A DFlash drafter in float64; context and block in one dense attention, masks spelled out."""

    def __init__(self, folder: Path, target: Path) -> None:
        held = {name: x.double() for name, x in load_file(folder / "model.safetensors").items()}
        held = {name.removeprefix("model."): x for name, x in held.items()}
        self.w = {_ALIASES.get(name, name): x for name, x in held.items()}
        config = json.loads((folder / "config.json").read_text())
        self.config: dict[str, Any] = {
            **config,
            **config.get("transformer_layer_config", {}),
            **config.get("dflash_config", {}),
        }
        borrowed = load_file(target / "model.safetensors")
        self.embedding = borrowed["model.embed_tokens.weight"].double()
        self.head = borrowed.get("lm_head.weight", self.embedding).double()
        self.head = self.w.get("lm_head.weight", self.head)
        self.mask = self.embedding[self.config["mask_token_id"]]
        side = folder / "mask_embedding.pt"
        if side.is_file():
            self.mask = torch.load(side, weights_only=True)["embedding"].double()

    def logits(self, root: int, states: FloatArray) -> Tensor:
        """[block - 1, draft vocab], of a block behind `states`: [committed, width]."""
        config = self.config
        size, seen = config["block_size"], len(states)
        context = torch.from_numpy(states).double() @ self.w["fc.weight"].T
        context = self.norm(context, "hidden_norm")
        x = torch.stack([self.embedding[root], *[self.mask] * (size - 1)])
        x = x * config.get("input_embedding_scale", 1.0)
        kinds = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
        for number, kind in enumerate(kinds):
            name = f"layers.{number}"
            normed = self.norm(x, f"{name}.input_layernorm")
            x = x + self.attend(normed, context, name, self.visible(kind, seen, size))
            normed = self.norm(x, f"{name}.post_attention_layernorm")
            gate = torch.nn.functional.silu(normed @ self.w[f"{name}.mlp.gate_proj.weight"].T)
            up = normed @ self.w[f"{name}.mlp.up_proj.weight"].T
            x = x + (gate * up) @ self.w[f"{name}.mlp.down_proj.weight"].T
        return self.norm(x, "norm")[1:] @ self.head.T

    def visible(self, kind: str, seen: int, size: int) -> Tensor:
        """[block, context + block], bool."""
        sliding = kind == "sliding_attention"
        causal = self.config.get("is_causal")
        if causal is None:
            causal = sliding and not self.config.get("sliding_window_non_causal")
        window = self.config["sliding_window"] if sliding else None
        mask = torch.ones(size, seen + size, dtype=torch.bool)
        for row in range(size):
            for key in range(seen + size):
                distance = seen + row - key
                if causal and distance < 0:
                    mask[row, key] = False
                if window is not None and abs(distance) >= window:
                    mask[row, key] = False
        return mask

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()
        return x / scale * self.w[f"{name}.weight"]

    def turn(self, x: Tensor, positions: Sequence[int]) -> Tensor:
        dim = x.shape[-1]
        angle = torch.tensor(list(positions)).double()[:, None] * self.config["rope_theta"] ** (
            -torch.arange(0, dim, 2).double() / dim
        )
        pairs = torch.complex(x[..., : dim // 2], x[..., dim // 2 :])
        turned = pairs * torch.polar(torch.ones_like(angle), angle)[:, None]
        return torch.cat([turned.real, turned.imag], dim=-1)

    def attend(self, x: Tensor, context: Tensor, name: str, visible: Tensor) -> Tensor:
        dim, heads = self.config["head_dim"], self.config["num_attention_heads"]
        both = torch.cat([context, x])
        places = range(len(both))

        def part(letter: str, y: Tensor) -> Tensor:
            return (y @ self.w[f"{name}.self_attn.{letter}_proj.weight"].T).view(len(y), -1, dim)

        q = self.norm(part("q", x), f"{name}.self_attn.q_norm")
        k = self.norm(part("k", both), f"{name}.self_attn.k_norm")
        q, k, v = self.turn(q, places[len(context) :]), self.turn(k, places), part("v", both)
        k, v = (one.repeat_interleave(heads // one.shape[1], dim=1) for one in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / dim**0.5
        weights = scores.masked_fill(~visible, float("-inf")).softmax(-1)
        mixed = torch.einsum("hij,jhd->ihd", weights, v).reshape(len(x), heads * dim)
        return mixed @ self.w[f"{name}.self_attn.o_proj.weight"].T
