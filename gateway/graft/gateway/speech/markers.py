"""Finds a marker in a text that comes in pieces. Holds back only what may begin one."""

from __future__ import annotations

from collections.abc import Sequence


class MarkerSearch:
    """Looks for the first of some markers, one character at a time."""

    def __init__(self, markers: Sequence[str]) -> None:
        self._markers = tuple(marker for marker in markers if marker)
        self._held = ""

    def take(self, char: str) -> tuple[str, str]:
        """The text that is no marker for certain, and the marker when one is complete."""
        held = self._held + char
        start = 0
        while start < len(held):
            rest = held[start:]
            if rest in self._markers:
                self._held = ""
                return held[:start], rest
            if any(marker.startswith(rest) for marker in self._markers):
                break
            start += 1
        self._held = held[start:]
        return held[:start], ""

    def rest(self) -> str:
        """What was held back; nothing is, after."""
        held, self._held = self._held, ""
        return held
