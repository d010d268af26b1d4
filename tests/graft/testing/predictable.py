"""A tiny target whose text can be learnt: mostly, the next character follows from the last one.

Knows files; runs no model. A random model's text has nothing that a drafter could learn in a
minute; here the head turns a character's embedding into its successor in a shuffled alphabet,
and the random layers in between change that choice now and then.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from graft.testing.models import write_tiny_model

_PRINTABLE = np.arange(32, 127)


def write_predictable_model(folder: Path, layers: int = 3, noise: float = 0.35) -> Path:
    """A tiny Llama whose greedy text walks round the shuffled alphabet, not always in order.

    noise: size of what attention and MLP add, next to a random model's.
    """
    write_tiny_model(folder, layers=layers)
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    random = np.random.default_rng(7)
    embedding[:259] = random.standard_normal((259, embedding.shape[1])).astype(np.float32)
    head = np.zeros_like(embedding)
    order = random.permutation(_PRINTABLE)
    head[np.roll(order, -1)] = embedding[order] * 0.2
    # Words that no character leads to are led to by bytes that do not print.
    others = np.setdiff1d(np.arange(259), _PRINTABLE)
    head[random.choice(_PRINTABLE, len(others))] += embedding[others] * 0.2
    weights["lm_head.weight"] = head
    for name, one in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            one *= noise
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder
