"""Patterns that may be written into a JSON string as they match. Knows regular expressions alone.

xgrammar writes what a pattern matches between the quotes as it is. A quote, a backslash or a
control character there would end or break the string, so what may match one is refused.
"""

from __future__ import annotations

import re
from re import _constants as op  # type: ignore[attr-defined]
from re import _parser as parser  # type: ignore[attr-defined]
from typing import Any, Final

from graft.verify.grammar.refused import SchemaRefused

_ESCAPED: Final = frozenset('"\\') | {chr(code) for code in range(0x20)}
_BROAD: Final = {"CATEGORY_NOT_DIGIT", "CATEGORY_NOT_WORD", "CATEGORY_NOT_SPACE", "CATEGORY_SPACE"}


# All but what a JSON string must escape, and halves of surrogate pairs.
SAFE_CHARACTER: Final = "[ !#-\\[\\]-\ud7ff\ue000-\U0010ffff]"


def safe_pattern(pattern: Any, at: str) -> str:
    """The pattern, its dots spelled out.

    Raises:
        SchemaRefused: it is no pattern, or may match a character that a JSON string must escape.
    """
    if not isinstance(pattern, str):
        raise SchemaRefused(f"{at} must be a string")
    try:
        parsed = parser.parse(pattern)
    except (re.error, OverflowError) as error:
        raise SchemaRefused(f"{at} is no regular expression: {error}") from None
    if _matches_escaped(parsed):
        raise SchemaRefused(
            f"{at} matches quotes, backslashes or control characters, which a JSON string "
            r"escapes; leave them out, as [^\"\\\x00-\x1f] does"
        )
    return _spelled_out(pattern)


def _spelled_out(pattern: str) -> str:
    """xgrammar's dot would match halves of surrogate pairs, which are no UTF-8."""
    written, in_class, escaped = "", False, False
    for letter in pattern:
        dot = letter == "." and not in_class and not escaped
        written += SAFE_CHARACTER if dot else letter
        if escaped:
            escaped = False
        elif letter == "\\":
            escaped = True
        elif letter in "[]":
            in_class = letter == "["
    return written


def _matches_escaped(part: Any) -> bool:
    if isinstance(part, parser.SubPattern | list | tuple):
        if isinstance(part, tuple) and len(part) == 2:
            return _item(*part)
        return any(_matches_escaped(inner) for inner in part)
    return False


def _item(kind: Any, value: Any) -> bool:
    if kind is op.LITERAL:
        return chr(value) in _ESCAPED
    if kind is op.NOT_LITERAL:
        return True
    if kind is op.IN:
        return _class(value)
    if kind is op.CATEGORY:
        return str(value) in _BROAD
    if kind in (op.ANY, op.AT):
        return False
    return _matches_escaped(value) if isinstance(value, list | tuple | parser.SubPattern) else False


def _class(items: list[tuple[Any, Any]]) -> bool:
    """A class of characters: the ones it names, or all but those."""
    named: set[str] = set()
    for kind, value in items:
        if kind is op.LITERAL:
            named.add(chr(value))
        elif kind is op.RANGE:
            low, high = value
            named.update(one for one in _ESCAPED if low <= ord(one) <= high)
        elif kind is op.CATEGORY:
            if str(value) in _BROAD:
                return True
    negated = items[0][0] is op.NEGATE
    return not named >= _ESCAPED if negated else bool(named & _ESCAPED)
