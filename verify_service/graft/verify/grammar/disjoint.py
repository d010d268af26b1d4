"""Whether the branches of a oneOf can be told apart, so that "one of" means "any of".

Knows types, listed values and properties that name their branch; anything subtler is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import combinations
from typing import Any, Final
from urllib.parse import unquote

from graft.verify.grammar.refused import SchemaRefused

_MAX_HOPS: Final = 32
_TYPES: Final = frozenset(("object", "array", "string", "number", "boolean", "null"))


def check_disjoint(branches: list[Any], root: Any, at: str) -> None:
    """Raises:
    SchemaRefused: a value could fit two branches.
    """
    resolved = [_resolved(one, root) for one in branches]
    for one, other in combinations(resolved, 2):
        if not _apart(one, other, root):
            raise SchemaRefused(
                f"{at} uses 'oneOf' with branches that may overlap, which is not supported; "
                "use 'anyOf'"
            )


def _apart(one: Any, other: Any, root: Any) -> bool:
    if not isinstance(one, dict) or not isinstance(other, dict):
        return False
    if not _types(one) & _types(other):
        return True
    mine, theirs = _listed(one), _listed(other)
    if mine is not None and theirs is not None:
        return not mine & theirs
    if _types(one) == _types(other) == {"object"}:
        return _named_apart(one, other, root)
    return False


def _named_apart(one: Mapping[str, Any], other: Mapping[str, Any], root: Any) -> bool:
    """True when both require a property whose listed values differ."""
    for name in set(one.get("required") or ()) & set(other.get("required") or ()):
        mine = _listed(_resolved((one.get("properties") or {}).get(name), root))
        theirs = _listed(_resolved((other.get("properties") or {}).get(name), root))
        if mine is not None and theirs is not None and not mine & theirs:
            return True
    return False


def _types(node: Mapping[str, Any]) -> frozenset[str]:
    """Types that a value may have; all of them when nothing is said."""
    values = _values(node)
    if values is not None:
        return frozenset(_type_of(value) for value in values)
    given = node.get("type")
    names = given if isinstance(given, list) else [given]
    named = [name for name in names if isinstance(name, str)]
    if given is None or len(named) < len(names):
        return _TYPES
    return frozenset("number" if name == "integer" else name for name in named)


def _type_of(value: Any) -> str:
    for kind, name in ((bool, "boolean"), (str, "string"), (dict, "object"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "null" if value is None else "number"


def _listed(node: Any) -> frozenset[str] | None:
    values = _values(node) if isinstance(node, dict) else None
    return None if values is None else frozenset(json.dumps(one, sort_keys=True) for one in values)


def _values(node: Mapping[str, Any]) -> list[Any] | None:
    if "const" in node:
        return [node["const"]]
    values = node.get("enum")
    return values if isinstance(values, list) else None


def _resolved(node: Any, root: Any) -> Any:
    """What a chain of local references leads to; None when it leads nowhere."""
    for _ in range(_MAX_HOPS):
        if not isinstance(node, dict) or not isinstance(node.get("$ref"), str):
            return node
        node = _at(node["$ref"], root)
    return None


def _at(reference: str, root: Any) -> Any:
    node = root
    for part in reference.removeprefix("#").split("/")[1:]:
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and name.isdigit() and int(name) < len(node):
            node = node[int(name)]
        elif isinstance(node, dict):
            node = node.get(name)
        else:
            return None
    return node
