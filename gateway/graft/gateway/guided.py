"""vLLM's names for what an answer is held to: guided_* and structured_outputs.

Reads them as `response_format`, `regex` and `ebnf` are read; knows no grammar's meaning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from graft.common.errors import InvalidArgument
from graft.v1.sampling_pb2 import GrammarKind

Wanted = tuple[GrammarKind.ValueType, str]
MAX_CHOICES = 1024


class StructuredOutputs(BaseModel):
    """The object that newer releases take; one of its fields is given."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    json_: JsonValue = Field(default=None, alias="json")
    regex: str | None = None
    choice: list[str] | None = Field(default=None, min_length=1, max_length=MAX_CHOICES)
    grammar: str | None = None
    json_object: bool | None = None

    def wanted(self) -> dict[str, Wanted]:
        """What it asks for, by the name of its field."""
        found = wanted_of(self.json_, self.regex, self.choice, self.grammar)
        if self.json_object:
            found["json_object"] = (GrammarKind.GRAMMAR_KIND_JSON_OBJECT, "")
        return {f"structured_outputs.{name}": wanted for name, wanted in found.items()}


def wanted_of(
    schema: JsonValue, regex: str | None, choice: Sequence[str] | None, grammar: str | None
) -> dict[str, Wanted]:
    """What the four ways to guide ask for, by their names.

    Raises:
        InvalidArgument: the schema is text, and not JSON.
    """
    found: dict[str, Wanted] = {}
    if schema is not None:
        found["json"] = (GrammarKind.GRAMMAR_KIND_JSON_SCHEMA, _schema(schema))
    if regex:
        found["regex"] = (GrammarKind.GRAMMAR_KIND_REGEX, regex)
    if choice:
        found["choice"] = (GrammarKind.GRAMMAR_KIND_EBNF, one_of(choice))
    if grammar:
        found["grammar"] = (GrammarKind.GRAMMAR_KIND_EBNF, grammar)
    return found


def one_of(texts: Sequence[str]) -> str:
    """The rules of which the texts, and no others, are derived."""
    return "root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def by_old_names(found: Mapping[str, Wanted]) -> dict[str, Wanted]:
    """The same, by the names that stand in the body itself."""
    return {f"guided_{name}": wanted for name, wanted in found.items()}


def _schema(schema: Any) -> str:
    """The schema as text; it comes as a value, or as text already."""
    if isinstance(schema, Mapping | bool):
        return json.dumps(schema, ensure_ascii=False)
    try:
        read = json.loads(schema) if isinstance(schema, str) else None
    except (ValueError, RecursionError):
        read = None
    if not isinstance(read, Mapping | bool):
        raise InvalidArgument("expected a JSON schema: an object, or one written as text")
    return str(schema)
