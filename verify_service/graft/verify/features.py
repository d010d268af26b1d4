"""Rows of hidden states of one session: the recent ones that are kept, and who is owed which.

Rows are bytes as they will be sent. Knows positions and sizes; knows no tensor, no message and no
page. A row that was never captured, because its keys came from the prefix cache or its drafter
came late, is a gap: the scheduler has it run again (`Recall`) as far back as the window reaches.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from graft.common.features import FeatureSpec


@dataclass(slots=True, eq=False)
class _Segment:
    """Rows without a gap from `start` on."""

    start: int
    rows: bytearray


class Window:
    """Rows of one spec by position; gaps are allowed, a position is held once."""

    def __init__(self, row_bytes: int) -> None:
        self.row_bytes = row_bytes
        self._segments: list[_Segment] = []

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return sum(len(segment.rows) for segment in self._segments)

    @property
    def stop(self) -> int:
        """The position after the last row held; 0 when there is none."""
        return self._stop(self._segments[-1]) if self._segments else 0

    def end_of(self, position: int) -> int:
        """The first position from `position` on that is not here."""
        for segment in self._segments:
            if segment.start <= position < self._stop(segment):
                return self._stop(segment)
        return position

    def next_from(self, position: int, otherwise: int) -> int:
        """The first position from `position` on that is here."""
        for segment in self._segments:
            if self._stop(segment) > position:
                return max(position, segment.start)
        return otherwise

    def add(self, start: int, payload: bytes) -> None:
        """Takes the rows of positions from `start` on; those that are here already stay."""
        stop = start + len(payload) // self.row_bytes
        position = self.end_of(start)
        while position < stop:
            upto = min(stop, self.next_from(position, stop))
            self._insert(
                position,
                payload[(position - start) * self.row_bytes : (upto - start) * self.row_bytes],
            )
            position = self.end_of(upto)

    def take(self, first: int, stop: int) -> bytes:
        """The rows of positions first..stop-1, all of which are here."""
        for segment in self._segments:
            if segment.start <= first < self._stop(segment):
                begin = (first - segment.start) * self.row_bytes
                return bytes(segment.rows[begin : begin + (stop - first) * self.row_bytes])
        assert first == stop, f"feature rows {first}..{stop - 1} are not here"
        return b""

    def trim(self, before: int) -> None:
        """Drops the rows of positions before `before`."""
        self._segments = [one for one in self._segments if self._stop(one) > before]
        if self._segments and (first := self._segments[0]).start < before:
            del first.rows[: (before - first.start) * self.row_bytes]
            first.start = before

    def _insert(self, start: int, payload: bytes) -> None:
        """Rows for a gap, joined to their neighbours where they touch."""
        place = sum(1 for segment in self._segments if segment.start < start)
        if place and self._stop(self._segments[place - 1]) == start:
            place -= 1
            self._segments[place].rows += payload
        else:
            self._segments.insert(place, _Segment(start, bytearray(payload)))
        if place + 1 < len(self._segments):
            segment, after = self._segments[place], self._segments[place + 1]
            if self._stop(segment) == after.start:
                segment.rows += after.rows
                del self._segments[place + 1]

    def _stop(self, segment: _Segment) -> int:
        return segment.start + len(segment.rows) // self.row_bytes


@dataclass(slots=True, eq=False)
class _Listener:
    """A stream that is sent rows: those before `cursor` it has, or will never get."""

    spec: FeatureSpec
    cursor: int
    fresh: bool = True


class Feed:
    """What one session keeps for drafters, and how far each of them has been sent.

    share_bytes: for all windows of the session together.
    """

    def __init__(self, share_bytes: int, row_bytes: Callable[[FeatureSpec], int]) -> None:
        self._share_bytes = share_bytes
        self._row_bytes = row_bytes
        self._windows: dict[FeatureSpec, Window] = {}
        self._listeners: dict[int, _Listener] = {}

    @property
    def specs(self) -> tuple[FeatureSpec, ...]:
        """What is to be captured; a Feed without any is of no use."""
        return tuple(self._windows)

    @property
    def num_bytes(self) -> int:
        """Bytes kept."""
        return sum(window.num_bytes for window in self._windows.values())

    def keep(self, specs: tuple[FeatureSpec, ...]) -> None:
        """Keeps windows of these specs and of those that are listened to; drops the others."""
        wanted = dict.fromkeys([*specs, *(one.spec for one in self._listeners.values())])
        self._windows = {
            spec: self._windows.get(spec) or Window(self._row_bytes(spec)) for spec in wanted
        }

    def join(self, stream: int, spec: FeatureSpec, first: int) -> None:
        """A stream wants the rows from position `first` on, or from as far back as there are."""
        self._listeners[stream] = _Listener(spec, first)

    def leave(self, stream: int) -> None:
        """A stream wants nothing more."""
        self._listeners.pop(stream, None)

    def listening(self, spec: FeatureSpec) -> tuple[int, ...]:
        """The streams that are sent rows of `spec`."""
        return tuple(s for s, listener in self._listeners.items() if listener.spec == spec)

    def capacity(self, spec: FeatureSpec) -> int:
        """Rows of a spec that are kept at most."""
        return self._share_bytes // (self._row_bytes(spec) * max(1, len(self._windows)))

    def floor(self, spec: FeatureSpec, length: int) -> int:
        """The first position worth capturing while a prefix of `length` tokens is run."""
        cursors = [one.cursor for one in self._listeners.values() if one.spec == spec]
        return max(0, min([length - self.capacity(spec), *cursors]))

    def add(self, spec: FeatureSpec, start: int, payload: bytes) -> None:
        """Takes captured rows."""
        if (window := self._windows.get(spec)) is not None:
            window.add(start, payload)

    def holds(self, spec: FeatureSpec, start: int, stop: int) -> bool:
        """True when the rows of positions start..stop-1 are all here."""
        return self._windows[spec].end_of(start) >= stop

    def rows(self, spec: FeatureSpec, start: int, stop: int) -> bytes:
        """The rows of positions start..stop-1, all of which are here."""
        return self._windows[spec].take(start, stop)

    def gap(self, kv_length: int) -> range:
        """Positions below `kv_length` that some stream waits for and nobody has captured.

        A stream that has been sent nothing yet gives up what the window could not hold.
        """
        gaps = [range(0)]
        for listener in self._listeners.values():
            window = self._windows[listener.spec]
            first = window.end_of(listener.cursor)
            stop = window.next_from(first, kv_length)
            if first < min(stop, kv_length):
                if listener.fresh and first == listener.cursor:
                    oldest = kv_length - self.capacity(listener.spec)
                    listener.cursor = first = max(first, min(stop, oldest))
                gaps.append(range(first, stop))
        return max(gaps, key=len)

    def take(self, stream: int, max_bytes: int, stop: int | None = None) -> tuple[int, int, bytes]:
        """The next rows for a stream: (start, rows, payload), at most `max_bytes` or one row.

        stop: those of positions before it.

        They count as sent. No rows: there are none yet.
        """
        listener = self._listeners.get(stream)
        if listener is None:
            return 0, 0, b""
        window, start = self._windows[listener.spec], listener.cursor
        end = window.end_of(start) if stop is None else min(window.end_of(start), stop)
        count = min(max(0, end - start), max(1, max_bytes // window.row_bytes))
        payload = window.take(start, start + count)
        if count:
            listener.cursor, listener.fresh = start + count, False
        return start, count, payload

    def behind(self, stream: int) -> int | None:
        """The first position a stream has not been sent; None when it asked for no rows."""
        listener = self._listeners.get(stream)
        return None if listener is None else listener.cursor

    def trim(self, length: int) -> None:
        """Drops the rows that are too old to be kept for a prefix of `length` tokens."""
        for spec, window in self._windows.items():
            window.trim(min(length, window.stop) - self.capacity(spec))

    def forget(self) -> None:
        """Drops all rows; what is still wanted of them will be a gap."""
        for window in self._windows.values():
            window.trim(window.stop)
