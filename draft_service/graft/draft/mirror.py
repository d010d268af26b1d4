"""A session as the draft service sees it: a copy of its committed prefix that must never drift.

Knows tokens, digests and the session's law; knows no proposer and no stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from graft.common.errors import GraftError
from graft.common.prefix import Prefix
from graft.common.sampling import Sampling
from graft.common.tree import IntArray, TreeLimits
from graft.draft.features import FeatureChunk, FeatureStore
from graft.v1.error_reason_pb2 import ErrorReason


class ChainBroken(GraftError):
    """A commit does not follow from the mirror; the session has to be joined anew."""

    reason = ErrorReason.ERROR_REASON_PROTOCOL


@dataclass(slots=True, eq=False)
class Mirror:
    """One joined session. Belongs to the engine's thread.

    prefix: prompt and committed tokens; the last one is the root.
    prompt_length: number of leading tokens that are the prompt.
    limits: what verify and draft agreed a tree may hold.
    room: tokens the session may still commit; a tree deeper than room - 1 is wasted.
    cache_salt: sessions with different salts share no cache.
    features: the target's hidden states, for proposers that need them; None has none.
    prediction: [tokens], int32, what the client expects the output to be; None for nothing.
    """

    session_id: int
    prefix: Prefix
    prompt_length: int
    sampling: Sampling
    limits: TreeLimits
    room: int
    cache_salt: str = ""
    features: FeatureStore | None = None
    prediction: IntArray | None = None
    num_commits: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if not len(self.prefix):
            raise ChainBroken(f"session {self.session_id:x} was given an empty prefix")
        if not 0 < self.prompt_length <= len(self.prefix):
            raise ChainBroken(
                f"session {self.session_id:x} has a prompt of {self.prompt_length} tokens in a "
                f"prefix of {len(self.prefix)}"
            )
        self._check_range(self.prefix.tokens)

    @property
    def features_complete(self) -> bool:
        """True when the row of every committed token but the root is here, from the start on."""
        store = self.features
        return store is not None and store.begun and store.length == len(self.prefix) - 1

    def take_features(self, chunks: Sequence[FeatureChunk]) -> None:
        """Adds rows that came, in place: after a commit of n tokens those of n positions, the
        former root's first, so that they end before the new root.

        Raises:
            ChainBroken: a row is missing, damaged or of a token that is not committed.
        """
        for chunk in chunks:
            if self.features is None:
                raise ChainBroken("features came that nobody asked for")
            if chunk.start + chunk.count > len(self.prefix) - 1:
                raise ChainBroken(
                    f"features came up to position {chunk.start + chunk.count - 1}, "
                    f"the prefix has {len(self.prefix)} tokens and a root without any"
                )
            try:
                self.features.take(chunk)
            except GraftError as error:
                raise ChainBroken(str(error)) from error

    def ahead(self, tokens: Sequence[int]) -> Mirror:
        """The session as it would be with `tokens` committed; this one stays as it is.

        It has the features of this one, so none of the added tokens.
        """
        return Mirror(
            session_id=self.session_id,
            prefix=self.prefix.fork(tokens),
            prompt_length=self.prompt_length,
            sampling=self.sampling,
            limits=self.limits,
            room=max(0, self.room - len(tokens)),
            cache_salt=self.cache_salt,
            features=self.features,
            prediction=self.prediction,
        )

    def commit(self, tokens: Sequence[int], prefix_length: int, prefix_digest: int) -> None:
        """Extends the prefix, in place, after checking that the commit chains to it.

        Raises:
            ChainBroken: length or digest differ, or a token is not in the vocabulary; the mirror
                is left as it was.
        """
        expected = len(self.prefix) + len(tokens)
        if not tokens or prefix_length != expected:
            raise ChainBroken(
                f"commit of {len(tokens)} tokens leads to length {prefix_length}, "
                f"expected {expected}"
            )
        added = self._check_range(tokens)
        if self.prefix.digest_after(tokens) != prefix_digest:
            raise ChainBroken(f"digest differs at length {prefix_length}")
        self.prefix.extend(added)
        self.room = max(0, self.room - len(tokens))
        self.num_commits += 1

    def _check_range(self, tokens: Sequence[int] | IntArray) -> Sequence[int] | IntArray:
        if isinstance(tokens, np.ndarray):
            low, high = int(tokens.min()), int(tokens.max())
        else:  # a round's few tokens are not worth an array
            low, high = min(tokens), max(tokens)
        if low < 0 or high >= self.limits.vocab_size:
            raise ChainBroken(
                f"a token is outside 0..{self.limits.vocab_size - 1}: {low if low < 0 else high}"
            )
        return tokens
