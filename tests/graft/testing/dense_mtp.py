"""MTP layers a second time, in plain torch over whole sequences, by their published names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from graft.common.tree import FloatArray


class DenseMtp:
    """Steps in float64; a step runs over a whole sequence of slots at once."""

    def __init__(self, folder: Path, target: Path, layout: str) -> None:
        self.w = {name: x.double() for name, x in load_file(folder / "model.safetensors").items()}
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())
        borrowed = load_file(target / "model.safetensors")
        self.embedding = borrowed["model.embed_tokens.weight"].double()
        self.head = borrowed.get("lm_head.weight", self.embedding).double()
        self.layout = layout
        self.first = 0 if layout == "nextn alone" else self.config["num_hidden_layers"]
        self.plus = 1.0 if layout == "step3p5" else 0.0
        self.eps = self.config.get("layernorm_epsilon", self.config["rms_norm_eps"])

    def recurrent(
        self, tokens: Sequence[int], states: FloatArray, path: Sequence[int]
    ) -> list[Tensor]:
        """Log-probabilities after the last slot, and after each token of `path`."""
        ids, hidden = list(tokens), torch.from_numpy(states).double()
        logs = []
        for token in (*path, None):
            output = self.final(0, self.step(0, ids, hidden))
            logs.append(self.logits(0, output[-1:])[0].log_softmax(-1))
            if token is not None:
                ids.append(token)
                hidden = torch.cat([hidden, output[-1:]])
        return logs

    def multi_layer(self, prefix: Sequence[int], states: FloatArray, steps: int) -> list[int]:
        """The greedy chain after `prefix`, every step run over all slots from scratch."""
        known, slots = list(prefix), len(prefix) - 1
        hidden = target = torch.from_numpy(states[:slots]).double()
        for number in range(steps):
            state = self.step(number, known[1 + number : 1 + number + slots], hidden)
            logits = self.logits(number, self.final(number, state)[-1:])
            known.append(int(np.argmax(logits[0].numpy())))
            hidden = state if self.layout != "mimo_v2" else target
        return known[len(prefix) :]

    def name(self, number: int) -> str:
        prefix = {"mimo": "model.mtp_layers", "mimo_v2": "model.mtp.layers"}.get(self.layout)
        return f"{prefix}.{number}" if prefix else f"model.layers.{self.first + number}"

    def step(self, number: int, ids: Sequence[int], hidden: Tensor) -> Tensor:
        """[slots, hidden], before the final norm."""
        name, mimo = self.name(number), self.layout == "mimo"
        embedded = self.embedding[list(ids)]
        if mimo:
            embedded[0] = 0
        e = self.norm(embedded, f"{name}.{'token_layernorm' if mimo else 'enorm'}")
        h = self.norm(hidden, f"{name}.{'hidden_layernorm' if mimo else 'hnorm'}")
        project = self.w[f"{name}.{'input_proj' if mimo else 'eh_proj'}.weight"]
        x = torch.cat([h, e] if mimo else [e, h], dim=1) @ project.T
        x = x + self.attend(self.norm(x, f"{name}.input_layernorm"), f"{name}.self_attn")
        later = "pre_mlp_layernorm" if self.layout == "mimo_v2" else "post_attention_layernorm"
        normed = self.norm(x, f"{name}.{later}")
        gate = torch.nn.functional.silu(normed @ self.w[f"{name}.mlp.gate_proj.weight"].T)
        up = normed @ self.w[f"{name}.mlp.up_proj.weight"].T
        return x + (gate * up) @ self.w[f"{name}.mlp.down_proj.weight"].T

    def final(self, number: int, x: Tensor) -> Tensor:
        last = {
            "mimo": "final_layernorm",
            "mimo_v2": "final_layernorm",
            "step3p5": "transformer.shared_head.norm",
        }.get(self.layout, "shared_head.norm")
        return self.norm(x, f"{self.name(number)}.{last}")

    def logits(self, number: int, x: Tensor) -> Tensor:
        own = self.w.get(f"{self.name(number)}.transformer.shared_head.output.weight")
        return x @ (self.head if own is None else own).T

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt()
        return x / scale * (self.w[f"{name}.weight"] + self.plus)

    def shape(self) -> tuple[int, int, float, float, int]:
        """Heads, width of a key, theta, share that rotates, window."""
        config = self.config
        plain = config["hidden_size"] // config["num_attention_heads"]
        if self.layout == "mimo_v2":
            return 6, 24, 5000.0, 0.5, 8
        if self.layout == "step3p5":
            return 6, 16, 10000.0, 1.0, 9
        return config["num_attention_heads"], plain, config["rope_theta"], 1.0, 0

    def attend(self, x: Tensor, name: str) -> Tensor:
        heads, dim, theta, share, window = self.shape()
        slots = len(x)

        def part(letter: str, width: int) -> Tensor:
            y = x @ self.w[f"{name}.{letter}_proj.weight"].T
            return (y + self.w.get(f"{name}.{letter}_proj.bias", 0.0)).view(slots, -1, width)

        def turn(y: Tensor) -> Tensor:
            rotary = int(dim * share)
            angle = torch.arange(slots).double()[:, None] * theta ** (
                -torch.arange(0, rotary, 2).double() / rotary
            )
            pairs = torch.complex(y[..., : rotary // 2], y[..., rotary // 2 : rotary])
            turned = pairs * torch.polar(torch.ones_like(angle), angle)[:, None]
            return torch.cat([turned.real, turned.imag, y[..., rotary:]], dim=-1)

        q, k = part("q", dim), part("k", dim)
        v = part("v", self.w[f"{name}.v_proj.weight"].shape[0] // k.shape[1])
        v = v * self.config.get("attention_value_scale", 1.0)
        if f"{name}.q_norm.weight" in self.w:
            q, k = self.norm(q, f"{name}.q_norm"), self.norm(k, f"{name}.k_norm")
        q, k = turn(q), turn(k)
        k, v = (one.repeat_interleave(heads // one.shape[1], dim=1) for one in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) / dim**0.5
        seen = torch.ones(slots, slots).tril().bool()
        if window:
            seen &= ~torch.ones(slots, slots).tril(-window).bool()
        scores = scores.masked_fill(~seen, float("-inf"))
        if f"{name}.attention_sink_bias" in self.w:
            sinks = self.w[f"{name}.attention_sink_bias"][:, None, None].expand(-1, slots, 1)
            weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
        else:
            weights = scores.softmax(-1)
        mixed = torch.einsum("hij,jhd->ihd", weights, v)
        if f"{name}.g_proj.weight" in self.w:
            mixed = mixed * torch.sigmoid(x @ self.w[f"{name}.g_proj.weight"].T)[..., None]
        return mixed.reshape(slots, -1) @ self.w[f"{name}.o_proj.weight"].T
