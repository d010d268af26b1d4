"""Writes tiny random UNO adapters in the layout of PEFT, and runs them a second time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from safetensors.numpy import save_file
from safetensors.torch import load_file
from torch import Tensor

from graft.testing.checkpoints import Random, head_dim, target_config

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    target: Path,
    *,
    rank: int = 4,
    alpha: int = 8,
    targets: Sequence[str] = TARGETS,
    options: Mapping[str, Any] | None = None,
    seed: int = 1,
) -> Path:
    """adapter_config.json and adapter_model.safetensors, for all layers of the target."""
    config, random = target_config(target), Random(seed)
    tensors: dict[str, NDArray[Any]] = {}
    for layer in range(config["num_hidden_layers"]):
        for part, (wide, high) in _widths(config).items():
            if part.split(".")[1] in targets:
                name = f"base_model.model.model.layers.{layer}.{part}"
                tensors[f"{name}.lora_A.weight"] = random.weight(rank, wide)
                tensors[f"{name}.lora_B.weight"] = random.weight(high, rank)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    stated = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(target),
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(targets),
        **(options or {}),
    }
    (folder / "adapter_config.json").write_text(json.dumps(stated, indent=2) + "\n")
    return folder


class DenseUno:
    """A Llama target and its adapter in float64, over whole sequences."""

    def __init__(self, adapter: Path, target: Path) -> None:
        self.config = target_config(target)
        self.w = {name: x.double() for name, x in load_file(target / "model.safetensors").items()}
        held = load_file(adapter / "adapter_model.safetensors")
        self.lora = {name.removeprefix("base_model.model."): x.double() for name, x in held.items()}
        stated = json.loads((adapter / "adapter_config.json").read_text())
        self.scaling = stated["lora_alpha"] / stated["r"]

    def logits(self, tokens: Sequence[int], noisy: int) -> Tensor:
        """[tokens, vocab]; the last `noisy` rows pass the adapter."""
        x = self.w["model.embed_tokens.weight"][list(tokens)]
        for layer in range(self.config["num_hidden_layers"]):
            name = f"model.layers.{layer}"
            normed = self.norm(x, f"{name}.input_layernorm")
            x = x + self.attend(normed, f"{name}.self_attn", noisy)
            normed = self.norm(x, f"{name}.post_attention_layernorm")
            gate = torch.nn.functional.silu(self.linear(normed, f"{name}.mlp.gate_proj", noisy))
            wide = gate * self.linear(normed, f"{name}.mlp.up_proj", noisy)
            x = x + self.linear(wide, f"{name}.mlp.down_proj", noisy)
        head = self.w.get("lm_head.weight", self.w["model.embed_tokens.weight"])
        return self.norm(x, "model.norm") @ head.T

    def linear(self, x: Tensor, name: str, noisy: int) -> Tensor:
        y = x @ self.w[f"{name}.weight"].T
        if noisy and f"{name}.lora_A.weight" in self.lora:
            down, up = (self.lora[f"{name}.lora_{part}.weight"] for part in "AB")
            y[-noisy:] += self.scaling * (x[-noisy:] @ down.T @ up.T)
        return y

    def norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]).sqrt()
        return x / scale * self.w[f"{name}.weight"]

    def attend(self, x: Tensor, name: str, noisy: int) -> Tensor:
        rows, dim, heads = len(x), head_dim(self.config), self.config["num_attention_heads"]
        angle = torch.arange(rows).double()[:, None] * self.config["rope_theta"] ** (
            -torch.arange(0, dim, 2).double() / dim
        )
        turn = torch.polar(torch.ones_like(angle), angle)[:, None]

        def part(letter: str) -> Tensor:
            y = self.linear(x, f"{name}.{letter}_proj", noisy).view(rows, -1, dim)
            if letter != "v":
                pairs = torch.complex(y[..., : dim // 2], y[..., dim // 2 :]) * turn
                y = torch.cat([pairs.real, pairs.imag], dim=-1)
            return y.repeat_interleave(heads // y.shape[1], dim=1)

        q, k, v = part("q"), part("k"), part("v")
        scores = torch.einsum("ihd,jhd->hij", q, k) / dim**0.5
        seen = torch.ones(rows, rows).tril().bool()
        weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        mixed = torch.einsum("hij,jhd->ihd", weights, v).reshape(rows, heads * dim)
        return self.linear(mixed, f"{name}.o_proj", noisy)


def _widths(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """Input and output of every matrix that can have an adapter."""
    hidden, wide, dim = config["hidden_size"], config["intermediate_size"], head_dim(config)
    queries, keys = (config[f"num_{kind}_heads"] * dim for kind in ("attention", "key_value"))
    return {
        "self_attn.q_proj": (hidden, queries),
        "self_attn.k_proj": (hidden, keys),
        "self_attn.v_proj": (hidden, keys),
        "self_attn.o_proj": (queries, hidden),
        "mlp.gate_proj": (hidden, wide),
        "mlp.up_proj": (hidden, wide),
        "mlp.down_proj": (wide, hidden),
    }
