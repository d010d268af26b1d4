"""Where the time of one forward goes: each kind of matrix over all layers, attention, the rest.

Matrices of a kind are run one layer after the other, so that none is still in a cache. Knows the
decoder's weights; knows no session.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from graft.bench.step import binary_tree, random_cache, tree_step
from graft.kernels.ops import Linear
from graft.models.load import Target


@dataclass(frozen=True, slots=True)
class Part:
    """One part, all layers together. num_bytes: weights, or keys and values, that it reads."""

    name: str
    seconds: float
    num_bytes: int


def measure(target: Target, num_rows: int, context: int, rounds: int) -> list[Part]:
    """The fastest of some rounds for each part; "rest" is what a whole forward takes besides.

    The rest holds norms, rotations, the product of gate and up, and what the layers' order costs.
    """
    decoder, ops, config = target.decoder, target.decoder.ops, target.config
    tree = binary_tree(num_rows, num_rows, target.vocab_size)
    tokens, rows, num_slots = tree_step([tree], context)
    kv = random_cache(config, num_slots)
    layers = decoder.weights.layers
    kinds: dict[str, list[Linear]] = {
        "q, k, v": [layer.qkv for layer in layers],
        "attention output": [layer.output for layer in layers],
        "gate, up": [layer.gate_up for layer in layers],
        "down": [layer.down for layer in layers],
        "vocabulary head": [decoder.weights.head],
    }
    queries = torch.randn(num_rows, config.num_heads, config.head_dim)
    parts: dict[str, tuple[Callable[[], object], int]] = {
        name: (_linears(target, weights, num_rows), sum(weight.nbytes for weight in weights))
        for name, weights in kinds.items()
    }

    def attend() -> None:
        for number, layer in enumerate(layers):
            ops.attend(queries, kv, number, rows, config.head_dim**-0.5, layer.window)

    kv_bytes = context * 8 * config.num_layers * config.kv_width
    parts["attention"] = (attend, kv_bytes)
    parts["rest"] = (lambda: decoder.logits(decoder.forward(tokens, rows, kv, None)), 0)
    best = dict.fromkeys(parts, float("inf"))
    with torch.inference_mode():
        for _ in range(rounds + 1):
            for name, (run, _num_bytes) in parts.items():
                start = time.perf_counter()
                run()
                best[name] = min(best[name], time.perf_counter() - start)
    whole = best.pop("rest")
    found = [Part(name, seconds, parts[name][1]) for name, seconds in best.items()]
    return [*found, Part("rest", max(0.0, whole - sum(best.values())), 0)]


def _linears(target: Target, weights: list[Linear], num_rows: int) -> Callable[[], object]:
    x = torch.randn(num_rows, weights[0].in_features)
    ops = target.decoder.ops

    def run() -> None:
        for weight in weights:
            ops.linear(x, weight)

    return run
