"""Which committed tokens are run once more, for hidden states that a drafter missed.

The states of a cached prefix were never taken by this session, and a drafter that comes late was
not there when they were: both are gaps of the session's feed, where nobody has kept them
(`KeptRows`). Knows sessions and pages; knows no tensor.
"""

from __future__ import annotations

import numpy as np

from graft.verify.places import Places
from graft.verify.session import Session
from graft.verify.step import Recall

Gap = tuple[Session, range]


def gaps(places: Places) -> list[Gap]:
    """Positions whose keys are there and whose hidden states some drafter waits for.

    None while pages are short: a drafter may cost time, and never a page that sessions need.
    """
    if _spare_rows(places) <= 0:
        return []
    found = []
    for session in places.running:
        gap = session.feed.gap(session.kv_length) if session.feed is not None else range(0)
        if gap:
            found.append((session, gap))
    return found


def recalls(places: Places, found: list[Gap], rows: int) -> list[Recall]:
    """Fills gaps, oldest session and position first, with at most `rows` rows.

    The pages they write to are given back after the step, with `release`.
    """
    made = []
    for session, gap in found:
        count = min(len(gap), rows, _spare_rows(places))
        if count <= 0 or session.table is None:
            continue
        size = places.pool.page_tokens
        pages = places.pool.allocate(-(-count // size))
        slots = np.asarray(pages)[:, None] * size + np.arange(size)
        write_slots = slots.reshape(-1)[:count].astype(np.int32)
        made.append(Recall(session, gap.start, gap.start + count, tuple(pages), write_slots))
        rows -= count
    return made


def release(places: Places, recall: Recall) -> None:
    """Gives the pages back that a recall wrote to."""
    places.pool.release(recall.pages)


def _spare_rows(places: Places) -> int:
    """Rows that fit the pages which no running session may need for its next token."""
    pool = places.pool
    return (pool.num_available - len(places.running)) * pool.page_tokens
