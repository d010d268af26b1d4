"""The candidate trees held for one session, by the prefix they grow from. Knows no wire.

Bounded: when it is full the oldest one goes, except the one that fits the session's own prefix.
"""

from __future__ import annotations

from dataclasses import dataclass

from graft.common.draft_probs import Distribution
from graft.common.tree import Tree
from graft.v1.tree_pb2 import TreeRefusal

PrefixName = tuple[int, int]
"""(length, digest) of a prefix."""


@dataclass(frozen=True, slots=True, eq=False)
class Proposal:
    """What a drafter says about one prefix.

    tree is None when it has nothing to propose, or when its tree was refused. behind: nor will it
    have, until it sends a tree. probs: what each
    drafted node was drawn from; one_hot: nothing was drawn. Only some accept rules look at them.
    """

    tree: Tree | None
    refused: bool = False
    behind: bool = False
    draft_s: float = 0.0
    arrived: float = 0.0
    stream: int = 0
    one_hot: bool = False
    probs: tuple[Distribution, ...] = ()


@dataclass(slots=True)
class Room:
    """What the shelves of all sessions hold together, and the most they may."""

    max_trees: int
    num_held: int = 0


class Shelf:
    """Proposals by prefix name; insertion order is arrival order."""

    def __init__(self, max_trees: int, room: Room | None = None) -> None:
        """room: shared with other shelves; without one, only `max_trees` is a limit."""
        self._max_trees = max_trees
        self._room = room or Room(max_trees)
        self._held: dict[PrefixName, Proposal] = {}

    def __len__(self) -> int:
        return len(self._held)

    def get(self, name: PrefixName) -> Proposal | None:
        """The proposal for a prefix, if one is held."""
        return self._held.get(name)

    def put(
        self, name: PrefixName, proposal: Proposal, current: PrefixName
    ) -> tuple[PrefixName, Proposal, TreeRefusal.ValueType] | None:
        """Holds a proposal; returns the one that had to go, with the reason.

        That is an older one of this shelf, or the new one itself when the only one held fits
        `current`. A tree for `current` itself finds a place even when all shelves are full.
        """
        gone: tuple[PrefixName, Proposal, TreeRefusal.ValueType] | None = None
        former = self._held.pop(name, None)
        crowded = self._room.num_held >= self._room.max_trees and name != current
        if former is not None:
            gone = (name, former, TreeRefusal.TREE_REFUSAL_REPEATED)
        elif len(self._held) >= self._max_trees or crowded:
            oldest = next((held for held in self._held if held != current), None)
            if oldest is None:
                return (name, proposal, TreeRefusal.TREE_REFUSAL_NO_CREDIT)
            gone = (oldest, self._held.pop(oldest), TreeRefusal.TREE_REFUSAL_NO_CREDIT)
        else:
            self._room.num_held += 1
        self._held[name] = proposal
        return gone

    def advance(self, current: PrefixName) -> list[tuple[PrefixName, Proposal]]:
        """Drops what can no longer come true at `current`, and returns it."""
        passed = [name for name in self._held if name[0] <= current[0] and name != current]
        self._room.num_held -= len(passed)
        return [(name, self._held.pop(name)) for name in passed]

    def clear(self) -> None:
        """Drops everything: the session is over."""
        self._room.num_held -= len(self._held)
        self._held.clear()
