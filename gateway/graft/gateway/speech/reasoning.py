"""Splits what a model wrote for itself from what it wrote for the reader. Knows two marks only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from graft.gateway.speech.markers import MarkerSearch
from graft.gateway.speech.parts import Content, Part, Reasoning

_SPACE = " \t\r\n"
ReasoningName = Literal["think", "deepseek_r1"]


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """The marks of a family, and whether its messages begin inside, written or not."""

    name: ReasoningName
    opens: str = "<think>"
    closes: str = "</think>"
    begins_inside: bool = False


REASONING: dict[str, ReasoningFormat] = {
    "think": ReasoningFormat("think"),
    "deepseek_r1": ReasoningFormat("deepseek_r1", begins_inside=True),
}


class ReasoningParser:
    """Text in, parts out. Reasoning is only what stands at the very beginning, between the marks.

    White space around it belongs to the marks, not to the text. A message that ends inside has
    no content.
    """

    def __init__(self, form: ReasoningFormat, inside: bool) -> None:
        self._opening = MarkerSearch([form.opens])
        self._closing = MarkerSearch([form.closes])
        self._opens = form.opens
        self._space = ""
        self._begun = False
        self._where: Literal["before", "inside", "after", "content"]
        self._where = "inside" if inside or form.begins_inside else "before"
        self._may_open = True

    @property
    def inside(self) -> bool:
        """True while the text is reasoning."""
        return self._where == "inside"

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain after this piece of text."""
        parts: list[Part] = []
        for place, char in enumerate(text):
            if self._where == "content":
                parts.append(Content(text[place:]))
                break
            parts += self._take(char)
        return parts

    def finish(self) -> list[Part]:
        """What was held back."""
        if self._where == "before":
            return [Content(self._space + self._opening.rest())]
        if self._where == "inside":
            held = self._opening.rest() + self._closing.rest()
            return [Reasoning(self._space + held)] if held else []
        return []

    def _take(self, char: str) -> list[Part]:
        if self._where == "before":
            return self._before(char)
        if self._where == "inside":
            return self._inside(char)
        if char in _SPACE:
            return []
        self._where = "content"
        return [Content(char)]

    def _before(self, char: str) -> list[Part]:
        """White space, then the opening mark; anything else is content."""
        text, marker = self._opening.take(char)
        if marker and not text.strip(_SPACE):
            self._where, self._space, self._may_open = "inside", "", False
            return []
        if text.strip(_SPACE):
            self._where = "content"
            return [Content(self._space + text + marker + self._opening.rest())]
        self._space += text
        return []

    def _inside(self, char: str) -> list[Part]:
        """An opening mark at the beginning is dropped, in case the prompt had one already."""
        if self._may_open:
            text, marker = self._opening.take(char)
            if marker:
                self._may_open = False
                return []
            if not text:
                return []
            self._may_open = not text.strip(_SPACE)
            if not self._may_open:
                text += self._opening.rest()
        else:
            text = char
        parts: list[Part] = []
        for place, one in enumerate(text):
            said, marker = self._closing.take(one)
            parts += self._reason(said)
            if marker:
                self._where, self._space = "after", ""
                return parts + self.feed(text[place + 1 :])
        return parts

    def _reason(self, text: str) -> list[Part]:
        """Adds reasoning; white space at its end waits, in case the mark follows."""
        parts: list[Part] = []
        for char in text:
            if char in _SPACE:
                self._space += char if self._begun else ""
            else:
                parts.append(Reasoning(self._space + char))
                self._space, self._begun = "", True
        return parts
