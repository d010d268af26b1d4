"""What a draft network is to the proposer that runs it. Knows rows, tokens and hidden states."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from graft.draft.features import FeatureNeed
from graft.draft.kv import KvShape
from graft.kernels.ops import KvCache, Recurrent, StepRows


class DraftNet(Protocol):
    """A network whose slot p holds one token and, with features, the target's state of position p.

    shift: slot p holds the token of position p + shift: 0 for a decoder of its own, 1 for one
        that reads the target's states.
    needs: the states it reads; None reads none.
    vocab_size: ids it can embed. token_ids: [draft vocab], int64, the target's id of each column
        of its logits; None is the identity.
    context_length: slots it can hold.
    recurrent: grows its trees in one call; None where they are grown level by level.
    """

    @property
    def shift(self) -> int: ...
    @property
    def needs(self) -> FeatureNeed | None: ...
    @property
    def kv_shape(self) -> KvShape: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def token_ids(self) -> Tensor | None: ...
    @property
    def context_length(self) -> int: ...
    @property
    def recurrent(self) -> Recurrent | None: ...

    def fuse(self, features: Tensor) -> Tensor:
        """The target's states as they come, [rows, width] -> what `forward` takes as hidden."""
        ...

    def forward(self, tokens: Tensor, hidden: Tensor | None, rows: StepRows, kv: KvCache) -> Tensor:
        """Runs rows, writes their keys and values, and returns what the next step takes as hidden.

        Shapes:
            tokens: [rows], int32.
            hidden: [rows, hidden], fused states or what an earlier call returned for the parents;
                None for a network without features.
            returns: [rows, hidden], the caller's own.
        """
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden] of `forward` -> [n, draft vocab]."""
        ...
