"""What is wrong with a body, as one sentence that names the field. Knows pydantic's errors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from graft.common.errors import InvalidArgument

_Loc = tuple[int | str, ...]


def first_error(failure: ValidationError) -> InvalidArgument:
    """The first thing that is wrong, as one sentence that names the field."""
    return invalid(failure.errors(include_url=False, include_context=False), 0)


def invalid(errors: Sequence[Mapping[str, Any]], loc_start: int) -> InvalidArgument:
    """As `first_error`, from pydantic's list of errors; locations are read from `loc_start` on.

    Of a union's errors, the one that got deepest tells most.
    """
    top = errors[0]["loc"][: loc_start + 1]
    first = max(
        (error for error in errors if error["loc"][: loc_start + 1] == top),
        key=lambda error: len(error["loc"]),
    )
    loc = tuple(first["loc"])[loc_start:]
    field = _field_name(loc)
    if first["type"] == "missing":
        if not field:
            return InvalidArgument("the body is empty, expected a JSON object")
        return InvalidArgument(f"{field} is required", field=field)
    message = _EXPECTED.get(str(loc[0]), "") if len(loc) <= 3 and loc else ""
    message = message or str(first["msg"])
    sentence = message[:1].lower() + message[1:]
    return InvalidArgument(f"{field or 'the body'}: {sentence}", field=field or None)


def _field_name(loc: _Loc) -> str:
    """``messages[0].content`` from a location; the tags of union members are left out."""
    name = ""
    for part in loc:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part.replace("_", "a").isalnum() and part[:1].islower() and part not in _TAGS:
            name += f".{part}" if name else part
    return name


_TAGS = {"str", "int", "float", "bool", "list", "dict"}
_EXPECTED = {
    "prompt": "expected a text, a list of texts, token ids, or a list of lists of token ids",
    "stop": "expected a string or a list of strings",
    "tool_choice": "expected none, auto, required, or an object that names a function",
}
