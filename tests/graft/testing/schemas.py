"""JSON schemas by number: nested, with enums, arrays, recursion and Unicode, and bounded in length.

Equal numbers give equal schemas. Knows no grammar and no server.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
_Make = Callable[[random.Random, int], Schema]

_NAMES = ("name", "id", "größe", "名前", "tags", "left", "right", "note 😀", 'q"uote', "n\\m", "x")
_VALUES = (
    "red",
    "grün",
    "蓝",
    "🦀",
    "a b",
    "",
    'say "hi"',
    "back\\slash",
    0,
    17,
    -3,
    2.5,
    True,
    None,
)
_FORMATS = ("date", "time", "uuid", "ipv4")
_PATTERNS = ("^[a-z]{2,5}$", "^[A-Z]{1,3}-[0-9]{2}$", "^(yes|no|später)$", "^.{0,6}$")
_MAX_DEPTH = 3


def schema(number: int) -> Schema:
    """A schema of an object; every tenth one is recursive by $defs, every tenth by its root."""
    rng = random.Random(number)
    if number % 10 == 3:
        return _recursive(rng)
    if number % 10 == 7:
        return _own_child(rng)
    made = _object(rng, 0)
    if number % 10 == 5:
        made["$defs"] = {"köpfe/part": _value(rng, 2)}
        made["properties"]["shared"] = {"$ref": "#/$defs/k%C3%B6pfe~1part"}
        made["required"].append("shared")
    return made


def _value(rng: random.Random, depth: int) -> Schema:
    kinds: list[_Make] = [_text, _number, _choice, _flag, _several]
    if depth < _MAX_DEPTH:
        kinds += [_object, _array, _tuple, _any_of]
    return rng.choice(kinds)(rng, depth)


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_NAMES, rng.randint(1, 4))
    return {
        "type": "object",
        "title": "An object",
        "properties": {name: _value(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.8],
        "additionalProperties": False,
    }


def _array(rng: random.Random, depth: int) -> Schema:
    least = rng.randint(0, 2)
    items = _value(rng, depth + 1)
    return {"type": "array", "items": items, "minItems": least, "maxItems": least + 1}


def _tuple(rng: random.Random, depth: int) -> Schema:
    parts = [_value(rng, depth + 1) for _ in range(rng.randint(1, 2))]
    count = len(parts)
    return {"type": "array", "prefixItems": parts, "items": False, "minItems": count}


def _any_of(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_value(rng, depth + 1), {"type": "null"}], "default": None}


def _text(rng: random.Random, _: int) -> Schema:
    match rng.randrange(3):
        case 0:
            return {"type": "string", "minLength": rng.randint(0, 2), "maxLength": 6}
        case 1:
            return {"type": "string", "format": rng.choice(_FORMATS)}
    return {"type": "string", "pattern": rng.choice(_PATTERNS)}


def _number(rng: random.Random, _: int) -> Schema:
    low = rng.randint(-50, 50)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}


def _choice(rng: random.Random, _: int) -> Schema:
    return {"enum": rng.sample(_VALUES, rng.randint(1, 4))}


def _flag(rng: random.Random, _: int) -> Schema:
    return {"type": rng.choice(["boolean", "null", ["boolean", "null"]])}


def _several(rng: random.Random, _: int) -> Schema:
    return {"type": ["integer", "string"], "minimum": 0, "maximum": 9, "maxLength": 3}


def _recursive(rng: random.Random) -> Schema:
    """A list of links that end in null."""
    link = {
        "type": "object",
        "properties": {
            "value": _choice(rng, 0),
            "next": {"anyOf": [{"type": "null"}, {"enum": [0, 1, 2]}, {"$ref": "#/$defs/link"}]},
        },
        "required": ["value", "next"],
        "additionalProperties": False,
    }
    return {"$defs": {"link": link}, "$ref": "#/$defs/link"}


def _own_child(rng: random.Random) -> Schema:
    """A tree whose children are like itself."""
    return {
        "type": "object",
        "properties": {
            "label": _text(rng, 0),
            "child": {"anyOf": [{"type": "null"}, {"type": "boolean"}, {"$ref": "#"}]},
        },
        "required": ["label", "child"],
        "additionalProperties": False,
    }
