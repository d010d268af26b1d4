"""Ranks drafted children as the target will choose: with its temperature, filters and noise.

Under the coupled rule the target takes the highest of logit_p / T + noise, and the noise of every
(seed, position, token) is known here too. A drafter that ranks its own logits with the same noise
meets that choice far more often than one that ranks by probability alone.

Knows laws and logits; knows no tree and no session.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from graft.common.draft_probs import Distribution, distribution, draw_uniform
from graft.common.sampling import Sampling
from graft.kernels.cpu.choose import target_probs
from graft.kernels.cpu.noise import noise
from graft.kernels.ops import ChoiceRows
from graft.kernels.reference.choose import GREEDY_BELOW
from graft.v1.sampling_pb2 import AcceptRule

_DRAWN_WIDTH = 64
_RUN = 128
_FEWEST_RUNS = 16


class Children(NamedTuple):
    """The best children of each row, best first.

    probs: [rows, topk], float32, how likely the target takes each; 0 for those it cannot take.
    index: [rows, topk], int64, columns of the logits.
    """

    probs: Tensor
    index: Tensor


class Noise:
    """The Gumbel noise of one session by position, for the tokens a drafter can name."""

    def __init__(self, seed: int, vocab_size: int, token_ids: Tensor | None) -> None:
        """token_ids: [draft vocab], int64, the target's id of each column; None is the identity."""
        self._seed = seed
        self._token_ids = token_ids
        self._vocab_size = vocab_size
        self._at: dict[int, Tensor] = {}

    def at(self, position: int) -> Tensor:
        """[draft vocab], float32: noise of the tokens that may stand at `position`."""
        known = self._at.get(position)
        if known is None:
            known = noise(self._seed, position, self._vocab_size)
            if self._token_ids is not None:
                known = known[self._token_ids]
            self._at[position] = known
        return known

    def forget(self, before: int) -> None:
        """Drops the noise of positions that are decided."""
        for position in [known for known in self._at if known < before]:
            del self._at[position]


class RowLaw(NamedTuple):
    """What decides the token after one row. position: of that token, absolute."""

    sampling: Sampling
    noise: Noise
    position: int

    @property
    def coupled(self) -> bool:
        """True when the target's choice hangs on the noise."""
        sampling = self.sampling
        return (
            sampling.rule == AcceptRule.ACCEPT_RULE_COUPLED
            and sampling.temperature >= GREEDY_BELOW
            and sampling.top_k != 1
        )


def best_children(logits: Tensor, laws: Sequence[RowLaw], topk: int) -> Children:
    """The `topk` likeliest children of every row; fewer where the vocabulary is smaller.

    The drafter's logits are an estimate of the target's, good to about one unit. So a child's
    probability is softmax(logit + T * noise): as T falls it becomes the plain softmax, which is
    what is known of a greedy choice.

    Shapes:
        logits: [rows, draft vocab], float32; laws: [rows]. Neighbours may share one.
    """
    coupled = [row for row, law in enumerate(laws) if law.coupled]
    if coupled:
        logits = logits.clone()
        _add_noise_(logits, coupled, laws)
    index = _largest(logits, min(topk, logits.shape[1]))
    return Children(torch.softmax(logits, dim=1).gather(1, index), index)


def _largest(logits: Tensor, count: int) -> Tensor:
    """[rows, count], int64: columns of the largest logits of each row, largest first.

    A wide row is cut into runs, for the `count` largest lie in the runs with the largest maxima;
    finding these is one pass that the machine does many columns at a time.
    """
    rows, width = logits.shape
    num_runs = width // _RUN
    if width % _RUN or num_runs < max(_FEWEST_RUNS, count):
        return torch.topk(logits, count, dim=1).indices
    runs = logits.reshape(rows, num_runs, _RUN)
    best = torch.topk(runs.amax(dim=2), count, dim=1).indices
    first = torch.arange(0, rows * num_runs, num_runs).unsqueeze(1)
    candidates = runs.flatten(0, 1).index_select(0, (best + first).flatten())
    place = torch.topk(candidates.view(rows, count * _RUN), count, dim=1).indices
    return best.gather(1, place // _RUN) * _RUN + place % _RUN


class Drawn(NamedTuple):
    """One token for each row, drawn by chance, for rules that compare probabilities.

    children: one column a row. distributions: what each token was drawn from, in target ids.
    """

    children: Children
    distributions: tuple[Distribution, ...]


def draw_children(
    logits: Tensor, laws: Sequence[RowLaw], token_ids: Tensor | None, vocab_size: int, step: int
) -> Drawn:
    """Draws the token of `step`, from 0, of every chain, with the uniform verify draws it again by.

    The law is the request's own, temperature and filters, over the drafter's logits, cut to its
    likeliest tokens. A row's position is that of the drawn token.

    Shapes:
        logits: [rows, draft vocab], float32; laws: [rows]. Ids from `vocab_size` on are not drawn.
    """
    allowed = logits
    if token_ids is None and logits.shape[1] > vocab_size:
        allowed = logits[:, :vocab_size]
    probs = target_probs(allowed.contiguous(), _choice_rows(laws))
    weights, columns = torch.topk(probs, min(_DRAWN_WIDTH, probs.shape[1]), dim=1)
    tokens = columns if token_ids is None else token_ids[columns]
    picked, shares, made = [], [], []
    for row, law in enumerate(laws):
        one = distribution(tokens[row].numpy(), weights[row].tolist())
        prefix_length = law.position - step
        token = one.draw(draw_uniform(law.sampling.seed, prefix_length, step))
        place = int((tokens[row] == token).nonzero()[0, 0])
        picked.append(int(columns[row, place]))
        shares.append(float(one.probs[int(np.searchsorted(one.tokens, token))]))
        made.append(one)
    children = Children(torch.tensor(shares).unsqueeze(1), torch.tensor(picked).unsqueeze(1))
    return Drawn(children, tuple(made))


def _add_noise_(logits: Tensor, coupled: Sequence[int], laws: Sequence[RowLaw]) -> None:
    """In place: what the request's filters drop goes to -inf, the rest gets its noise."""
    filtered = [row for row in coupled if _filters(laws[row].sampling)]
    if filtered:
        kept = target_probs(
            logits[filtered].contiguous(), _choice_rows([laws[row] for row in filtered])
        )
        logits[filtered] = logits[filtered].masked_fill(kept <= 0, float("-inf"))
    # Neighbours that share a law are one block.
    blocks = groupby(enumerate(coupled), lambda place: (id(laws[place[1]]), place[1] - place[0]))
    for _, block in blocks:
        rows = [row for _, row in block]
        law = laws[rows[0]]
        noise_there = law.noise.at(law.position)
        logits[rows[0] : rows[-1] + 1].add_(noise_there, alpha=law.sampling.temperature)


def _filters(sampling: Sampling) -> bool:
    return sampling.top_k > 0 or sampling.top_p < 1 or sampling.min_p > 0


def _choice_rows(laws: Sequence[RowLaw]) -> ChoiceRows:
    def column(values: Sequence[float], dtype: type) -> Tensor:
        return torch.from_numpy(np.asarray(values, dtype))

    samplings = [law.sampling for law in laws]
    return ChoiceRows(
        temperature=column([one.temperature for one in samplings], np.float32),
        top_k=column([one.top_k for one in samplings], np.int32),
        top_p=column([one.top_p for one in samplings], np.float32),
        min_p=column([one.min_p for one in samplings], np.float32),
        seed=column([one.seed for one in samplings], np.uint64).view(torch.int64),
        position=column([law.position for law in laws], np.int32),
    )
