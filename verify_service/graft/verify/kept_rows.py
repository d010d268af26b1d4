"""Hidden states that outlive their session: those of cached pages, for the next one that has them.

A conversation's next turn takes its keys and values from the prefix cache. The drafter of that turn
needs the hidden states of the same positions; without them they would be computed once more. Rows
are found by the key of their page, which names all tokens up to its end and the salt, so a session
gets the bytes that it would have computed itself. Knows keys and bytes; knows no session.
"""

from __future__ import annotations

from collections import OrderedDict

from graft.common.features import FeatureSpec
from graft.verify.features import Feed
from graft.verify.pages import PageKey, PageTable


class KeptRows:
    """Rows by spec and page, at most `max_bytes` of them; the longest unused go first."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._rows: OrderedDict[tuple[FeatureSpec, PageKey], bytes] = OrderedDict()
        self.num_bytes = 0

    def store(self, feed: Feed, table: PageTable) -> None:
        """Keeps what a feed holds of the pages that a table has published."""
        size = table.page_tokens
        for spec in feed.specs:
            for index, key in enumerate(table.keys):
                start, stop, name = index * size, (index + 1) * size, (spec, key)
                if name in self._rows:
                    self._rows.move_to_end(name)
                elif feed.holds(spec, start, stop):
                    self._put(name, feed.rows(spec, start, stop))

    def restore(self, feed: Feed, table: PageTable) -> int:
        """Gives a feed the rows of a table's known pages that it lacks; returns how many."""
        size, found = table.page_tokens, 0
        for spec in feed.specs:
            oldest = feed.floor(spec, len(table.keys) * size)
            for index, key in enumerate(table.keys):
                start, stop = index * size, (index + 1) * size
                rows = self._rows.get((spec, key)) if stop > oldest else None
                if rows is None or feed.holds(spec, start, stop):
                    continue
                self._rows.move_to_end((spec, key))
                feed.add(spec, start, rows)
                found += size
        return found

    def _put(self, name: tuple[FeatureSpec, PageKey], rows: bytes) -> None:
        self._rows[name] = rows
        self.num_bytes += len(rows)
        while self.num_bytes > self._max_bytes:
            _, oldest = self._rows.popitem(last=False)
            self.num_bytes -= len(oldest)
