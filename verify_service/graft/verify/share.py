"""Shares a step's rows between trees. Knows numbers only."""

from __future__ import annotations

from collections.abc import Sequence


def share(wants: Sequence[int], total: int) -> list[int]:
    """Gives each at most what it wants, and all together at most `total`.

    Nobody gets less than an equal part unless it wants less. A remainder that does not divide
    goes to those who want most.
    """
    given = [0] * len(wants)
    left = max(0, total)
    modest_first = sorted(range(len(wants)), key=lambda index: wants[index])
    for place, index in enumerate(modest_first):
        given[index] = min(wants[index], left // (len(wants) - place))
        left -= given[index]
    return given
