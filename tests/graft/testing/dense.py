"""Draft networks a second time, in plain torch over whole sequences: what the fast ones must equal.

Written from the papers and the published layouts alone: dense causal attention, complex rotations,
weights by their published names. Shares no code with the networks it checks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from graft.common.tree import FloatArray


class DenseHead:
    """An EAGLE or EAGLE-3 head in float64, stepped one slot at a time over everything before."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.w = {name: x.double() for name, x in load_file(folder / "model.safetensors").items()}
        self.w = {name.removeprefix("model."): x for name, x in self.w.items()}
        config = json.loads((folder / "config.json").read_text())
        self.config: dict[str, Any] = {**config, **config.get("transformer_layer_config", {})}
        borrowed = load_file(target / "model.safetensors")
        self.embedding = borrowed["model.embed_tokens.weight"].double()
        self.target_head = borrowed.get("lm_head.weight", self.embedding).double()
        if self.config["hidden_size"] != self.embedding.shape[1]:
            self.embedding = self.w["embed_tokens.weight"]

    def run(
        self, tokens: Sequence[int], features: FloatArray, path: Sequence[int] = ()
    ) -> tuple[Tensor, list[Tensor]]:
        """Logits after the last slot, and after each token of `path`, which reads our own states.

        tokens: of slots 0.., features: [slots, width] of the target.
        """
        states = [self.fuse(torch.from_numpy(row).double()) for row in features]
        ids = list(tokens)
        outputs = self.layers(ids, states)
        logits = [self.logits(outputs[-1])]
        for token in path:
            ids.append(token)
            states.append(self.recurrent(outputs[-1]))
            outputs = self.layers(ids, states)
            logits.append(self.logits(outputs[-1]))
        return logits[0], logits[1:]

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()
        return x / scale * self.w[name]

    def attend(self, x: Tensor, name: str) -> Tensor:
        """x: [slots, width] -> [slots, hidden], causal."""
        slots, dim = len(x), self.config.get("head_dim")
        heads, groups = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        dim = dim or self.config["hidden_size"] // heads

        def part(letter: str, count: int) -> Tensor:
            y = x @ self.w[f"{name}.self_attn.{letter}_proj.weight"].T
            bias = self.w.get(f"{name}.self_attn.{letter}_proj.bias")
            return (y if bias is None else y + bias).view(slots, count, dim)

        def turn(y: Tensor) -> Tensor:
            angle = torch.arange(slots).double()[:, None] * self.config["rope_theta"] ** (
                -torch.arange(0, dim, 2).double() / dim
            )
            pairs = torch.complex(y[..., : dim // 2], y[..., dim // 2 :])
            turned = pairs * torch.polar(torch.ones_like(angle), angle)[:, None]
            return torch.cat([turned.real, turned.imag], dim=-1)

        q, k, v = turn(part("q", heads)), turn(part("k", groups)), part("v", groups)
        k, v = (one.repeat_interleave(heads // groups, dim=1) for one in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / dim**0.5
        seen = torch.ones(slots, slots).tril().bool()
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        mixed = torch.einsum("hij,jhd->ihd", weights, v).reshape(slots, heads * dim)
        return mixed @ self.w[f"{name}.self_attn.o_proj.weight"].T

    def feed(self, x: Tensor, name: str) -> Tensor:
        gate = torch.nn.functional.silu(x @ self.w[f"{name}.mlp.gate_proj.weight"].T)
        up = x @ self.w[f"{name}.mlp.up_proj.weight"].T
        return (gate * up) @ self.w[f"{name}.mlp.down_proj.weight"].T

    def rest_of_layer(self, x: Tensor, attended: Tensor, name: str) -> Tensor:
        x = x + attended
        return x + self.feed(self.norm(x, f"{name}.post_attention_layernorm.weight"), name)

    def fuse(self, feature: Tensor) -> Tensor:
        raise NotImplementedError

    def layers(self, ids: Sequence[int], states: Sequence[Tensor]) -> Tensor:
        """[slots, hidden]: the last layer's output."""
        raise NotImplementedError

    def recurrent(self, output: Tensor) -> Tensor:
        return output

    def logits(self, output: Tensor) -> Tensor:
        raise NotImplementedError


class DenseEagle(DenseHead):
    """EAGLE: fc over [embedding, feature], a layer without input norm, the target's head."""

    def fuse(self, feature: Tensor) -> Tensor:
        return feature

    def layers(self, ids: Sequence[int], states: Sequence[Tensor]) -> Tensor:
        x = torch.cat([self.embedding[list(ids)], torch.stack(list(states))], dim=1)
        x = x @ self.w["fc.weight"].T + self.w.get("fc.bias", torch.zeros(1).double())
        x = self.rest_of_layer(x, self.attend(x, "layers.0"), "layers.0")
        for number in range(1, self.config["num_hidden_layers"]):
            name = f"layers.{number}"
            normed = self.norm(x, f"{name}.input_layernorm.weight")
            x = self.rest_of_layer(x, self.attend(normed, name), name)
        return x

    def logits(self, output: Tensor) -> Tensor:
        return output @ self.target_head.T


class DenseEagle3(DenseHead):
    """EAGLE-3: attention over [norm(embedding), norm(state)], own head and norm."""

    @property
    def first(self) -> str:
        return "midlayer" if "midlayer.hidden_norm.weight" in self.w else "layers.0"

    def fuse(self, feature: Tensor) -> Tensor:
        if self.config.get("norm_before_fc"):
            feature = self.norm(feature, "input_norm.weight")
        names = {
            "fc_norm": [f"fc_norm.{place}.weight" for place in range(3)],
            "use_aux_norm": [f"aux_norm_{place}.weight" for place in ("low", "mid", "high")],
        }
        for key, norms in names.items():
            if self.config.get(key):
                parts = zip(feature.chunk(3), norms, strict=True)
                feature = torch.cat([self.norm(part, name) for part, name in parts])
        return self.w["fc.weight"] @ feature

    def layers(self, ids: Sequence[int], states: Sequence[Tensor]) -> Tensor:
        first, state = self.first, torch.stack(list(states))
        normed = self.norm(state, f"{first}.hidden_norm.weight")
        embedded = self.norm(self.embedding[list(ids)], f"{first}.input_layernorm.weight")
        attended = self.attend(torch.cat([embedded, normed], dim=1), first)
        kept = normed if self.config.get("norm_before_residual") else state
        x = self.rest_of_layer(kept, attended, first)
        for number in range(1, self.config["num_hidden_layers"]):
            name = f"layers.{number}"
            plain = f"{name}.input_layernorm.weight"
            norm = plain if plain in self.w else f"{name}.hidden_norm.weight"
            x = self.rest_of_layer(x, self.attend(self.norm(x, norm), name), name)
        return x

    def recurrent(self, output: Tensor) -> Tensor:
        return self.norm(output, "norm.weight") if self.config.get("norm_output") else output

    def logits(self, output: Tensor) -> Tensor:
        head = self.w.get("lm_head.weight", self.target_head)
        return self.norm(output, "norm.weight") @ head.T
