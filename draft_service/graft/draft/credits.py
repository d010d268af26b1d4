"""How many trees a session has at verify, and whether one more may go. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Credits:
    """The trees pushed for one session that verify may still hold, by the prefix each names.

    max_trees: the most verify holds for a session.
    prefix: (length, digest) of the committed prefix as last heard; (0, 0) before that.
    """

    max_trees: int
    prefix: tuple[int, int] = (0, 0)
    _held: set[tuple[int, int]] = field(default_factory=set)

    @property
    def num_held(self) -> int:
        """Trees that verify may still hold."""
        return len(self._held)

    def moved(self, prefix_length: int, prefix_digest: int) -> None:
        """A commit arrived: trees for shorter prefixes, or for another one as long, are gone."""
        self.prefix = (prefix_length, prefix_digest)
        self._held = {
            named for named in self._held if named[0] > prefix_length or named == self.prefix
        }

    def refused(self, prefix_length: int) -> None:
        """Verify dropped a tree for a prefix of this length."""
        for named in self._held:
            if named[0] == prefix_length:
                self._held.discard(named)
                return

    def take(self, prefix_length: int, prefix_digest: int) -> str | None:
        """Books one tree and returns None, or says why it must not be pushed.

        ``stale``: its prefix is behind the committed one. ``repeated``: one for the same prefix was
        pushed already. ``no_credit``: verify holds as many as it may.
        """
        named = (prefix_length, prefix_digest)
        if prefix_length < self.prefix[0] or (
            prefix_length == self.prefix[0] and named != self.prefix
        ):
            return "stale"
        if named in self._held:
            return "repeated"
        if len(self._held) >= self.max_trees:
            return "no_credit"
        self._held.add(named)
        return None
