"""What an answer is held to: response_format, regex and ebnf, and the grammar they come to.

Knows the fields and their limits; reads no schema and no expression, which the verify service does.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from graft.common.errors import InvalidArgument
from graft.common.grammar import Grammar
from graft.gateway.guided import Wanted
from graft.v1.sampling_pb2 import GrammarKind

NOT_GUIDED: Mapping[str, Wanted] = {}


class JsonSchemaFormat(BaseModel):
    """A JSON schema that the answer is a value of. It is always kept to, strict or not."""

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    name: str = Field(default="", max_length=256)
    description: str | None = None
    schema_: dict[str, JsonValue] | bool | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """What the answer is: free text, any JSON object, or a value of a JSON schema."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


@dataclass(frozen=True, slots=True)
class Structure:
    """The grammar of an answer, and the field it was asked for by."""

    grammar: Grammar
    field: str


def structure_of(
    response_format: ResponseFormat | None,
    regex: str | None,
    ebnf: str | None,
    guided: Mapping[str, Wanted] = NOT_GUIDED,
) -> Structure | None:
    """What the three fields, and other servers' names for them, come to; None where all is free.

    Raises:
        InvalidArgument: more than one of them is given, or one is out of its limits.
    """
    wanted: dict[str, Wanted] = {}
    if response_format is not None and response_format.type != "text":
        wanted["response_format"] = _of_format(response_format)
    elif response_format is not None and response_format.json_schema is not None:
        raise _error("response_format", 'json_schema needs "type": "json_schema"')
    if regex:
        wanted["regex"] = (GrammarKind.GRAMMAR_KIND_REGEX, regex)
    if ebnf:
        wanted["ebnf"] = (GrammarKind.GRAMMAR_KIND_EBNF, ebnf)
    wanted.update(guided)
    if not wanted:
        return None
    field, *others = wanted
    if others:
        raise _error(others[0], f"it cannot be combined with {field}")
    try:
        return Structure(Grammar(*wanted[field]), field)
    except InvalidArgument as error:
        error.field = field
        raise


def _of_format(wanted: ResponseFormat) -> Wanted:
    if wanted.type == "json_object":
        if wanted.json_schema is not None:
            raise _error("response_format", 'json_schema needs "type": "json_schema"')
        return GrammarKind.GRAMMAR_KIND_JSON_OBJECT, ""
    schema = None if wanted.json_schema is None else wanted.json_schema.schema_
    if schema is None:
        raise InvalidArgument(
            "response_format.json_schema.schema is required", field="response_format"
        )
    return GrammarKind.GRAMMAR_KIND_JSON_SCHEMA, _written(schema)


def _written(schema: Any) -> str:
    """The schema as text, its properties in the order in which they are to be written."""
    try:
        return json.dumps(schema, ensure_ascii=False)
    except RecursionError:
        raise _error("response_format", "the schema is nested too deeply") from None


def _error(field: str, says: str) -> InvalidArgument:
    return InvalidArgument(f"{field}: {says}", field=field)
