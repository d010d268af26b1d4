"""Writes and reads a drafter: config.json and model.safetensors, in bfloat16. Knows no network."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from graft.common.errors import InvalidArgument


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


def read_checkpoint(folder: Path, places: Mapping[str, Tensor]) -> None:
    """In place: fills tensors from those of the same names that `write_checkpoint` wrote.

    Raises:
        InvalidArgument: no drafter is there, or one of other tensors or shapes.
    """
    try:
        stored = load_file(folder / "model.safetensors")
    except (OSError, SafetensorError) as error:
        raise InvalidArgument(f"{folder} holds no drafter: {error}", field="start_from") from None
    for name, place in places.items():
        found = stored.pop(name, None)
        if found is None or found.shape != place.shape:
            there = "not there" if found is None else f"of shape {list(found.shape)}"
            raise InvalidArgument(
                f"{name} of {folder} is {there}, expected {list(place.shape)}", field="start_from"
            )
        with torch.no_grad():
            place.copy_(found)
    if stored:
        raise InvalidArgument(
            f"{folder} has {next(iter(stored))}, which this drafter lacks", field="start_from"
        )
