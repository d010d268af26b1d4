"""Tokens to text as a stream: whole characters only, stop strings cut, tokens kept in step.

Knows bytes of tokens and stop strings; knows no session and no wire. What is held back is only
text that may start a stop string, and the bytes of a character that is not complete yet.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum


class Origin(Enum):
    """How a token came to be: drafted and accepted, the target's own after a tree, or plain."""

    ACCEPTED = "accepted"
    BONUS = "bonus"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class Logprob:
    """A token's natural log-probability and the most likely tokens beside it, best first."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Decided:
    """A token that verify has committed."""

    token: int
    origin: Origin = Origin.PLAIN
    logprob: Logprob | None = None


@dataclass(frozen=True, slots=True)
class Emitted:
    """A token on its way to the client. The texts of all emitted tokens join to the whole text."""

    token: int
    text: str
    origin: Origin
    logprob: Logprob | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """Text and tokens that may leave now; a token leaves with the last of its characters."""

    text: str = ""
    tokens: tuple[Emitted, ...] = ()

    def __add__(self, other: Piece) -> Piece:
        return Piece(self.text + other.text, self.tokens + other.tokens)

    @property
    def empty(self) -> bool:
        """True when nothing leaves."""
        return not self.text and not self.tokens


@dataclass(frozen=True, slots=True)
class StopStrings:
    """The stop strings of a request.

    A match that ends within the first `min_tokens` tokens does not count. With `included` the
    stop string itself is part of the text.
    """

    strings: tuple[str, ...] = ()
    included: bool = False
    min_tokens: int = 0

    @property
    def longest(self) -> int:
        """Length of the longest one, zero without any."""
        return max(map(len, self.strings), default=0)


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A token not emitted yet; it covers the characters [start, end) of the whole text.

    `open` says that its last bytes begin a character that a later token completes.
    """

    decided: Decided
    text: str
    start: int
    end: int
    open: bool


@dataclass(slots=True)
class TextStream:
    """The text of one choice. `feed` until `stopped` is set, or `finish` when the session ends."""

    token_bytes: Callable[[int], bytes]
    stops: StopStrings = field(default_factory=StopStrings)
    stopped: str | None = None
    num_fed: int = 0
    _decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")("replace")
    )
    _held: str = ""
    _released: int = 0
    _floor: int = 0
    _waiting: deque[_Waiting] = field(default_factory=deque)

    def feed(self, decided: Sequence[Decided]) -> Piece:
        """What may leave after these tokens. Sets `stopped` when a stop string is complete.

        `num_fed` then counts the tokens up to the one in which the stop string ends; tokens after
        it are dropped.
        """
        texts: list[str] = []
        for one in decided:
            if self.stopped is not None:
                break
            self._append(one)
            texts.append(self._advance())
        text = "".join(texts)
        if self.stopped is not None:
            return Piece(text, self._cut())
        return Piece(text, self._complete())

    def finish(self) -> Piece:
        """Everything that was held back. The bytes of a half character are dropped."""
        text, self._held = self._held, ""
        self._released += len(text)
        tokens = tuple(_emitted(one) for one in self._waiting)
        self._waiting.clear()
        return Piece(text, tokens)

    def _append(self, decided: Decided) -> None:
        text = self._decoder.decode(self.token_bytes(decided.token))
        start = self._released + len(self._held)
        pending = bool(self._decoder.getstate()[0])
        self._held += text
        self._waiting.append(_Waiting(decided, text, start, start + len(text), pending))
        self.num_fed += 1

    def _advance(self) -> str:
        """Releases text up to what may start a stop string, or up to the stop string."""
        if not self.stops.strings:
            return self._release(len(self._held))
        if self.num_fed <= self.stops.min_tokens:
            self._floor = self._released + len(self._held)
        found = self._find()
        if found is not None:
            stop, start = found
            self.stopped = stop
            return self._release(start + len(stop) if self.stops.included else start)
        return self._release(len(self._held) - self._ambiguous())

    def _find(self) -> tuple[str, int] | None:
        """The stop string that ends first; of those that end together, the longest."""
        best: tuple[int, int, str] | None = None
        for stop in self.stops.strings:
            start = self._held.find(stop, max(0, self._floor - self._released - len(stop) + 1))
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[2], best[1])

    def _ambiguous(self) -> int:
        """Length of the longest end of the held text that may start a stop string."""
        for size in range(min(len(self._held), self.stops.longest - 1), 0, -1):
            tail = self._held[-size:]
            if any(len(stop) > size and stop.startswith(tail) for stop in self.stops.strings):
                return size
        return 0

    def _release(self, size: int) -> str:
        text, self._held = self._held[:size], self._held[size:]
        self._released += size
        return text

    def _complete(self) -> tuple[Emitted, ...]:
        """Tokens whose characters have all left; an open one waits for the one it begins."""
        tokens: list[Emitted] = []
        while self._waiting:
            first = self._waiting[0]
            if first.end > self._released or (first.open and first.end == self._released):
                break
            tokens.append(_emitted(self._waiting.popleft()))
        return tuple(tokens)

    def _cut(self) -> tuple[Emitted, ...]:
        """Tokens of the text that is left of the cut; the last may lose its end."""
        tokens = list(self._complete())
        if self._waiting and self._waiting[0].start < self._released:
            last = self._waiting[0]
            kept = last.text[: self._released - last.start]
            tokens.append(replace(_emitted(last), text=kept))
        self._waiting.clear()
        self._held = ""
        return tuple(tokens)


def _emitted(one: _Waiting) -> Emitted:
    return Emitted(one.decided.token, one.text, one.decided.origin, one.decided.logprob)


def token_texts(tokens: Sequence[int], token_bytes: Callable[[int], bytes]) -> list[str]:
    """The text that each token adds; half characters stand with the token that completes them."""
    stream = TextStream(token_bytes)
    pieces = stream.feed([Decided(token) for token in tokens]) + stream.finish()
    return [one.text for one in pieces.tokens]


def shown(raw: bytes) -> str:
    """A token's bytes for a reader: text, or ``bytes:\\x..`` when they are no whole characters."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
