"""Makes a JSON schema into one that xgrammar holds a text to in full, or says why it cannot.

xgrammar passes over what it does not know, so that a text could break its schema unseen. Here such
keywords are refused by name; what can be said in other words is said in them. Knows no tokens.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from graft.verify.grammar.disjoint import check_disjoint
from graft.verify.grammar.pattern import SAFE_CHARACTER, safe_pattern
from graft.verify.grammar.refused import SchemaRefused

Schema = bool | dict[str, Any]

_INT64: Final = (1 << 63) - 1
_REFUSED: Final = (
    "not",
    "if",
    "then",
    "else",
    "dependentRequired",
    "dependentSchemas",
    "dependencies",
    "contains",
    "minContains",
    "maxContains",
    "$dynamicRef",
    "$recursiveRef",
)
_COMBINED: Final = ("anyOf", "oneOf", "allOf")
_DEFINITIONS: Final = ("$defs", "definitions")
_FAMILIES: Final[dict[str, tuple[str, ...]]] = {
    "object": (
        "properties",
        "required",
        "additionalProperties",
        "patternProperties",
        "propertyNames",
        "minProperties",
        "maxProperties",
        "unevaluatedProperties",
    ),
    "array": (
        "items",
        "prefixItems",
        "additionalItems",
        "minItems",
        "maxItems",
        "uniqueItems",
        "unevaluatedItems",
    ),
    "string": ("pattern", "minLength", "maxLength", "format"),
    "number": ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
}
_FAMILIES_OF: Final = {**_FAMILIES, "integer": _FAMILIES["number"], "boolean": (), "null": ()}
_FORMATS: Final = frozenset(
    "date time date-time duration hostname ipv4 ipv6 uri uri-reference uri-template uuid "
    "json-pointer relative-json-pointer".split()
)
# xgrammar's own would let a backslash through.
_EMAIL: Final = r"^[A-Za-z0-9_+-]+(\.[A-Za-z0-9_+-]+)*@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)+$"
_PYTHON_TYPES: Final[dict[str, Callable[[Any], bool]]] = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "null": lambda value: value is None,
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "integer": lambda value: (
        isinstance(value, int | float) and not isinstance(value, bool) and value == int(value)
    ),
}


def bounded(text: str) -> str:
    """The schema in the words that xgrammar keeps to.

    Raises:
        SchemaRefused: it is no JSON schema, or asks for what cannot be held to.
    """
    try:
        schema = json.loads(text, parse_constant=_no_constant)
        return json.dumps(_Rewriter(schema).schema(schema, "#"), ensure_ascii=False)
    except json.JSONDecodeError as error:
        raise SchemaRefused(f"it is not JSON: {error}") from None
    except RecursionError:
        raise SchemaRefused("it is nested too deeply") from None


class _Rewriter:
    """Walks one document; `root` is where local references start."""

    def __init__(self, root: Any) -> None:
        self._root = root

    def schema(self, node: Any, at: str) -> Schema:
        """The node in xgrammar's words. at: where it stands, for errors."""
        if isinstance(node, bool):
            return node
        if not isinstance(node, dict):
            raise SchemaRefused(f"{at} is neither an object nor true or false")
        for word in _REFUSED:
            if word in node:
                raise SchemaRefused(f"{at} uses {word!r}, which is not supported")
        written = self._constraint(node, at)
        for word in _DEFINITIONS:
            if word in node:
                written[word] = {
                    name: self.schema(one, f"{at}/{word}/{name}")
                    for name, one in _mapping(node[word], f"{at}/{word}").items()
                }
        return written

    def _constraint(self, node: Mapping[str, Any], at: str) -> dict[str, Any]:
        if "$ref" in node:
            return {"$ref": self._reference(node, at)}
        for word in _COMBINED:
            if word in node:
                self._alone(node, word, at)
                return {word: self._branches(node[word], word, at)}
        if "const" in node or "enum" in node:
            return _values(node, at)
        types = _types(node, at)
        if not types:
            return {}
        if len(types) == 1:
            return self._typed(types[0], node, at)
        return {"anyOf": [self._typed(kind, node, at) for kind in types]}

    def _reference(self, node: Mapping[str, Any], at: str) -> str:
        reference = node["$ref"]
        if not isinstance(reference, str) or not (reference == "#" or reference.startswith("#/")):
            raise SchemaRefused(f"{at}/$ref must point into the schema itself, with '#/...'")
        self._alone(node, "$ref", at)
        return reference

    def _alone(self, node: Mapping[str, Any], word: str, at: str) -> None:
        """Refuses what would have to hold beside `word`."""
        limits = {"type", "const", "enum", "$ref", *_COMBINED}.union(*_FAMILIES.values())
        beside = [other for other in node if other in limits and other != word]
        if beside:
            raise SchemaRefused(f"{at} uses {beside[0]!r} beside {word!r}, which is not supported")

    def _branches(self, branches: Any, word: str, at: str) -> list[Schema]:
        if not isinstance(branches, list) or not branches:
            raise SchemaRefused(f"{at}/{word} must be a list that is not empty")
        if word == "allOf" and len(branches) > 1:
            raise SchemaRefused(f"{at} uses 'allOf' with several schemas, which is not supported")
        if word == "oneOf":
            check_disjoint(branches, self._root, at)
        return [self.schema(one, f"{at}/{word}/{place}") for place, one in enumerate(branches)]

    def _typed(self, kind: str, node: Mapping[str, Any], at: str) -> dict[str, Any]:
        words = {word: node[word] for word in _FAMILIES_OF[kind] if word in node}
        match kind:
            case "object":
                return self._object(words, at)
            case "array":
                return self._array(words, at)
            case "string":
                return _string(words, at)
            case "integer" | "number":
                return _number(kind, words, at)
        return {"type": kind}

    def _object(self, words: dict[str, Any], at: str) -> dict[str, Any]:
        written: dict[str, Any] = {"type": "object"}
        names = _mapping(words.get("properties", {}), f"{at}/properties")
        if "properties" in words:
            written["properties"] = {
                name: self.schema(one, f"{at}/properties/{name}") for name, one in names.items()
            }
        required = words.get("required", [])
        if not isinstance(required, list) or not all(isinstance(one, str) for one in required):
            raise SchemaRefused(f"{at}/required must be a list of names")
        for name in required:
            if name not in names:
                raise SchemaRefused(f"{at}/required names {name!r}, which properties does not have")
        if required:
            written["required"] = required
        patterns = _mapping(words.get("patternProperties", {}), f"{at}/patternProperties")
        if patterns:
            written["patternProperties"] = {
                safe_pattern(pattern, f"{at}/patternProperties"): self.schema(
                    one, f"{at}/patternProperties/{pattern}"
                )
                for pattern, one in patterns.items()
            }
        self._extra_names(words, written, at)
        _counts(words, ("minProperties", "maxProperties"), written, at)
        return written

    def _extra_names(self, words: dict[str, Any], written: dict[str, Any], at: str) -> None:
        """In place: what names beside the declared ones may hold."""
        extra = words.get("additionalProperties", words.get("unevaluatedProperties"))
        if "propertyNames" in words:
            if "properties" in written or "patternProperties" in written:
                raise SchemaRefused(f"{at} uses 'propertyNames' beside properties")
            names = self.schema(words["propertyNames"], f"{at}/propertyNames")
            if not isinstance(names, dict) or set(names) - {"type", "pattern"}:
                raise SchemaRefused(f"{at}/propertyNames may hold a pattern or lengths alone")
            written["propertyNames"] = names
        if extra is not None:
            written["additionalProperties"] = self.schema(extra, f"{at}/additionalProperties")
        elif len(written) == 1 and ("minProperties" in words or "maxProperties" in words):
            written["additionalProperties"] = True
        elif "propertyNames" in written:
            written["additionalProperties"] = True

    def _array(self, words: dict[str, Any], at: str) -> dict[str, Any]:
        if words.get("uniqueItems"):
            raise SchemaRefused(f"{at} uses 'uniqueItems', which is not supported")
        written: dict[str, Any] = {"type": "array"}
        first, rest = words.get("prefixItems"), words.get("items", words.get("unevaluatedItems"))
        if isinstance(rest, list):
            first, rest = rest, words.get("additionalItems")
        if first is not None:
            if not isinstance(first, list):
                raise SchemaRefused(f"{at}/prefixItems must be a list")
            written["prefixItems"] = [
                self.schema(one, f"{at}/prefixItems/{place}") for place, one in enumerate(first)
            ]
        _counts(words, ("minItems", "maxItems"), written, at)
        if rest is not None:
            written["items"] = self.schema(rest, f"{at}/items")
        elif len(written) > 1 and first is None:
            written["items"] = {}
        return written


def _types(node: Mapping[str, Any], at: str) -> list[str]:
    """The types of values that are written; of a schema without types, those it says more of."""
    if "type" not in node:
        return [kind for kind, words in _FAMILIES.items() if any(word in node for word in words)]
    given = node["type"]
    types = given if isinstance(given, list) else [given]
    for kind in types:
        if not isinstance(kind, str) or kind not in _FAMILIES_OF:
            raise SchemaRefused(f"{at}/type holds {json.dumps(kind)[:40]}, which is no type")
    if not types:
        raise SchemaRefused(f"{at}/type is empty")
    return types


def _values(node: Mapping[str, Any], at: str) -> dict[str, Any]:
    """The values of enum or const that have the types asked for."""
    word = "const" if "const" in node else "enum"
    limits = set().union(*_FAMILIES.values()) | {"enum", "const"}
    beside = [other for other in node if other in limits and other != word]
    if beside:
        raise SchemaRefused(f"{at} uses {beside[0]!r} beside {word!r}, which is not supported")
    values = [node["const"]] if word == "const" else node["enum"]
    if not isinstance(values, list):
        raise SchemaRefused(f"{at}/enum must be a list")
    for value in values:
        _check_numbers(value, at)
    if "type" in node:
        types = _types(node, at)
        values = [one for one in values if any(_PYTHON_TYPES[kind](one) for kind in types)]
    if not values:
        raise SchemaRefused(f"{at}/{word} holds no value that may be written")
    return {"enum": values}


def _check_numbers(value: Any, at: str) -> None:
    if isinstance(value, int | float) and not abs(value) <= _INT64:
        raise SchemaRefused(f"{at} holds a number of more than 64 bits")
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in parts:
        _check_numbers(part, at)


def _string(words: dict[str, Any], at: str) -> dict[str, Any]:
    form = words.get("format")
    if form == "email":
        words = {"pattern": _EMAIL, **{word: words[word] for word in words if word != "format"}}
    lengths: dict[str, Any] = {}
    _counts(words, ("minLength", "maxLength"), lengths, at)
    given = [word for word in ("pattern", "format") if word in words]
    if isinstance(form, str) and form not in _FORMATS and "format" in given:
        given.remove("format")
    if len(given) + bool(lengths) > 1:
        raise SchemaRefused(f"{at} uses {' and '.join([*given, *lengths])} together")
    if "pattern" in given:
        return {"type": "string", "pattern": safe_pattern(words["pattern"], f"{at}/pattern")}
    if "format" in given:
        return {"type": "string", "format": form}
    if not lengths:
        return {"type": "string"}
    low, high = lengths.get("minLength", 0), lengths.get("maxLength")
    if high == 0 or (high is not None and low > high):
        if low:
            raise SchemaRefused(f"{at}/minLength is above maxLength")
        return {"const": ""}
    upper = "" if high is None else high
    return {"type": "string", "pattern": f"^{SAFE_CHARACTER}{{{low},{upper}}}$"}


def _number(kind: str, words: dict[str, Any], at: str) -> dict[str, Any]:
    written: dict[str, Any] = {"type": kind}
    for word, value in words.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > _INT64:
            raise SchemaRefused(f"{at}/{word} must be a number of at most 64 bits")
        if kind == "integer":
            value = math.floor(value) if word in ("maximum", "exclusiveMinimum") else value
            value = math.ceil(value) if word in ("minimum", "exclusiveMaximum") else value
        written[word] = value
    if "multipleOf" in words:
        bounds = len(words) - 1
        if kind == "number" or words["multipleOf"] != int(words["multipleOf"]) or bounds == 1:
            raise SchemaRefused(
                f"{at}/multipleOf is supported for integers, with both bounds or none"
            )
        written["multipleOf"] = int(words["multipleOf"])
    return written


def _counts(
    words: Mapping[str, Any], names: tuple[str, str], written: dict[str, Any], at: str
) -> None:
    """In place: copies two counts."""
    for name in names:
        if name in words:
            value = words[name]
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
                raise SchemaRefused(f"{at}/{name} must be a count")
            written[name] = int(value)


def _mapping(value: Any, at: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise SchemaRefused(f"{at} must be an object")
    return value


def _no_constant(name: str) -> Any:
    raise SchemaRefused(f"it holds {name}, which JSON does not have")
