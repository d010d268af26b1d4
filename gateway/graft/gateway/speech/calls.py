"""Finds function calls in a model's message, as families of models write them.

Incremental state machines that read one character at a time, so that the calls do not depend on
how a stream is cut. What looks like a call and is none comes out as the text it is; white space
before a call is not text. Knows no token and no client.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from graft.gateway.speech.call_body import CallBody, CallObject, Known, NamedArguments
from graft.gateway.speech.markers import MarkerSearch
from graft.gateway.speech.parts import CallArguments, CallBegun, Content, Part

_SPACE = " \t\r\n"
FormatName = Literal["hermes", "llama3_json", "mistral", "json"]


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How a family of models writes calls.

    opens: what stands before a call, or before a list of calls; none where the whole message is
        the call. closes: what stands after it. joins: what may stand between calls of a message
        that is nothing but calls.
    """

    name: FormatName
    opens: str = ""
    closes: str = ""
    prefix: str = ""
    joins: str = ",;"

    @property
    def markers(self) -> tuple[str, ...]:
        """The marks that a reader of the text must see, though they may be special tokens."""
        marks = (self.opens, self.closes, self.prefix)
        named = NamedArguments.MARKS if self.name == "mistral" else ()
        return tuple(mark for mark in (*marks, *named) if mark)


FORMATS: dict[str, CallFormat] = {
    "hermes": CallFormat("hermes", opens="<tool_call>", closes="</tool_call>"),
    "llama3_json": CallFormat("llama3_json", prefix="<|python_tag|>"),
    "mistral": CallFormat("mistral", opens="[TOOL_CALLS]"),
    "json": CallFormat("json"),
}


class CallParser(ABC):
    """Text in, parts out. `feed` as the text comes, `finish` at its end.

    With `parallel` off only the first call counts, later ones are dropped.
    """

    def __init__(self, known: Known, parallel: bool) -> None:
        self.num_calls = 0
        self._known = known
        self._parallel = parallel
        self._parts: list[Part] = []
        self._space = ""
        self._body: CallBody | None = None

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain after this piece of text."""
        for char in text:
            self._take(char)
        return self._leaving()

    def finish(self) -> list[Part]:
        """The parts that were held back."""
        self._end()
        if not self.num_calls:
            self._parts.append(Content(self._space))
            self._space = ""
        return self._leaving()

    @abstractmethod
    def _take(self, char: str) -> None:
        """Reads one character."""

    @abstractmethod
    def _end(self) -> None:
        """Lets go of what was held back."""

    def _leaving(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    def _say(self, text: str) -> None:
        """Adds text; white space waits for what follows it, and goes where a call follows."""
        for char in text:
            if char in _SPACE:
                self._space += char
            else:
                self._parts.append(Content(self._space + char))
                self._space = ""

    def _read_call(self, body: CallBody, char: str) -> None:
        """Feeds a character to a call, and adds what it says."""
        begun = body.begun
        text = body.take(char)
        if body.begun and not begun:
            self._space = ""
            self._add(CallBegun(self.num_calls, body.name))
            self.num_calls += 1
        if body.broken and body.spills:
            text += char
        if text:
            self._add(CallArguments(self.num_calls - 1, text))

    def _add(self, part: CallBegun | CallArguments) -> None:
        if self._parallel or part.index == 0:
            self._parts.append(part)


class TaggedCalls(CallParser):
    """Calls between marks, with text before, between and after them."""

    def __init__(self, form: CallFormat, known: Known, parallel: bool) -> None:
        super().__init__(known, parallel)
        self._form = form
        self._search = MarkerSearch([form.opens])
        self._closing = MarkerSearch([form.closes])
        self._step: Callable[[str], None] = self._in_text
        self._raw = ""
        self._in_list = False

    def _take(self, char: str) -> None:
        self._step(char)

    def _in_text(self, char: str) -> None:
        text, marker = self._search.take(char)
        self._say(text)
        if marker:
            self._raw = marker
            self._in_list = False
            self._body = None
            self._step = self._before_body

    def _before_body(self, char: str) -> None:
        """White space, then the call, or a list of calls where a family writes lists."""
        if char in _SPACE:
            self._raw += char
        elif char == "[" and not self._in_list and not self._form.closes:
            self._raw += char
            self._in_list = True
        elif self._in_list and char in ",]":
            self._raw += char
            if char == "]":
                self._leave()
        else:
            named = not self._form.closes and not self._in_list and char != "{"
            self._body = (NamedArguments if named else CallObject)(self._known)
            self._step = self._in_body
            self._in_body(char)

    def _in_body(self, char: str) -> None:
        body = self._body
        assert body is not None
        self._read_call(body, char)
        if body.broken and not body.begun:
            self._as_text(self._raw + body.raw)
        elif body.done or body.broken:
            self._raw = ""
            if self._form.closes:
                self._step = self._before_close
            elif self._in_list and body.done:
                self._step = self._before_body
            elif body.spills:
                self._step = self._before_close
            else:
                self._leave()

    def _before_close(self, char: str) -> None:
        """What is left before the closing mark: of broken arguments all, else nothing."""
        text, marker = self._closing.take(char)
        self._spill(text)
        if marker:
            self._leave()

    def _spill(self, text: str) -> None:
        if text and self._body is not None and self._body.spills:
            self._add(CallArguments(self.num_calls - 1, text))

    def _leave(self) -> None:
        """Back to text. The marks of a list that held no call are text as well."""
        raw, self._raw = self._raw, ""
        self._step = self._in_text
        if raw and self._body is None:
            self._say(raw)

    def _as_text(self, raw: str) -> None:
        """It was no call: its mark is text, and what came after it is read again as text."""
        opens = self._form.opens
        self._raw, self._body = "", None
        self._step = self._in_text
        if raw.startswith(opens):
            self._say(opens)
            raw = raw.removeprefix(opens)
        for char in raw:
            self._take(char)

    def _end(self) -> None:
        if self._step == self._in_text:
            self._say(self._search.rest())
        elif self._step == self._before_close:
            self._spill(self._closing.rest())
        elif self._body is None or not self._body.begun:
            raw = self._raw + ("" if self._body is None else self._body.raw)
            self._as_text(raw)
            self._end()


class BareCalls(CallParser):
    """A message that is nothing but calls: one object, several, or a list of them."""

    def __init__(self, form: CallFormat, known: Known, parallel: bool) -> None:
        super().__init__(known, parallel)
        self._form = form
        self._prefix = MarkerSearch([form.prefix])
        self._step: Callable[[str], None] = self._before_call
        self._raw = ""
        self._in_list = False

    def _take(self, char: str) -> None:
        self._step(char)

    def _before_call(self, char: str) -> None:
        """White space, the family's mark, what joins two calls, the brackets of a list."""
        text, mark = self._prefix.take(char)
        self._raw += mark
        for one in text:
            if self._step == self._before_call:
                self._one_before_call(one)
            else:
                self._step(one)

    def _one_before_call(self, char: str) -> None:
        if char == "{":
            self._body = CallObject(self._known)
            self._step = self._in_body
            self._in_body(char)
            return
        self._raw += char
        if char == "[" and not self._in_list and not self.num_calls:
            self._in_list = True
        elif char not in _SPACE and not (
            self.num_calls and (char in self._form.joins or (char == "]" and self._in_list))
        ):
            self._as_text()

    def _in_body(self, char: str) -> None:
        body = self._body
        assert body is not None
        self._read_call(body, char)
        if body.broken and not body.begun:
            self._raw += body.raw
            self._as_text()
        elif body.done:
            self._raw = ""
            self._step = self._before_call
        elif body.broken:
            self._step = self._in_broken

    def _in_broken(self, char: str) -> None:
        if self._body is not None and self._body.spills:
            self._add(CallArguments(self.num_calls - 1, char))

    def _as_text(self) -> None:
        """No call: all of it, and all that follows, is text."""
        raw, self._raw, self._body = self._raw, "", None
        self._step = self._say
        self._say(raw)

    def _end(self) -> None:
        held = self._prefix.rest()
        for char in held:
            if self._step == self._before_call:
                self._one_before_call(char)
            else:
                self._step(char)
        if self._body is not None and not self._body.begun:
            self._raw += self._body.raw
            self._as_text()
        elif not self.num_calls and self._step == self._before_call:
            self._as_text()


def call_parser(form: CallFormat, known: Known, parallel: bool = True) -> CallParser:
    """The parser of a format. `known` says whether a name is one of the request's functions; a
    message without marks is a call only if it is."""
    if form.opens:
        return TaggedCalls(form, lambda name: bool(name), parallel)
    return BareCalls(form, known, parallel)
