"""The JSON schema of a call that must be made. Knows functions; compiles and checks nothing.

A forced call is written as plain JSON, whatever marks the model's family has: an object of name and
arguments, or a list of such objects where several calls may come.
"""

from __future__ import annotations

import json
from typing import Any

from graft.common.errors import InvalidArgument
from graft.common.grammar import Grammar
from graft.gateway.functions import FunctionDefinition, FunctionUse
from graft.gateway.structured import Structure
from graft.v1.sampling_pb2 import GrammarKind

MAX_FORCED_CALLS = 16
ANYTHING = {"type": "object"}


def structure_of_call(use: FunctionUse) -> Structure:
    """What holds a message to one of the calls that must be made.

    Raises:
        InvalidArgument: the functions' schemas are too long, or nested too deeply.
    """
    try:
        grammar = Grammar(GrammarKind.GRAMMAR_KIND_JSON_SCHEMA, forced_schema(use))
    except InvalidArgument as error:
        error.field = "tools"
        raise
    except RecursionError:
        raise InvalidArgument("a schema of tools is nested too deeply", field="tools") from None
    return Structure(grammar, "tools")


def forced_schema(use: FunctionUse) -> str:
    """What the message may be: one call of the named function, or of any of those there are."""
    forced = use.forced
    calls = [_call(place, function) for place, function in enumerate(forced)]
    one: dict[str, Any] = calls[0] if len(calls) == 1 else {"anyOf": calls}
    if use.required and use.parallel:
        one = {"type": "array", "items": one, "minItems": 1, "maxItems": MAX_FORCED_CALLS}
    arguments = {
        f"f{place}": _moved(function.parameters or ANYTHING, f"#/$defs/f{place}")
        for place, function in enumerate(forced)
    }
    return json.dumps({**one, "$defs": arguments}, ensure_ascii=False)


def _call(place: int, function: FunctionDefinition) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "name": {"const": function.name},
            "arguments": {"$ref": f"#/$defs/f{place}"},
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, root: str) -> Any:
    """A schema whose references to itself hold where it now is."""
    if isinstance(schema, list):
        return [_moved(part, root) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {key: _moved(part, root) for key, part in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        moved["$ref"] = root + reference[1:]
    return moved
