"""One window of a text as a trainee gets it, its states and laws those of a tiny target."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graft.draft.checkpoints.borrowed import Borrowed
from graft.models.weights import FINAL_NORM
from graft.testing.plain import Plain
from graft.train.export import Eagle3Target
from graft.train.laws import LawMaker
from graft.train.trainee import Batch, Laws


def train_target(borrowed: Borrowed, layers: tuple[int, ...], draft_tokens: int) -> Eagle3Target:
    """A target whose draft vocabulary is its first words."""
    return Eagle3Target(
        config=borrowed.raw,
        num_layers=borrowed.num_layers,
        head_dim=borrowed.config.head_dim,
        embedding=borrowed.embedding(),
        layers=layers,
        draft_tokens=torch.arange(draft_tokens),
    )


def window_of(
    plain: Plain,
    borrowed: Borrowed,
    tokens: Sequence[int],
    layers: tuple[int, ...],
    *,
    length: int,
    prompt_len: int,
    draft_tokens: int,
) -> Batch:
    """A window over all of `tokens` but the last; rows behind `length` are its margin."""
    rows = len(tokens) - 1
    deepest = borrowed.num_layers
    states = torch.from_numpy(plain.states(tokens, (*layers, deepest), False))[:rows].view(
        rows, len(layers) + 1, -1
    )
    maker = LawMaker(
        borrowed.source.read(FINAL_NORM),
        borrowed.head_weight()[:draft_tokens],
        borrowed.config.rms_norm_eps,
    )
    table = maker.of(states[:, -1])
    ids = torch.tensor(tokens)
    return Batch(
        tokens=ids[None, :-1],
        following=ids[None, 1:],
        states=states[None, :, :-1],
        positions=torch.arange(rows)[None],
        segments=torch.zeros(1, rows, dtype=torch.int64),
        answer=(torch.arange(rows) + 1 >= prompt_len)[None],
        greedy=torch.ones(1, rows, dtype=torch.bool),
        laws=Laws(table.columns[None].long(), table.masses[None].float()),
        length=length,
        seed=3,
    )
