"""Prompts for measurements: the project's own small file, or any JSON-lines file by path."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graft.common.errors import InvalidArgument

OWN = Path(__file__).parent / "prompts.jsonl"


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question and its category; only the first turn of a conversation is asked."""

    text: str
    category: str


def read(path: Path | None = None, limit: int | None = None) -> list[Prompt]:
    """Rows with `turns` or `prompt`, and optionally `category`.

    A limit takes rows evenly spread over the file, so that every category has its share.

    Raises:
        InvalidArgument: the file cannot be read, or a row has neither field.
    """
    source = path or OWN
    try:
        lines = [line for line in source.read_text().splitlines() if line.strip()]
    except OSError as error:
        raise InvalidArgument(f"cannot read prompts: {error}", field="prompts") from None
    prompts = [_prompt(source, number, line) for number, line in enumerate(lines, 1)]
    if limit is None or limit >= len(prompts):
        return prompts
    return [prompts[i * len(prompts) // limit] for i in range(limit)]


def from_all_categories(prompts: Sequence[Prompt], limit: int | None) -> list[Prompt]:
    """At most `limit` prompts in their order, as many of each category as the others allow.

    A category with fewer gives all it has. Those taken are evenly spread over their category.
    """
    groups: dict[str, list[int]] = {}
    for place, prompt in enumerate(prompts):
        groups.setdefault(prompt.category, []).append(place)
    shares = dict.fromkeys(groups, 0)
    left = len(prompts) if limit is None else min(limit, len(prompts))
    while left:
        for name, places in groups.items():
            if left and shares[name] < len(places):
                shares[name] += 1
                left -= 1
    taken = [
        places[i * len(places) // shares[name]]
        for name, places in groups.items()
        for i in range(shares[name])
    ]
    return [prompts[place] for place in sorted(taken)]


def _prompt(source: Path, number: int, line: str) -> Prompt:
    try:
        row = json.loads(line)
        text = row["turns"][0] if "turns" in row else row["prompt"]
    except (ValueError, KeyError, IndexError, TypeError):
        raise InvalidArgument(
            f"{source}:{number}: expected a JSON object with `turns` or `prompt`", field="prompts"
        ) from None
    return Prompt(text=str(text), category=str(row.get("category", "")))
