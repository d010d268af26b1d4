"""Small corpora in memory, and EAGLE-3 heads in training over tiny targets. Knows no file."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from graft.draft.checkpoints.borrowed import Borrowed
from graft.models.weights import FINAL_NORM
from graft.train.corpus import SequenceRef
from graft.train.laws import LawMaker, LawTable
from graft.train.start import eagle3_layers, eagle3_target, fresh_eagle3
from graft.train.unroll import Eagle3Trainee, UnrollOptions


class MemoryCorpus:
    """Random tokens and states; equal seeds give equal corpora."""

    def __init__(
        self,
        lengths: Sequence[int],
        layers: tuple[int, ...],
        hidden: int = 64,
        vocab: int = 320,
        seed: int = 0,
    ) -> None:
        random = np.random.default_rng(seed)
        self.layers = layers
        self._tokens = [random.integers(0, vocab, n).astype(np.int32) for n in lengths]
        self._states = [
            torch.from_numpy(random.standard_normal((n - 1, len(layers), hidden)).astype("f4"))
            for n in lengths
        ]
        self.refs = [
            SequenceRef(str(i), 0, 0, n, 3, 0.7 * (i % 2), "length", i)
            for i, n in enumerate(lengths)
        ]

    def tokens(self, ref: SequenceRef) -> NDArray[np.int32]:
        """[n]"""
        return self._tokens[ref.index]

    def states(self, ref: SequenceRef) -> Tensor:
        """[n - 1, states, hidden]"""
        return self._states[ref.index]

    def laws(self, maker: LawMaker) -> LawTable:
        """Of all rows, in order."""
        return maker.of_all(self.states(ref)[:, -1] for ref in self.refs)


def tiny_trainee(
    borrowed: Borrowed,
    num_drafted: int = 120,
    dtype: torch.dtype = torch.float32,
    options: UnrollOptions | None = None,
) -> Eagle3Trainee:
    """A head whose every weight is random, so that nothing is hidden by a zero or a one."""
    torch.manual_seed(3)
    layers = eagle3_layers(borrowed.num_layers)
    drafted = torch.arange(num_drafted) * 2
    target = eagle3_target(borrowed, layers, drafted)
    sizes = torch.rand(len(layers) * borrowed.config.hidden_size) + 0.5
    net = fresh_eagle3(borrowed, target, sizes, dtype)
    with torch.no_grad():
        for one in net.parameters():
            one.add_(torch.randn_like(one) * 0.05)
    return Eagle3Trainee(net, target, options or UnrollOptions())


def law_maker(borrowed: Borrowed, drafted: Tensor) -> LawMaker:
    """Laws over the columns `drafted`."""
    return LawMaker(
        borrowed.source.read(FINAL_NORM),
        borrowed.head_weight()[drafted],
        borrowed.config.rms_norm_eps,
    )
