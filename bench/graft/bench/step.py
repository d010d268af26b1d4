"""Lays out the rows of one forward pass over trees behind cached keys of no meaning.

Times do not depend on the values of keys. Knows the contract of the kernels; knows no scheduler.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from graft.common.tree import Tree, from_parents
from graft.kernels.ops import KvCache, StepRows
from graft.models.config import DecoderConfig

PAGE_TOKENS = 16


def binary_tree(seed: int, num_nodes: int, vocab_size: int) -> Tree:
    """Two children a node, so that the second branch is not the first path."""
    tokens = np.random.default_rng(seed).choice(vocab_size, num_nodes, replace=False)
    return from_parents(tokens.tolist(), [-1, *((node - 1) // 2 for node in range(1, num_nodes))])


def random_cache(config: DecoderConfig, num_slots: int) -> KvCache:
    """A cache full of noise."""
    shape = (config.num_layers, num_slots, config.num_kv_heads, config.head_dim)
    generator = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(shape, generator=generator) for _ in range(2))
    return KvCache(keys, values, PAGE_TOKENS)


def tree_step(trees: Sequence[Tree], prefix: int) -> tuple[torch.Tensor, StepRows, int]:
    """Tokens and rows of one step, each tree behind `prefix` keys, and the slots it needs."""
    most = max(tree.num_nodes for tree in trees)
    pages = -(-(prefix + most) // PAGE_TOKENS)
    firsts = [session * pages * PAGE_TOKENS + prefix for session in range(len(trees))]
    paths = [
        [first + node for node in tree.ancestors(row)]
        for first, tree in zip(firsts, trees, strict=True)
        for row in range(tree.num_nodes)
    ]
    lengths = [len(path) for path in paths]
    counts = torch.tensor([tree.num_nodes for tree in trees])
    rows = StepRows(
        positions=torch.tensor([prefix + length - 1 for length in lengths], dtype=torch.int32),
        write_slots=torch.tensor([path[-1] for path in paths], dtype=torch.int32),
        sequence=torch.arange(len(trees), dtype=torch.int32).repeat_interleave(counts),
        page_table=torch.arange(len(trees) * pages, dtype=torch.int32).reshape(len(trees), pages),
        prefix_len=torch.full((len(paths),), prefix, dtype=torch.int32),
        extra_ptr=torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32),
        extra_slots=torch.tensor([slot for path in paths for slot in path], dtype=torch.int32),
    )
    tokens = torch.from_numpy(np.concatenate([tree.tokens for tree in trees]))
    return tokens, rows, len(trees) * pages * PAGE_TOKENS
