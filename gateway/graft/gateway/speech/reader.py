"""A model's message read as it is written: reasoning, text, calls. One reader a choice.

`Speech` says how a request's answers are to be read; it is a value and goes with the job. Knows no
token, no client and no template.
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, field

from graft.gateway.speech.calls import CallFormat, CallParser, call_parser
from graft.gateway.speech.parts import (
    CallArguments,
    CallBegun,
    Content,
    Part,
    Reasoning,
    merged,
)
from graft.gateway.speech.reasoning import ReasoningFormat, ReasoningParser

_LETTERS = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class Speech:
    """How the answers to a request are read. The default reads nothing into them.

    calls: the format of calls, or None where the model was told of no function.
    inside: the prompt has opened the reasoning already.
    """

    calls: CallFormat | None = None
    functions: frozenset[str] = frozenset()
    parallel: bool = True
    reasoning: ReasoningFormat | None = None
    inside: bool = False

    @property
    def plain(self) -> bool:
        """True when a message is its text."""
        return self.calls is None and self.reasoning is None

    def new_id(self) -> str:
        """An id for a call; some templates take nothing but nine letters."""
        if self.calls is not None and self.calls.name == "mistral":
            return "".join(secrets.choice(_LETTERS) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


PLAIN = Speech()


class MessageReader:
    """Text of one message in, parts out: `feed` as it comes, `finish` at its end."""

    def __init__(self, speech: Speech) -> None:
        self._reasoning: ReasoningParser | None = None
        self._calls: CallParser | None = None
        if speech.reasoning is not None:
            self._reasoning = ReasoningParser(speech.reasoning, speech.inside)
        if speech.calls is not None:
            functions = speech.functions
            self._calls = call_parser(speech.calls, functions.__contains__, speech.parallel)

    @property
    def reasons(self) -> bool:
        """True while the message is reasoning."""
        return self._reasoning is not None and self._reasoning.inside

    def feed(self, text: str) -> list[Part]:
        """The parts that are certain after this piece of text, in order."""
        parts = [Content(text)] if self._reasoning is None else self._reasoning.feed(text)
        return merged(self._through_calls(parts))

    def feed_tokens(self, text: str, texts: Sequence[str]) -> tuple[list[Part], int]:
        """As `feed`, and how many of the piece's tokens, by their texts, are reasoning."""
        if self._reasoning is None or "".join(texts) != text:
            count = len(texts) if self.reasons else 0
            return self.feed(text), count
        count = 0
        parts: list[Part] = []
        for one in texts:
            inside = self.reasons
            parts += self.feed(one)
            count += inside or self.reasons
        return merged(parts), count

    def finish(self) -> list[Part]:
        """What was held back."""
        parts = [] if self._reasoning is None else self._reasoning.finish()
        found = self._through_calls(parts)
        if self._calls is not None:
            found += self._calls.finish()
        return merged(found)

    def _through_calls(self, parts: list[Part] | list[Content]) -> list[Part]:
        if self._calls is None:
            return list(parts)
        found: list[Part] = []
        for part in parts:
            if isinstance(part, Content):
                found += self._calls.feed(part.text)
            else:
                found.append(part)
        return found


@dataclass(slots=True)
class Call:
    """A call of a whole message."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Message:
    """A whole message, put together from its parts."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)
    num_reasoning_tokens: int = 0

    def take(self, parts: list[Part], speech: Speech) -> None:
        """Adds parts, in place; a call gets its id here."""
        for part in parts:
            match part:
                case Content(text):
                    self.content += text
                case Reasoning(text):
                    self.reasoning += text
                case CallBegun(_, name):
                    self.calls.append(Call(speech.new_id(), name))
                case CallArguments(index, text):
                    self.calls[index].arguments += text


def read_message(text: str, speech: Speech, texts: Sequence[str] = ()) -> Message:
    """The message that a whole text is; `texts` are those of its tokens."""
    message = Message()
    reader = MessageReader(speech)
    parts, message.num_reasoning_tokens = reader.feed_tokens(text, texts)
    message.take([*parts, *reader.finish()], speech)
    return message
