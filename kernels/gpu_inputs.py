"""Random logits, laws, trees and probabilities on a device. Knows shapes; computes no rule."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from graft.common.tree import Tree, from_parents
from graft.kernels.ops import ChoiceRows, TreeRows
from graft.kernels.rows import tree_rows
from graft.kernels.trees import VerifyTrees

Held = TypeVar("Held", ChoiceRows, TreeRows, VerifyTrees)


@dataclass(frozen=True, slots=True)
class Size:
    """How much of everything: sessions, nodes in each tree (root included), vocabulary."""

    sessions: int
    nodes: int
    vocab: int

    @property
    def rows(self) -> int:
        """Rows of logits of a step."""
        return self.sessions * self.nodes


def placed(held: Held, device: torch.device) -> Held:
    """The same tensors on a device."""
    if isinstance(held, VerifyTrees):
        return VerifyTrees(*(tensor.to(device) for tensor in held))
    moved: dict[str, Any] = {}
    for field in fields(held):
        tensor = getattr(held, field.name)
        moved[field.name] = None if tensor is None else tensor.to(device)
    return replace(held, **moved)


def plain_laws(num_rows: int, temperature: float, top_k: int = 0, top_p: float = 1.0) -> ChoiceRows:
    """One law for all rows, other seeds and positions in each."""
    return ChoiceRows(
        temperature=torch.full((num_rows,), temperature),
        top_k=torch.full((num_rows,), top_k, dtype=torch.int32),
        top_p=torch.full((num_rows,), top_p),
        min_p=torch.zeros(num_rows),
        seed=torch.arange(num_rows, dtype=torch.int64) * 0x1E3779B97F4A7C15,
        position=torch.arange(num_rows, dtype=torch.int32),
    )


def mixed_laws(rng: np.random.Generator, num_rows: int, vocab: int) -> ChoiceRows:
    """A law of its own for each row: greedy, drawn, filtered, penalised and masked."""

    def pick(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(rng.choice(values, num_rows)).to(dtype)

    counts = np.minimum(rng.integers(0, 20, num_rows), vocab)
    entries = int(counts.sum())
    named = [rng.choice(vocab, count, replace=False) for count in counts]
    words = rng.integers(-(2**31), 2**31, (num_rows, -(-vocab // 32)))
    return ChoiceRows(
        temperature=pick([0.0, 0.3, 0.7, 1.0, 2.0], torch.float32),
        top_k=pick([0, 0, 1, 5, 50, vocab // 2, vocab], torch.int32),
        top_p=pick([0.1, 0.5, 0.9, 0.99, 1.0], torch.float32),
        min_p=pick([0.0, 0.0, 0.05, 0.5], torch.float32),
        seed=torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, num_rows)),
        position=torch.from_numpy(rng.integers(0, 1 << 20, num_rows).astype(np.int32)),
        adjust_ptr=torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)),
        adjust_tokens=torch.from_numpy(np.concatenate(named).astype(np.int32)),
        adjust_ratio=torch.from_numpy(rng.uniform(0.5, 2.0, entries).astype(np.float32)),
        adjust_shift=torch.from_numpy(
            rng.choice([0.0, -3.0, 2.5, np.inf], entries).astype(np.float32)
        ),
        bitmask=torch.from_numpy(words.astype(np.int32)),
    )


def peaked_logits(rng: np.random.Generator, num_rows: int, vocab: int) -> Tensor:
    """Rows with a broad floor and some fifty likely tokens, as language models give them."""
    logits = rng.standard_normal((num_rows, vocab), dtype=np.float32) * np.float32(2.5)
    heads = rng.integers(0, vocab, (num_rows, min(50, vocab)))
    lift = rng.exponential(6.0, heads.shape).astype(np.float32) + np.float32(4)
    np.put_along_axis(logits, heads, lift, axis=1)
    return torch.from_numpy(logits)


def damage(rng: np.random.Generator, logits: Tensor) -> Tensor:
    """In place: some rows get a NaN, +inf, only -inf, or many equal values; returns them."""
    for row in rng.choice(len(logits), len(logits) // 4, replace=False):
        kind = int(rng.integers(0, 4))
        if kind == 0:
            logits[row] = -torch.inf
        elif kind == 1:
            logits[row].round_()
        else:
            place = int(rng.integers(0, logits.shape[1]))
            logits[row, place] = torch.nan if kind == 2 else torch.inf
    return logits


def random_parents(rng: np.random.Generator, num_nodes: int) -> list[int]:
    """Chains, stars and everything between; node 0 is the root."""
    reach = int(rng.choice([1, 2, 4, 8, num_nodes]))
    return [-1] + [int(rng.integers(max(0, node - reach), node)) for node in range(1, num_nodes)]


def random_tree(rng: np.random.Generator, num_nodes: int, vocab: int) -> Tree:
    """A tree in which siblings hold distinct tokens."""
    tokens = rng.choice(vocab, num_nodes, replace=num_nodes > vocab)
    return from_parents(tokens.tolist(), random_parents(rng, num_nodes))


def ragged_trees(rng: np.random.Generator, size: Size) -> TreeRows:
    """Trees of 1 to `size.nodes` nodes."""
    counts = rng.integers(1, size.nodes + 1, size.sessions)
    return tree_rows([random_tree(rng, int(count), size.vocab) for count in counts])


def padded_trees(rng: np.random.Generator, size: Size) -> VerifyTrees:
    """Trees of `size.nodes` nodes each, in the field's padded layout."""
    trees = [random_tree(rng, size.nodes, size.vocab) for _ in range(size.sessions)]

    def stack(name: str) -> Tensor:
        return torch.from_numpy(np.stack([getattr(tree, name) for tree in trees])).long()

    index = torch.arange(size.rows).view(size.sessions, size.nodes)
    return VerifyTrees(stack("tokens"), index, stack("next_token"), stack("next_sibling"))


def likely_choices(rng: np.random.Generator, trees: TreeRows) -> Tensor:
    """[rows], int32: mostly the token of some child, sometimes another or none."""
    chosen = rng.integers(-1, 9, trees.tokens.numel())
    starts = trees.ptr.tolist()
    links = (trees.tokens.tolist(), trees.next_token.tolist(), trees.next_sibling.tolist())
    tokens, first_child, sibling = links
    for start, end in pairwise(starts):
        for row in range(start, end):
            child = first_child[row]
            while child >= 0 and rng.random() < 0.4:
                child = sibling[start + child]
            if child >= 0:
                chosen[row] = tokens[start + child]
    return torch.from_numpy(chosen.astype(np.int32))


def probabilities(rng: np.random.Generator, *shape: int) -> Tensor:
    """float32 rows that sum to about 1, with few likely tokens."""
    raw = rng.exponential(size=shape) ** 4
    return torch.from_numpy((raw / raw.sum(-1, keepdims=True)).astype(np.float32))


def coins(rng: np.random.Generator, *shape: int) -> Tensor:
    """float32 uniforms."""
    return torch.from_numpy(rng.random(shape).astype(np.float32))
