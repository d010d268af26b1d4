"""Guesses one token a row, position by position, for drafters whose rows are not beams of a tree.

Under most rules the likeliest token, noise and all; under rules that compare probabilities a token
drawn by chance, with what it was drawn from. Knows laws and logits; knows no network.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from graft.common.draft_probs import Distribution
from graft.common.tree import Tree
from graft.draft.law import RowLaw, best_children, draw_children
from graft.draft.proposers.base import Sampled, Seat
from graft.draft.prune import pruned_chain


class Guess(NamedTuple):
    """One token. log: of its probability. drawn: what it was drawn from; None for a likeliest."""

    token: int
    log: float
    drawn: Distribution | None = None


def guesses(
    logits: Tensor, laws: Sequence[RowLaw], token_ids: Tensor | None, vocab_size: int, step: int
) -> list[Guess]:
    """One guess a row, all of them the token of `step`, from 0, of their chains.

    Shapes:
        logits: [rows, draft vocab], float32; laws: [rows]; token_ids: [draft vocab] or None.
        Ids from `vocab_size` on are not drawn.
    """
    made: dict[int, Guess] = {}
    drawn = [row for row, law in enumerate(laws) if law.sampling.needs_draft_probs]
    sure = [row for row, law in enumerate(laws) if not law.sampling.needs_draft_probs]
    if drawn:
        some = [laws[row] for row in drawn]
        children, sources = draw_children(logits[drawn], some, token_ids, vocab_size, step)
        made |= dict(zip(drawn, _named(children, token_ids, sources), strict=True))
    if sure:
        children = best_children(logits[sure], [laws[row] for row in sure], 1)
        made |= dict(zip(sure, _named(children, token_ids, [None] * len(sure)), strict=True))
    return [made[row] for row in range(len(laws))]


def chain_of(seat: Seat, made: Sequence[Guess]) -> Tree | Sampled | None:
    """The guesses as a chain under the seat's root, cut to its tier; None when none is left."""
    mirror, tier = seat.mirror, seat.tier
    most = max(0, min(tier.num_steps, tier.num_draft_tokens - 1))
    tree = pruned_chain(
        mirror.prefix.root,
        mirror.limits.vocab_size,
        [guess.token for guess in made[:most]],
        [guess.log for guess in made[:most]],
    )
    if tree is None or not mirror.sampling.needs_draft_probs:
        return tree
    sources = [guess.drawn for guess in made[: tree.num_nodes - 1]]
    return Sampled(tree, tuple(source for source in sources if source is not None))


def _named(
    children: tuple[Tensor, Tensor],
    token_ids: Tensor | None,
    sources: Sequence[Distribution | None],
) -> list[Guess]:
    probs, index = children
    tokens = index if token_ids is None else token_ids[index]
    logs = probs[:, 0].log().tolist()
    return [Guess(*one) for one in zip(tokens[:, 0].tolist(), logs, sources, strict=True)]
