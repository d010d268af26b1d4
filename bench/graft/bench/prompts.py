"""Prompts for measurements: the project's own small file, or any JSON-lines file by path."""

from __future__ import annotations

import json
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


def _prompt(source: Path, number: int, line: str) -> Prompt:
    try:
        row = json.loads(line)
        text = row["turns"][0] if "turns" in row else row["prompt"]
    except (ValueError, KeyError, IndexError, TypeError):
        raise InvalidArgument(
            f"{source}:{number}: expected a JSON object with `turns` or `prompt`", field="prompts"
        ) from None
    return Prompt(text=str(text), category=str(row.get("category", "")))
