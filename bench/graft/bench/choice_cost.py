"""What choosing, walking and keeping cost beside the target forward of the same batch.

    python -m graft.bench.choice_cost

Sessions hold trees of one shape and cached keys of no meaning; times do not depend on values,
apart from the logits, which are the model's own for the tokens of the trees.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from graft.bench.step import binary_tree, random_cache, tree_step
from graft.common.model_files import resolve
from graft.common.sampling import Sampling
from graft.common.tree import Tree
from graft.kernels.cpu.keep import keep_moves
from graft.kernels.ops import Ops, select
from graft.kernels.rows import Law, choice_rows, tree_rows
from graft.models.load import Target, load_target

SESSIONS = 8
NODES = 16
PREFIX = 128
ROUNDS = 5
LAWS = {
    "greedy": Sampling(),
    "T = 1": Sampling(temperature=1.0),
    "T = 0.8, top_p 0.95": Sampling(temperature=0.8, top_p=0.95),
}
_MODEL = "smollm2-135m-instruct"


@dataclass(frozen=True, slots=True)
class ChoiceCost:
    """The best of all rounds, in seconds, so that other work on the machine counts least."""

    law: str
    forward_s: float
    choose_s: float
    accept_s: float
    keep_s: float

    @property
    def ratio(self) -> float:
        """Choice, walk and keep over the forward."""
        return (self.choose_s + self.accept_s + self.keep_s) / self.forward_s


def measure(target: Target, ops: Ops, rounds: int = ROUNDS) -> list[ChoiceCost]:
    """One line a law, all in one run over the same batch."""
    trees = [binary_tree(seed, NODES, target.vocab_size) for seed in range(SESSIONS)]
    tokens, step, num_slots = tree_step(trees, PREFIX)
    kv = random_cache(target.config, num_slots)
    wanted = torch.from_numpy(np.concatenate([_last_path(tree) for tree in trees]))
    decoder, flat = target.decoder, tree_rows(trees)
    logits = decoder.logits(decoder.forward(tokens, step, kv, None))
    accepted, index = ops.accept(flat, wanted)

    def keep() -> None:
        ops.keep(kv, *keep_moves(flat.ptr, accepted, index, step.write_slots))

    def cost(name: str, sampling: Sampling) -> ChoiceCost:
        law = choice_rows([Law(sampling, tree, PREFIX) for tree in trees], target.vocab_size)
        parts: tuple[Callable[[], object], ...] = (
            lambda: decoder.logits(decoder.forward(tokens, step, kv, None)),
            lambda: ops.choose(logits, law),
            lambda: ops.accept(flat, wanted),
            keep,
        )
        times = [[_seconds(part) for part in parts] for _ in range(rounds)]
        return ChoiceCost(name, *(min(column) for column in zip(*times, strict=True)))

    return [cost(name, sampling) for name, sampling in LAWS.items()]


def _seconds(part: Callable[[], object]) -> float:
    start = time.perf_counter()
    part()
    return time.perf_counter() - start


def _last_path(tree: Tree) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """The token of each node's last child, 0 at leaves: a choice that ends in the last leaf."""
    wanted = np.zeros(tree.num_nodes, np.int32)
    for node in range(1, tree.num_nodes):
        wanted[tree.parent[node]] = tree.tokens[node]
    return wanted


def run(threads: int = 2, rounds: int = ROUNDS) -> list[ChoiceCost]:
    """Loads the embedded model and measures it."""
    ops = select("cpu", threads)
    target = load_target(resolve(_MODEL, weights=True), ops, context_length=512)
    return measure(target, ops, rounds)


def main() -> None:
    """Prints one line a law."""
    for cost in run():
        sys.stdout.write(
            f"{cost.law}: forward {cost.forward_s * 1e3:.1f} ms, choose {cost.choose_s * 1e3:.2f}, "
            f"accept {cost.accept_s * 1e3:.3f}, keep {cost.keep_s * 1e3:.3f} ms, "
            f"ratio {cost.ratio:.1%}\n"
        )


if __name__ == "__main__":
    main()
