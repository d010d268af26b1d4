"""Shares a step's rows between trees. Knows numbers only."""

from __future__ import annotations

from collections.abc import Sequence


def share(wants: Sequence[int], total: int) -> list[int]:
    """Gives each at most what it wants and all at most `total`; nobody gets less than an equal
    part unless it wants less. Earlier ones get the remainder."""
    given = [0] * len(wants)
    open_wants = sorted(range(len(wants)), key=lambda index: wants[index])
    left = max(0, total)
    for place, index in enumerate(open_wants):
        equal = left // (len(open_wants) - place)
        given[index] = min(wants[index], equal)
        left -= given[index]
    for index, want in enumerate(wants):
        more = min(want - given[index], left)
        given[index] += more
        left -= more
    return given
