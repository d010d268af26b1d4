"""What a model's message is made of, piece by piece, once its markers are read. Only values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text the model wrote for itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The model calls a function; its arguments follow. `index` counts calls from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """The next piece of a call's arguments: JSON as the model wrote it."""

    index: int
    text: str


Part = Content | Reasoning | CallBegun | CallArguments


def merged(parts: Iterable[Part]) -> list[Part]:
    """The same parts; neighbours that continue each other are joined, empty ones left out."""
    found: list[Part] = []
    for part in parts:
        if isinstance(part, CallBegun):
            found.append(part)
        elif part.text:
            last = found[-1] if found else None
            if isinstance(last, CallBegun) or last is None or not _continues(last, part):
                found.append(part)
            else:
                found[-1] = replace(last, text=last.text + part.text)
    return found


def _continues(last: Part, part: Part) -> bool:
    if isinstance(last, CallArguments) and isinstance(part, CallArguments):
        return last.index == part.index
    return type(last) is type(part)
