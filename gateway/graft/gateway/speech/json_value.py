"""Where a JSON value ends, one character at a time. Knows strings and brackets, no numbers."""

from __future__ import annotations

_SPACE = " \t\r\n"
_CLOSES = {"}": "{", "]": "["}


class JsonValue:
    """One value. `take` says whether a character belongs to it; `done` that it is complete.

    A bracket that closes what was not opened makes it `broken`. A bare word or a number is done
    at the first character after it, which is not taken.
    """

    def __init__(self) -> None:
        self.done = False
        self.broken = False
        self.text = ""
        self._open: list[str] = []
        self._in_string = False
        self._escaped = False

    @property
    def container(self) -> bool:
        """True for an object or an array, as soon as its first character is there."""
        return self.text[:1] in ("{", "[")

    def take(self, char: str) -> bool:
        """Reads one character; False when it is not part of the value."""
        if self.done or self.broken:
            return False
        if self._in_string:
            self._read_string(char)
        elif char == '"':
            if self.text and not self._open:
                self.broken = True
                return False
            self._in_string = True
        elif char in "{[":
            if self.text and not self._open:
                self.broken = True
                return False
            self._open.append(char)
        elif char in _CLOSES:
            if not self._open:
                self.done = bool(self.text)
                self.broken = not self.text
                return False
            if self._open.pop() != _CLOSES[char]:
                self.broken = True
                return False
            self.done = not self._open
        elif not self._open and (char == "," or char in _SPACE):
            self.done = bool(self.text)
            self.broken = not self.text
            return False
        self.text += char
        return True

    def _read_string(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif char == "\\":
            self._escaped = True
        elif char == '"':
            self._in_string = False
            self.done = not self._open
