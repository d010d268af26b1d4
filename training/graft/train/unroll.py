"""Trains EAGLE-3 as it will draft: several steps over its own outputs, later ones on fewer slots.

Knows batches and losses; the network is in `graft.train.eagle3`, its files in
`graft.train.export`.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from graft.train.eagle3 import Eagle3Net, Seen
from graft.train.export import Eagle3Target, read_eagle3, write_eagle3
from graft.train.losses import (
    coupled_agreement,
    cross_entropy,
    head_log_probabilities,
    overlap,
)
from graft.train.trainee import Batch, Loss, Trainee

_NOWHERE = -1e9


@dataclass(frozen=True, slots=True)
class UnrollOptions:
    """How steps count and how many slots they run.

    weights: of each step's loss. shares: of a window's slots that each step runs, falling; the
        first is 1. prompt_weight: of a law behind a prompt's token, an answer's counts 1.
    accept_from: progress at which the acceptance-shaped loss begins to come in; it ends as
        `accept_share` of the loss.
    """

    weights: tuple[float, ...] = (1.0, 0.8, 0.64, 0.51)
    shares: tuple[float, ...] = (1.0, 0.5, 0.5, 0.5)
    prompt_weight: float = 0.25
    accept: str = "greedy"
    accept_from: float = 0.6
    accept_share: float = 0.5


@dataclass(frozen=True, slots=True, eq=False)
class _Places:
    """Where step k of some slots looks: the slots, and the rows whose laws it guesses.

    slots: [B, n], int64, ascending. rows: [B, n], the row of the law. weights: [B, n].
    """

    slots: Tensor
    rows: Tensor
    weights: Tensor


class Eagle3Trainee(Trainee):
    """An EAGLE-3 head in training."""

    proposer = "eagle3"

    def __init__(self, net: Eagle3Net, target: Eagle3Target, options: UnrollOptions) -> None:
        super().__init__()
        self.net, self.target, self.options = net, target, options
        self.layers = target.layers
        self.margin = len(options.weights)
        self.embedding: Tensor
        self.register_buffer("embedding", target.embedding, persistent=False)
        self.drafted: Tensor
        kept = torch.zeros(len(target.embedding), dtype=torch.bool)
        kept[target.draft_tokens] = True
        self.register_buffer("drafted", kept, persistent=False)

    def loss(self, batch: Batch, progress: float) -> Loss:
        """Cross-entropy of every step, and the acceptance-shaped loss late in training."""
        options = self.options
        head = self.net.head.to(self.net.dtype)
        laws = batch.laws
        assert laws is not None, "EAGLE-3 learns laws of the draft vocabulary"
        total = torch.zeros(())
        figures: dict[str, float] = {}
        share = _ramp(progress, options.accept_from) * options.accept_share
        for step, (hidden, places) in enumerate(self._steps(batch, options.shares)):
            counted = places.weights > 0
            weights = places.weights[counted]
            rows = _gather(places.rows)
            columns, masses = laws.columns[rows][counted], laws.masses[rows][counted]
            log_drafted = head_log_probabilities(self.net.normed(hidden[counted]), head, columns)
            losses = cross_entropy(log_drafted, masses)
            figures[f"entropy_{step + 1}"] = _mean(losses.detach(), weights)
            if share:
                losses = (1 - share) * losses + share * self._accept(log_drafted, masses)
            total = total + options.weights[step] * (losses * weights).sum() / weights.sum()
            figures[f"agree_{step + 1}"] = _mean(_agreed(log_drafted.detach()), weights)
        return Loss(total / sum(options.weights), figures)

    def _accept(self, log_drafted: Tensor, masses: Tensor) -> Tensor:
        match self.options.accept:
            case "greedy":
                return -log_drafted[:, 0]
            case "coupled":
                return -coupled_agreement(log_drafted, masses).log()
            case "overlap":
                return -overlap(log_drafted, masses).log()
        raise ValueError(f"accept is {self.options.accept!r}, expected greedy, coupled or overlap")

    def figures(self, batch: Batch) -> dict[str, tuple[float, float]]:
        """Agreement of each step with true inputs, and the chain's accept length.

        A chain whose first tokens were right has had true inputs so far, so the product along
        the steps is what a chain that runs freely gets accepted. Only places in greedy answers
        count, and only tokens that really came.
        """
        with torch.no_grad():
            right, counted = self._outcomes(batch)
        steps = len(right)
        sums: dict[str, tuple[float, float]] = {}
        whole = torch.stack(counted).all(0)
        run = torch.ones_like(whole)
        accepted = torch.zeros(whole.shape)
        for step in range(steps):
            place = counted[step]
            sums[f"agree_{step + 1}"] = (float(right[step][place].sum()), float(place.sum()))
            run = run & right[step]
            accepted += run
        sums["accept_length"] = (float((accepted[whole] + 1).sum()), float(whole.sum()))
        rounds, tokens = _walk(accepted.long(), whole)
        sums["chain"] = (tokens, rounds)
        return sums

    def _outcomes(self, batch: Batch) -> tuple[list[Tensor], list[Tensor]]:
        """Of each step: where its likeliest token came true, and where that counts; [B, W]."""
        steps = len(self.options.weights)
        right, counted = [], []
        for step, (hidden, places) in enumerate(self._steps(batch, (1.0,) * steps)):
            rows = _gather(places.rows)
            top = (self.net.normed(hidden) @ self.net.head.to(self.net.dtype).T).argmax(-1)
            right.append(self.target.draft_tokens[top] == batch.following[rows])
            real = _real(batch, places.slots, step) & batch.answer[rows] & batch.greedy[rows]
            counted.append(real)
        return right, counted

    def save(self, folder: Path) -> None:
        """Writes the layout of SpecForge and SGLang."""
        write_eagle3(self.net, self.target, folder)

    def read(self, folder: Path) -> None:
        """In place: goes on from an EAGLE-3 head."""
        read_eagle3(self.net, self.target, folder)

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Matrices, norms and the head: the head began as the target's and moves less."""
        net = self.net
        matrices = [net.fc, net.qkv, net.output, net.gate_up, net.down]
        norms = [net.embedding_norm, net.hidden_norm, net.mlp_norm, net.final_norm]
        return [
            {"params": matrices, "role": "matrix"},
            {"params": [net.head], "role": "head"},
            {"params": norms, "role": "norm", "weight_decay": 0.0},
        ]

    def _steps(self, batch: Batch, shares: tuple[float, ...]) -> Any:
        """Yields each step's outputs [B, n, hidden] and places."""
        net, length = self.net, batch.length
        segments = batch.segments[:, :length]
        mask = _mask(segments, net.dtype)
        slots = torch.arange(length).expand_as(segments)
        hidden = net.fuse(batch.states[:, :length].flatten(2))
        embedded = self._embed(batch.following[:, :length])
        hidden, seen = net.first(embedded, hidden, batch.positions[:, :length], mask)
        places = self._places(batch, slots, 0)
        yield hidden, places
        chance = torch.rand(segments.shape, generator=torch.Generator().manual_seed(batch.seed))
        for step in range(1, len(shares)):
            count = max(1, round(shares[step] * length))
            if count < slots.shape[1]:
                places = self._places(batch, slots, step)
                kept = _pick(places.weights, chance.gather(1, slots), count)
                hidden = hidden.gather(1, kept[..., None].expand(-1, -1, hidden.shape[2]))
                seen = _narrow(seen, kept)
                slots = slots.gather(1, kept)
            rows = _gather(slots + step)
            embedded = self._embed(batch.following[rows])
            positions = batch.positions[:, :length].gather(1, slots) + step
            hidden, seen = net.later(embedded, hidden, positions, seen)
            yield hidden, self._places(batch, slots, step)

    def _embed(self, tokens: Tensor) -> Tensor:
        return self.embedding[tokens].float()

    def _places(self, batch: Batch, slots: Tensor, step: int) -> _Places:
        rows = slots + 1 + step
        at = _gather(rows)
        weights = torch.where(batch.answer[at], 1.0, self.options.prompt_weight)
        learnt = _real(batch, slots, step) & self.drafted[batch.following[at]]
        return _Places(slots, rows, weights * learnt)


def _real(batch: Batch, slots: Tensor, step: int) -> Tensor:
    """Whether the row that step `step` of a slot guesses lies in the slot's own segment."""
    own, guessed = batch.segments[_gather(slots)], batch.segments[_gather(slots + 1 + step)]
    return (own == guessed) & (own >= 0)


def _pick(weights: Tensor, chance: Tensor, count: int) -> Tensor:
    """[B, count], ascending: places drawn in proportion to weights, those of weight 0 last."""
    keys = chance.clamp(min=1e-6).log() / weights.clamp(min=1e-6)
    return keys.topk(count, 1).indices.sort(1).values


def _narrow(seen: Seen, kept: Tensor) -> Seen:
    """The view of some of the slots. kept: [B, n], places among the slots so far."""
    mask = seen.mask.gather(1, kept[..., None].expand(-1, -1, seen.mask.shape[2]))
    own = []
    for key, value in seen.own:
        at = kept[:, None, None, :, None].expand(-1, key.shape[1], 1, -1, key.shape[4])
        own.append((key.gather(3, at), value.gather(3, at)))
    return Seen(seen.keys, seen.values, mask, tuple(own))


def _mask(segments: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, W, W], 0 where a slot sees another: in its segment, not behind it."""
    length = segments.shape[1]
    seen = (segments[:, :, None] == segments[:, None, :]) & torch.ones(
        length, length, dtype=torch.bool
    ).tril()
    return torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, _NOWHERE)


def _gather(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Index of [B, n] rows, each in its own window."""
    return torch.arange(len(rows))[:, None], rows


def _agreed(log_drafted: Tensor) -> Tensor:
    """1 where the likeliest column got more than any other could have."""
    first, others = log_drafted[:, 0], log_drafted[:, 1:].amax(1)
    return (first > others).float()


def _mean(values: Tensor, weights: Tensor) -> float:
    return float((values * weights).sum() / weights.sum())


def _ramp(progress: float, start: float) -> float:
    """0 up to `start`, then linear, 1 at a tenth of the training later."""
    return min(1.0, max(0.0, (progress - start) / 0.1))


def _walk(accepted: Tensor, whole: Tensor) -> tuple[float, float]:
    """Rounds and tokens of a generation that drafts at each place it gets to."""
    rounds = tokens = 0
    for lengths, valid in zip(accepted.tolist(), whole.tolist(), strict=True):
        place = 0
        while place < len(lengths):
            if not valid[place]:
                place += 1
                continue
            rounds += 1
            tokens += lengths[place] + 1
            place += lengths[place] + 1
    return float(rounds), float(tokens)
