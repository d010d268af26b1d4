"""One function call as models write it: an object of name and arguments, or a name before them.

Read one character at a time, so that it does not matter how the text is cut. What has been read
is kept until the call has begun, since until then it may turn out to be plain text.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from graft.gateway.speech.json_value import JsonValue

Known = Callable[[str], bool]
_SPACE = " \t\r\n"
_NAMES = ("name",)
_ARGUMENTS = ("arguments", "parameters")
_BESIDE = ("type", "id")
MAX_NAME_CHARS = 128


class CallBody(ABC):
    """A call being read.

    `begun` once the name is known and the arguments have started, or are known to be missing;
    `done` at its last character; `broken` when it is no call, or stops being one.
    """

    def __init__(self, known: Known) -> None:
        self.name = ""
        self.begun = False
        self.done = False
        self.broken = False
        self.raw = ""
        self._known = known

    @abstractmethod
    def take(self, char: str) -> str:
        """Reads one character; returns the text of arguments that may leave now."""

    @property
    @abstractmethod
    def spills(self) -> bool:
        """True while arguments are being passed on: what follows belongs to them, even broken."""

    def _begin(self) -> None:
        if not self.begun:
            self.begun = self._known(self.name)
            self.broken = not self.begun


class CallObject(CallBody):
    """``{"name": "f", "arguments": {...}}``, keys in any order, `parameters` for arguments."""

    def __init__(self, known: Known) -> None:
        super().__init__(known)
        self._step: Callable[[str], str] = self._open
        self._key = ""
        self._value = JsonValue()
        self._arguments: str | None = None
        self._arguments_done = False

    def take(self, char: str) -> str:
        """As the base says."""
        if not self.begun:
            self.raw += char
        return self._step(char)

    @property
    def spills(self) -> bool:
        """As the base says."""
        inside = self._step == self._in_value and self._key in _ARGUMENTS
        return self.begun and inside and not self._arguments_done

    def _open(self, char: str) -> str:
        if char == "{":
            self._step = self._before_key
        elif char not in _SPACE:
            self.broken = True
        return ""

    def _before_key(self, char: str) -> str:
        if char == '"':
            self._value = JsonValue()
            self._value.take(char)
            self._step = self._in_key
        elif char == "}":
            return self._close()
        elif char not in _SPACE:
            self.broken = True
        return ""

    def _in_key(self, char: str) -> str:
        self._value.take(char)
        if self._value.done:
            key = _loaded(self._value.text)
            self._key = key if isinstance(key, str) else ""
            self.broken = not (self.begun or self._expected(self._key))
            self._step = self._before_value
        return ""

    def _expected(self, key: str) -> bool:
        """Each key once; a call that has begun may go on with any."""
        if key in _NAMES:
            return not self.name
        return key in _BESIDE or (key in _ARGUMENTS and self._arguments is None)

    def _before_value(self, char: str) -> str:
        if char == ":":
            self._value = JsonValue()
            self._step = self._in_value
        elif char not in _SPACE:
            self.broken = True
        return ""

    def _in_value(self, char: str) -> str:
        value = self._value
        if not value.text and char in _SPACE:
            return ""
        taken = value.take(char)
        if value.broken:
            self.broken = True
            return ""
        if self.begun and not self.spills:
            if value.done:
                self._step = self._after_value
                return "" if taken else self._after_value(char)
            return ""
        streams = self._key in _ARGUMENTS and value.container
        leaving = ""
        if streams and self._arguments is None:
            self._arguments = ""
            if self.name:
                self._begin()
        if streams and taken:
            if self.begun:
                leaving = char
            else:
                self._arguments = (self._arguments or "") + char
        if value.done:
            self._step = self._after_value
            leaving += self._end_value(streams)
            if not taken and not self.broken:
                leaving += self._after_value(char)
        return leaving

    def _end_value(self, streamed: bool) -> str:
        self._arguments_done = self._arguments_done or self._key in _ARGUMENTS
        if self._key in _NAMES:
            name = _loaded(self._value.text)
            if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARS:
                self.broken = True
                return ""
            self.name = name
            if self._arguments is not None:
                self._begin()
                return self._arguments if self.begun else ""
        elif self._key in _ARGUMENTS and not streamed:
            value = _loaded(self._value.text)
            if value is None:
                value = "{}"
            self._arguments = value if isinstance(value, str) else self._value.text
            if self.name:
                self._begin()
                return self._arguments if self.begun else ""
        return ""

    def _after_value(self, char: str) -> str:
        if char == ",":
            self._step = self._before_key
        elif char == "}":
            return self._close()
        elif char not in _SPACE:
            self.broken = True
        return ""

    def _close(self) -> str:
        if self.begun:
            self.done = True
            return ""
        if not self.name:
            self.broken = True
            return ""
        self._begin()
        self.done = self.begun
        return "{}" if self.begun else ""


class NamedArguments(CallBody):
    """``name{...}``, with ``[ARGS]``, and a ``[CALL_ID]``, between the two if the model likes."""

    MARKS = ("[ARGS]", "[CALL_ID]")

    def __init__(self, known: Known) -> None:
        super().__init__(known)
        self._mark = ""
        self._in_id = False
        self._value = JsonValue()

    def take(self, char: str) -> str:
        """As the base says."""
        if self.begun:
            return self._take_argument(char)
        self.raw += char
        if self._mark or char == "[":
            self._take_mark(char)
        elif char == "{":
            self.name = self.name.strip()
            self._begin()
            if self.begun:
                return self._take_argument(char)
        elif not self._in_id:
            self.name += char
            written = self.name.strip()
            legal = all(letter.isalnum() or letter in "_-.:/" for letter in written)
            self.broken = not legal or len(self.name) > MAX_NAME_CHARS
        return ""

    @property
    def spills(self) -> bool:
        """As the base says."""
        return self.begun and not self._value.done

    def _take_mark(self, char: str) -> None:
        self._mark += char
        if self._mark in self.MARKS:
            self._in_id = self._mark == "[CALL_ID]"
            self._mark = ""
        elif not any(mark.startswith(self._mark) for mark in self.MARKS):
            self.broken = True

    def _take_argument(self, char: str) -> str:
        taken = self._value.take(char)
        self.broken = self._value.broken
        self.done = self._value.done
        return char if taken else ""


def _loaded(text: str) -> Any:
    """The value of a piece of JSON; what is none stands for itself, as text."""
    try:
        return json.loads(text, strict=False)
    except (ValueError, RecursionError):
        return text
