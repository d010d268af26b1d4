"""UNO: the target guesses ahead by itself, on noise, through an adapter.

One forward a round: the tokens just committed and the root as plain rows, then a row of noise for
every further token. The root's row gives the target's own next token; noise rows guess those
behind it. What noise wrote is scratch. In a tree all nodes of a depth offer the same candidates.

Knows lanes, noise and trees; what is computed is in `UnoNet`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from graft.common import log
from graft.common.errors import InvalidArgument
from graft.common.tier import Tier
from graft.common.tree import IntArray, Tree
from graft.draft.guess import chain_of, guesses
from graft.draft.kv import OutOfPages
from graft.draft.law import RowLaw, best_children
from graft.draft.nets.uno import UnoNet
from graft.draft.proposers.base import ProposerInfo, Sampled, Seat
from graft.draft.proposers.model import ModelOptions, ModelProposer, state_of
from graft.draft.prune import pruned
from graft.draft.rows import prefix_part, step_rows
from graft.kernels.cpu.uno import build_uno_trees
from graft.kernels.ops import Ops

_log = log.get("uno")

# Committed tokens that are left to a round's own forward; more are run before it, in chunks.
_TAIL = 64
_MOST_NODES = 128
_MOST_CANDIDATES = 2048


@dataclass(frozen=True, slots=True)
class UnoShape:
    """What a round may draft, in the terms of the paper and of SGLang.

    width: rows of a draft forward, the root's included, and so the most tokens of a path.
    topk: candidates of each depth; 1 drafts chains.
    num_nodes: of a tree, counted from the target's own next token on; `width` for a chain.
    """

    width: int
    topk: int
    num_nodes: int

    def tier(self, name: str) -> Tier:
        """The same in our terms: nodes count the committed root as well."""
        return Tier(name, num_steps=self.width, topk=self.topk, num_draft_tokens=self.num_nodes + 1)


def uno_shape(num_steps: int | None, topk: int | None, num_draft_tokens: int | None) -> UnoShape:
    """The shape that settings ask for; unset ones give chains, or trees, of 8.

    num_draft_tokens: the width of chains; of trees their nodes, num_steps + 1 being the width.

    Raises:
        InvalidArgument: numbers that the field's own servers refuse too.
    """
    if (topk or 1) == 1:
        width = num_draft_tokens or 8
        if num_steps is not None and num_steps + 1 != width:
            _log.warning(
                "setting is inactive",
                setting="num_steps",
                reason="num_draft_tokens is the width of a chain",
            )
        shape = UnoShape(width, 1, width)
    else:
        width = 8 if num_steps is None else num_steps + 1
        shape = UnoShape(width, topk or 1, num_draft_tokens or 8)
    _check(shape)
    return shape


def _check(shape: UnoShape) -> None:
    """The limits of SGLang's UNO, so that a setting means the same at both."""
    width, topk, nodes = shape.width, shape.topk, shape.num_nodes
    if width < 2:
        raise InvalidArgument(
            f"UNO drafts {width} token a round, expected 2 or more", field="num_draft_tokens"
        )
    if nodes < width:
        raise InvalidArgument(
            f"num_draft_tokens {nodes} is below the {width} rows of a UNO draft (num_steps + 1)",
            field="num_draft_tokens",
        )
    if nodes > _MOST_NODES:
        raise InvalidArgument(
            f"num_draft_tokens {nodes} is over the {_MOST_NODES} that UNO takes",
            field="num_draft_tokens",
        )
    if topk == 1:
        return
    if nodes * topk > _MOST_CANDIDATES:
        raise InvalidArgument(
            f"num_draft_tokens {nodes} times eagle_topk {topk} is over the {_MOST_CANDIDATES}"
            " that UNO takes",
            field="eagle_topk",
        )
    most = min(sum(topk**depth for depth in range(width)), topk * (width - 2) + 2)
    if nodes > most:
        raise InvalidArgument(
            f"num_draft_tokens {nodes} is over the {most} nodes of a UNO tree of num_steps"
            f" {width - 1} and eagle_topk {topk}",
            field="num_draft_tokens",
        )


class NoiseTokens(NamedTuple):
    """Ids below which noise is drawn.

    first, stop: the range. seed: of all noise. mask: stands in for noise everywhere; -1 draws.
    """

    first: int
    stop: int
    seed: int = 0
    mask: int = -1

    def at(self, session: int, position: int, count: int) -> IntArray:
        """[count], int32: the same for a position however often it is asked for."""
        if self.mask >= 0:
            return np.full(count, self.mask, np.int32)
        drawn = [
            np.random.default_rng((self.seed, session, position + ahead)).integers(
                self.first, self.stop
            )
            for ahead in range(count)
        ]
        return np.asarray(drawn, np.int32)


class UnoProposer(ModelProposer):
    """Chains or trees whose first node is the target's own next token."""

    def __init__(
        self, name: str, net: UnoNet, ops: Ops, options: ModelOptions, tokens: NoiseTokens
    ) -> None:
        super().__init__(name, net, ops, options)
        self._uno = net
        self._tokens = tokens

    def describe(self) -> ProposerInfo:
        """As any model proposer; no tree is larger than the one that was asked for at start."""
        tier = self.options.tier
        info = super().describe()
        return replace(info, max_nodes=tier.num_draft_tokens, max_depth=tier.num_steps)

    def goal(self, seat: Seat) -> int:
        """All but the tail, which the round's own forward runs."""
        return max(state_of(seat).lane.length, len(seat.mirror.prefix) - _TAIL)

    def propose(self, batch: Sequence[Seat]) -> Sequence[Tree | Sampled | None]:
        """One tree a seat; None where its prefix is not run yet or has no room."""
        with torch.inference_mode():
            self.catch_up(batch)
            return self.grow(batch, range(len(batch)))

    def grow(
        self, batch: Sequence[Seat], ready: Sequence[int], wide: bool = False
    ) -> list[Tree | Sampled | None]:
        """Trees for the places in `ready` whose lanes lack no more than a tail."""
        trees: list[Tree | Sampled | None] = [None] * len(batch)
        widths = {place: width for place in ready if (width := self._room(batch[place]))}
        if not widths:
            return trees
        logits = self._guesses(batch, widths)
        for (place, width), rows in zip(
            widths.items(), logits.split(list(widths.values())), strict=True
        ):
            seat = batch[place]
            chain = seat.tier.topk == 1 or width == 1 or seat.mirror.sampling.needs_draft_probs
            trees[place] = _chain(seat, rows) if chain else _bush(seat, rows)
        return trees

    def _room(self, seat: Seat) -> int:
        """Rows that the seat's round has, the root's included; 0 when it drafts nothing."""
        lane, tier, length = state_of(seat).lane, seat.tier, len(seat.mirror.prefix)
        most = min(tier.num_steps, tier.num_draft_tokens - 1, self.options.tier.num_steps)
        width = min(most, self.net.context_length - length + 1)
        if width < 1 or length - lane.length > _TAIL:
            return 0
        try:
            self.kv.reserve(lane, length + width - 1)
        except OutOfPages as error:
            _log.warning("session drafts nothing", proposer=self.name, reason=str(error))
            return 0
        return width

    def _guesses(self, batch: Sequence[Seat], widths: dict[int, int]) -> Tensor:
        """[sum of widths, vocab]: after each root, and at each row of noise."""
        parts, tokens, wanted = [], [], []
        start = 0
        for place, width in widths.items():
            mirror, lane = batch[place].mirror, state_of(batch[place]).lane
            length = len(mirror.prefix)
            first, stop = min(lane.length, length - 1), length + width - 1
            parts.append(prefix_part(lane, first, stop))
            noise = self._tokens.at(mirror.session_id, length, width - 1)
            tokens += [mirror.prefix.tokens[first:], noise]
            start += stop - first
            wanted.append(np.arange(start - width, start))
            lane.length = length
        rows = np.concatenate(wanted)
        noisy = np.concatenate([one[1:] for one in wanted])
        hidden = self._uno.guess(
            torch.from_numpy(np.concatenate(tokens)),
            torch.from_numpy(noisy),
            step_rows(parts),
            self.kv.cache,
        )
        return self.net.logits(hidden[torch.from_numpy(rows)])


def _laws(seat: Seat, count: int) -> list[RowLaw]:
    mirror, noise = seat.mirror, state_of(seat).noise
    first = len(mirror.prefix)
    return [RowLaw(mirror.sampling, noise, first + row) for row in range(count)]


def _chain(seat: Seat, logits: Tensor) -> Tree | Sampled | None:
    """The target's own next token, and one guess a row behind it. logits: [width, vocab]."""
    vocab_size = seat.mirror.limits.vocab_size
    made = [
        guesses(logits[row : row + 1], [law], None, vocab_size, row)[0]
        for row, law in enumerate(_laws(seat, len(logits)))
    ]
    return chain_of(seat, made)


def _bush(seat: Seat, logits: Tensor) -> Tree | None:
    """The target's own next token, and the heaviest paths behind it. logits: [width, vocab]."""
    mirror, laws = seat.mirror, _laws(seat, len(logits))
    clean = best_children(logits[:1], laws[:1], 1)
    depths = best_children(logits[1:], laws[1:], seat.tier.topk)
    levels, topk = depths.index.shape
    most = sum(topk**depth for depth in range(levels + 1))
    nodes = min(seat.tier.num_draft_tokens - 1, most)
    grown = build_uno_trees(depths.index[None], depths.probs[None], nodes)
    first = float(clean.probs[0, 0].log())
    return pruned(
        mirror.prefix.root,
        mirror.limits.vocab_size,
        [int(clean.index[0, 0]), *grown.draft_tokens[0].tolist()],
        [0, *(1 + parent for parent in grown.parent[0].tolist()[1:])],
        [first, *(first + mass for mass in grown.masses[0].log().tolist())],
    )
