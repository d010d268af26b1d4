"""Builds the network in training that a proposer's name asks for.

The one file that knows every kind; what a kind is, is in the file of its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from graft.common.errors import Unsupported
from graft.draft.checkpoints.borrowed import Borrowed
from graft.train.corpus import Corpus
from graft.train.dflash import DflashOptions, DflashTrainee
from graft.train.dflash_start import Sample, fresh_dflash
from graft.train.export import Eagle3Target
from graft.train.mtp import MtpTrainee, fresh_mtp
from graft.train.start import eagle3_layers, eagle3_target, fresh_eagle3
from graft.train.trainee import Trainee
from graft.train.unroll import Eagle3Trainee, UnrollOptions

_SAMPLED_SEQUENCES = 64
_DFLASH_LAYERS = 2


@dataclass(frozen=True, slots=True)
class UnrollChoice:
    """Options of the unrolled steps that a user may set; see `UnrollOptions`."""

    share: float = 0.5
    accept: str = "greedy"
    accept_from: float = 0.6
    accept_share: float = 0.5

    def options(self) -> UnrollOptions:
        """The choice, with everything else by default."""
        weights = UnrollOptions().weights
        return UnrollOptions(
            shares=(1.0, *(self.share,) * (len(weights) - 1)),
            accept=self.accept,
            accept_from=self.accept_from,
            accept_share=self.accept_share,
        )


def make_trainee(
    proposer: str, borrowed: Borrowed, corpus: Corpus, dtype: torch.dtype, choice: UnrollChoice
) -> Trainee:
    """A fresh trainee; random draws come from torch's global generator.

    Raises:
        InvalidArgument: the corpus is not finished.
        Unsupported: no such proposer is trained here.
    """
    drafted = corpus.draft_vocab()
    match proposer:
        case "eagle3":
            target = eagle3_target(borrowed, eagle3_layers(borrowed.num_layers), drafted)
            sizes = state_sizes(corpus, target.layers)
            return Eagle3Trainee(
                fresh_eagle3(borrowed, target, sizes, dtype), target, choice.options()
            )
        case "mtp":
            target = eagle3_target(borrowed, (borrowed.num_layers,), drafted)
            unit = float(state_sizes(corpus, target.layers).median())
            net = fresh_mtp(borrowed, dtype, unit)
            return MtpTrainee(net, target, borrowed.head_weight(), choice.options())
        case "dflash":
            target = eagle3_target(borrowed, corpus.layers[:-1], drafted)
            mask = unused_token(corpus, borrowed.config.vocab_size)
            sample = _sample(corpus, target, mask)
            blocks = fresh_dflash(borrowed, target.layers, sample, _DFLASH_LAYERS, dtype)
            return DflashTrainee(blocks, target, borrowed.head_weight(), mask, DflashOptions())
    raise Unsupported(f"{proposer} is not trained here, expected eagle3, mtp or dflash")


def unused_token(corpus: Corpus, vocab_size: int) -> int:
    """The first id that no conversation has; reserved words come first in many tokenizers."""
    used = np.zeros(vocab_size, np.bool_)
    for split in ("train", "held"):
        for ref in corpus.sequences(split):
            used[corpus.tokens(ref)] = True
    return int(np.argmin(used))


def state_sizes(corpus: Corpus, layers: tuple[int, ...]) -> Tensor:
    """[states * hidden]: root mean square of each channel over the first sequences.

    The first row of a sequence is left out: there some channels are a thousand times larger.
    """
    rows = torch.cat([states.flatten(1) for states, _ in _some_rows(corpus, layers)])
    return rows.pow(2).mean(0).sqrt()


def _sample(corpus: Corpus, target: Eagle3Target, mask: int) -> Sample:
    rows = list(_some_rows(corpus, target.layers))
    return Sample(
        torch.cat([states.flatten(1) for states, _ in rows]),
        torch.cat([target.embedding[tokens] for _, tokens in rows]),
        target.embedding[mask],
    )


def _some_rows(corpus: Corpus, layers: tuple[int, ...]) -> Iterator[tuple[Tensor, Tensor]]:
    """States [rows, layers, hidden] and tokens of the first sequences, without their first row."""
    picked = [corpus.layers.index(layer) for layer in layers]
    for ref in corpus.sequences("train")[:_SAMPLED_SEQUENCES]:
        tokens = torch.from_numpy(corpus.tokens(ref)[1:-1]).long()
        yield corpus.states(ref)[1:, picked], tokens
