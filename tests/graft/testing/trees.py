"""Random trees and laws for tests of the kernels, from hypothesis."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from graft.common.tree import Tree, from_parents
from graft.kernels.ops import ChoiceRows


@st.composite
def parent_lists(draw: DrawFn, max_nodes: int = 12) -> list[int]:
    """Parents of one tree, parents first: chains, stars and all between."""
    num_nodes = draw(st.integers(1, max_nodes))
    shape = draw(st.sampled_from(["any", "chain", "star"]))
    if shape == "chain":
        return list(range(-1, num_nodes - 1))
    if shape == "star":
        return [-1] + [0] * (num_nodes - 1)
    return [-1] + [draw(st.integers(0, node - 1)) for node in range(1, num_nodes)]


@st.composite
def trees(draw: DrawFn, vocab_size: int = 12, max_nodes: int = 12) -> Tree:
    """A preorder tree whose siblings hold distinct tokens, ends of the vocabulary included."""
    parents = draw(parent_lists(max_nodes))
    tokens = [draw(st.integers(0, vocab_size - 1))]
    kept = [-1]
    place = [0]
    used: set[tuple[int, int]] = set()
    for parent in parents[1:]:
        token = draw(st.sampled_from([0, vocab_size - 1]) | st.integers(0, vocab_size - 1))
        place.append(len(kept))
        if (place[parent], token) in used:
            place[-1] = place[parent]
            continue
        used.add((place[parent], token))
        tokens.append(token)
        kept.append(place[parent])
    return from_parents(tokens, kept)


def random_tree(generator: np.random.Generator, num_nodes: int, vocab_size: int) -> Tree:
    """A tree of at most `num_nodes` with distinct siblings."""
    tokens, parents = [int(generator.integers(vocab_size))], [-1]
    used = set()
    for _ in range(num_nodes - 1):
        edge = (int(generator.integers(len(tokens))), int(generator.integers(vocab_size)))
        if edge not in used:
            used.add(edge)
            parents.append(edge[0])
            tokens.append(edge[1])
    return from_parents(tokens, parents)


def law_rows(
    num_rows: int,
    *,
    temperature: float | Sequence[float] = 1.0,
    top_k: int | Sequence[int] = 0,
    top_p: float | Sequence[float] = 1.0,
    min_p: float | Sequence[float] = 0.0,
    seed: int | Sequence[int] = 0,
    position: int | Sequence[int] = 0,
) -> ChoiceRows:
    """Rows of one law, or of one value a row; nothing is adjusted or masked."""

    def column(values: float | Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        if isinstance(values, int | float):
            values = [values] * num_rows
        return torch.tensor(values, dtype=dtype)

    return ChoiceRows(
        temperature=column(temperature, torch.float32),
        top_k=column(top_k, torch.int32),
        top_p=column(top_p, torch.float32),
        min_p=column(min_p, torch.float32),
        seed=column(seed, torch.int64),
        position=column(position, torch.int32),
    )
