"""The committed prefix of a session and its chained digest. Only ever grows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from graft.common.tree import IntArray

_MASK = (1 << 64) - 1
_BASE = 0x9E3779B97F4A7C15
_LENGTH = 0xD6E8FEB86659FD93
_BLOCK = 4096
_FEW = 16  # tokens that are added faster one by one


def _digest(state: int, length: int) -> int:
    """SplitMix64's finaliser over state and length: spreads them over all 64 bits."""
    state = (state + length * _LENGTH) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def _powers() -> npt.NDArray[np.uint64]:
    powers = np.ones(_BLOCK + 1, np.uint64)
    powers[1:] = np.uint64(_BASE)
    return np.multiply.accumulate(powers)


_POWERS = _powers()


class Prefix:
    """Tokens the target has decided; the last one is the root.

    The digest chains: state' = state * BASE + token + 1 (mod 2^64), then SplitMix64's finaliser
    over (state, length). It tells prefixes apart; it is no defence against a forger, and needs to
    be none: a tree for a wrong prefix changes speed, never text.
    """

    __slots__ = ("_length", "_state", "_tokens")

    def __init__(self, tokens: Sequence[int] | IntArray = ()) -> None:
        self._tokens = np.empty(max(64, len(tokens) * 2), np.int32)
        self._length = 0
        self._state = 0
        self.extend(tokens)

    def __len__(self) -> int:
        return self._length

    @property
    def tokens(self) -> IntArray:
        """[length], int32: a read-only view, valid until the next `extend`."""
        view = self._tokens[: self._length]
        view.flags.writeable = False
        return view

    @property
    def root(self) -> int:
        """The last token."""
        return int(self._tokens[self._length - 1])

    @property
    def digest(self) -> int:
        """64-bit digest of all tokens, root included."""
        return _digest(self._state, self._length)

    def digest_after(self, tokens: Sequence[int]) -> int:
        """The digest this prefix will have once `tokens` are committed."""
        state = self._state
        for token in tokens:
            state = (state * _BASE + token + 1) & _MASK
        return _digest(state, self._length + len(tokens))

    def fork(self, tokens: Sequence[int]) -> Prefix:
        """What this prefix would be with `tokens` committed; this one stays as it is."""
        other = Prefix()
        other._tokens = np.empty(self._length + len(tokens) + 64, np.int32)
        other._tokens[: self._length] = self._tokens[: self._length]
        other._length, other._state = self._length, self._state
        other.extend(tokens)
        return other

    def extend(self, tokens: Sequence[int] | IntArray) -> None:
        """Commits tokens."""
        added = np.asarray(tokens, np.int32)
        end = self._length + len(added)
        if end > len(self._tokens):
            grown = np.empty(end * 2, np.int32)
            grown[: self._length] = self._tokens[: self._length]
            self._tokens = grown
        self._tokens[self._length : end] = added
        self._length = end
        if len(added) <= _FEW:
            for token in added.tolist():
                self._state = (self._state * _BASE + token + 1) & _MASK
            return
        for start in range(0, len(added), _BLOCK):
            block = added[start : start + _BLOCK].astype(np.uint64) + np.uint64(1)
            size = len(block)
            tail = int((block * _POWERS[size - 1 :: -1][:size]).sum(dtype=np.uint64))
            self._state = (self._state * int(_POWERS[size]) + tail) & _MASK
