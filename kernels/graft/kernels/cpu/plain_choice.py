"""Choice and acceptance one row at a time in torch. Knows the rule, cares for no speed."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from graft.common.noise import gumbel
from graft.kernels.ops import ChoiceRows, TreeRows


def choose(logits: Tensor, rows: ChoiceRows) -> Tensor:
    """logits: [rows, vocab] -> [rows], int32; -1 where a row has NaN or nothing is allowed."""
    picks = [_choose_row(logits[row].float().clone(), rows, row) for row in range(len(logits))]
    return torch.tensor(picks, dtype=torch.int32)


def accept(trees: TreeRows, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """Walks each tree along the target's choices -> (counts [trees], paths [trees, width])."""
    starts = trees.ptr.tolist()
    paths = [_walk(trees, chosen, low, high) for low, high in pairwise(starts)]
    width = max((len(path) for path in paths), default=1)
    index = torch.full((len(paths), width), -1, dtype=torch.int32)
    for line, path in enumerate(paths):
        index[line, : len(path)] = torch.tensor(path, dtype=torch.int32)
    return torch.tensor([len(path) - 1 for path in paths], dtype=torch.int32), index


def _walk(trees: TreeRows, chosen: Tensor, low: int, high: int) -> list[int]:
    tokens = trees.tokens[low:high].tolist()
    child = trees.next_token[low:high].tolist()
    sibling = trees.next_sibling[low:high].tolist()
    want = chosen[low:high].tolist()
    path, node = [0], child[0]
    while node >= 0:
        if tokens[node] == want[path[-1]]:
            path.append(node)
            node = child[node]
        else:
            node = sibling[node]
    return path


def _choose_row(x: Tensor, rows: ChoiceRows, row: int) -> int:
    if bool(x.isnan().any()):
        return -1
    _adjust(x, rows, row)
    if rows.bitmask is not None:
        index = torch.arange(len(x))
        allowed = (rows.bitmask[row][index // 32] >> (index % 32)) & 1
        x.masked_fill_(allowed == 0, float("-inf"))
    if not bool((x > float("-inf")).any()):
        return -1
    temperature = float(rows.temperature[row])
    if temperature == 0.0:
        return int(x.argmax())
    x /= temperature
    _filter(x, int(rows.top_k[row]), float(rows.top_p[row]), float(rows.min_p[row]))
    seed = int(rows.seed[row]) & 0xFFFFFFFFFFFFFFFF
    noise = torch.from_numpy(gumbel(seed, int(rows.position[row]), len(x)))
    return int((x + noise).argmax())


def _adjust(x: Tensor, rows: ChoiceRows, row: int) -> None:
    if rows.adjust_ptr is None or rows.adjust_tokens is None:
        return
    assert rows.adjust_ratio is not None and rows.adjust_shift is not None
    span = slice(int(rows.adjust_ptr[row]), int(rows.adjust_ptr[row + 1]))
    tokens = rows.adjust_tokens[span].long()
    old, ratio = x[tokens], rows.adjust_ratio[span]
    x[tokens] = torch.where(old > 0, old / ratio, old * ratio) - rows.adjust_shift[span]


def _filter(x: Tensor, top_k: int, top_p: float, min_p: float) -> None:
    """In place: -inf outside the support; ties with the k-th value stay."""
    if 0 < top_k < len(x):
        x.masked_fill_(x < x.topk(top_k).values[-1], float("-inf"))
    if top_p < 1.0:
        ordered, tokens = x.sort(descending=True, stable=True)
        mass = torch.softmax(ordered, 0)
        x[tokens[mass.cumsum(0) - mass >= top_p]] = float("-inf")
    if min_p > 0.0:
        mass = torch.softmax(x, 0)
        x.masked_fill_(mass < min_p * mass.max(), float("-inf"))
