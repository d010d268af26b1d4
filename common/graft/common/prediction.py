"""Where a text stands in what its client predicted it to be. Knows tokens; knows no model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from graft.common.tree import IntArray

MAX_MATCH = 32


class Place(NamedTuple):
    """following: of the predicted token that comes next. length: tokens that match before it.

    A text that has followed the prediction from its beginning matches `MAX_MATCH`.
    """

    following: int
    length: int


NOWHERE = Place(0, 0)


def align(prediction: IntArray, text: IntArray) -> Place:
    """The place after the longest match of the end of `text`; of equal ones, the nearest in index.

    An empty text stands at the beginning. NOWHERE when its last token is not predicted.

    Shapes:
        prediction, text: [tokens], int32; text is what was generated, without the prompt.
    """
    count = len(text)
    if not count:
        return Place(0, MAX_MATCH)
    if count <= len(prediction) and bool(np.array_equal(prediction[:count], text)):
        return Place(count, MAX_MATCH)
    ends = np.flatnonzero(prediction == text[-1])
    if not len(ends):
        return NOWHERE
    length = 1
    while length < min(MAX_MATCH, count):
        longer = ends[ends >= length]
        longer = longer[prediction[longer - length] == text[-1 - length]]
        if not len(longer):
            break
        ends, length = longer, length + 1
    nearest = int(ends[np.argmin(np.abs(ends + 1 - count))])
    return Place(nearest + 1, length)


class Follower:
    """Counts the tokens of a growing text that came as predicted, each at the place before it."""

    def __init__(self, prediction: Sequence[int]) -> None:
        self.num_accepted = 0
        self._prediction = np.asarray(prediction, np.int32)
        self._text: list[int] = []
        self._index = 0

    def feed(self, tokens: Sequence[int]) -> int:
        """Takes the next tokens; how many of them are accepted. Never more than were predicted."""
        before = self.num_accepted
        for token in tokens:
            self._text.append(token)
            size = len(self._prediction)
            if self._index < size and self._prediction[self._index] == token:
                self.num_accepted = min(self.num_accepted + 1, size)
                self._index += 1
                continue
            found = align(self._prediction, np.asarray(self._text, np.int32))
            self._index = found.following if found.length else size
        return self.num_accepted - before
