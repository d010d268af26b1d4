"""Log-probabilities under the target's unfiltered softmax. Knows rows and tokens only."""

from __future__ import annotations

import torch
from torch import Tensor

from graft.common.tree import IntArray
from graft.verify.events import TokenLogprob


def score_tokens(logits: Tensor, tokens: IntArray, num_top: int) -> tuple[TokenLogprob, ...]:
    """The score of tokens[i] in row i, and the `num_top` best of the row, ties to the lower id.

    logits: [rows, vocab], float32. tokens: [rows], int32. Sums are in float64.
    """
    shifted = logits.double()
    normaliser = torch.logsumexp(shifted, dim=-1)
    own = shifted[torch.arange(len(tokens)), torch.from_numpy(tokens).long()] - normaliser
    scores = own.tolist()
    if not num_top:
        return tuple(
            TokenLogprob(token, score) for token, score in zip(tokens.tolist(), scores, strict=True)
        )
    found = [
        _best(row, total, num_top) for row, total in zip(shifted, normaliser.tolist(), strict=True)
    ]
    return tuple(
        TokenLogprob(token, score, *top)
        for token, score, top in zip(tokens.tolist(), scores, found, strict=True)
    )


def _best(row: Tensor, total: float, count: int) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """The best ids and their log-probabilities; topk alone leaves the order of ties open."""
    least = row.topk(min(count, len(row))).values[-1]
    index = torch.nonzero(row >= least).squeeze(1)
    order = torch.argsort(row[index], descending=True, stable=True)[:count]
    ids = index[order]
    return tuple(ids.tolist()), tuple((row[ids] - total).tolist())
