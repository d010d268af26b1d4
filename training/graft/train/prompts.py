"""What the target is asked: prompts from files, and openings that it completes itself.

A row of a file has `prompt`, `turns` or `question`, or is an opening: `opening`, and optionally
`closing`, `max_tokens`, `weight` and `temperature`. Knows rows and their order; knows no model and
no token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graft.common.errors import InvalidArgument
from graft.train.files import number_of, read_lines

OWN = Path(__file__).parent / "data" / "prompts.jsonl"
"""The project's own prompts and openings."""

_TURN_TOKENS = 96


@dataclass(frozen=True, slots=True)
class Opening:
    """How a user turn begins and ends; what is between, the target writes."""

    text: str = ""
    closing: str = ""
    max_tokens: int = _TURN_TOKENS
    weight: int = 1
    temperature: float = 1.0


@dataclass(frozen=True, slots=True)
class Slot:
    """One conversation to be. turns: what the user says, in order; else how the turn opens."""

    id: str
    turns: tuple[str, ...] = ()
    opening: Opening | None = None

    @property
    def source(self) -> str:
        """Where the user turn comes from."""
        return "file" if self.opening is None else "synth"


def read_slots(files: Sequence[Path], synth: int, seed: int) -> list[Slot]:
    """All conversations, in an order whose every part is mixed as the whole is.

    synth: how many the target writes the user turn of; openings take turns by their weight.

    Raises:
        InvalidArgument: a file is missing or a row says nothing.
    """
    groups: list[list[Slot]] = []
    openings: list[Opening] = []
    for path in files:
        try:
            rows = read_lines(path)
        except (OSError, ValueError) as error:
            raise InvalidArgument(f"cannot read {path}: {error}", field="prompts") from None
        group = []
        for line, row in enumerate(rows):
            if "opening" in row:
                openings.append(_opening(row))
            else:
                group.append(Slot(f"{path.stem}-{line:05d}", _turns(row, path, line)))
        groups.append(_shuffled(group, seed))
    groups.append(_synth(openings, synth, seed))
    return _interleaved(groups)


def _synth(openings: Sequence[Opening], count: int, seed: int) -> list[Slot]:
    wheel = [one for one in openings for _ in range(one.weight)] or [Opening()]
    slots = []
    for number in range(count):
        lap, place = divmod(number, len(wheel))
        if place == 0:
            order = sorted(range(len(wheel)), key=lambda i, lap=lap: number_of(seed, lap, i))  # type: ignore[misc]
        slots.append(Slot(f"synth-{number:06d}", opening=wheel[order[place]]))
    return slots


def _shuffled(slots: list[Slot], seed: int) -> list[Slot]:
    return sorted(slots, key=lambda slot: number_of(seed, "order", slot.id))


def _interleaved(groups: Sequence[Sequence[Slot]]) -> list[Slot]:
    """Every group spread evenly over the whole."""
    placed = [
        ((place + 0.5) / len(group), number, slot)
        for number, group in enumerate(groups)
        for place, slot in enumerate(group)
    ]
    return [slot for _, _, slot in sorted(placed, key=lambda one: one[:2])]


def _turns(row: dict[str, Any], path: Path, line: int) -> tuple[str, ...]:
    said = row.get("turns") or row.get("prompt") or row.get("question")
    turns = (said,) if isinstance(said, str) else tuple(said or ())
    if not turns or not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise InvalidArgument(
            f"{path} line {line + 1} has no `prompt`, `turns`, `question` or `opening`",
            field="prompts",
        )
    return turns


def _opening(row: dict[str, Any]) -> Opening:
    return Opening(
        row["opening"],
        row.get("closing", ""),
        int(row.get("max_tokens", _TURN_TOKENS)),
        int(row.get("weight", 1)),
        float(row.get("temperature", 1.0)),
    )
