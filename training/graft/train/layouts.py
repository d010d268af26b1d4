"""Writes a drafter as config.json and model.safetensors, in bfloat16. Knows no network."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> None:
    """Both files; each appears whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = {
        name: one.detach().to(torch.bfloat16).contiguous() for name, one in sorted(tensors.items())
    }
    partial = folder / "model.safetensors.tmp"
    save_file(stored, partial, {"format": "pt"})
    os.replace(partial, folder / "model.safetensors")
    partial = folder / "config.json.tmp"
    partial.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    os.replace(partial, folder / "config.json")
