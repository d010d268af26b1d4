"""Free text in which values between marks keep to schemas: its form on the wire and xgrammar's.

Knows schemas by what `bounded` makes of them; knows no functions and no tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

import xgrammar

from graft.verify.grammar.refused import SchemaRefused
from graft.verify.grammar.schema import bounded

_SHAPE: Final = '{"trigger", "tags": [{"begin", "schema", "end"}]}'


def bounded_tags(text: str) -> str:
    """The same form with each schema in the words that xgrammar keeps to.

    Raises:
        SchemaRefused: it has another form, or a schema asks for what cannot be held to.
    """
    try:
        form = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SchemaRefused(f"it is not JSON: {error}") from None
    trigger, tags = _parts(form)
    return json.dumps({"trigger": trigger, "tags": [_bounded(tag) for tag in tags]})


def begins(text: str) -> list[str]:
    """What stands before each value, in a text that `bounded_tags` has made."""
    return [tag["begin"] for tag in json.loads(text)["tags"]]


def structural_tag(text: str) -> str:
    """xgrammar's structural tag, of a text that `bounded_tags` has made.

    Raises:
        RuntimeError: xgrammar cannot read a schema.
    """
    form = json.loads(text)
    tags = [{"type": "tag", **tag, "content": _content(tag.pop("schema"))} for tag in form["tags"]]
    found = {"type": "triggered_tags", "triggers": [form["trigger"]], "tags": tags}
    return json.dumps({"type": "structural_tag", "format": found})


def _content(schema: Any) -> dict[str, str]:
    """The rules of a value: a schema in a structural tag itself allows free whitespace."""
    rules = xgrammar.Grammar.from_json_schema(json.dumps(schema), any_whitespace=False)
    return {"type": "grammar", "grammar": str(rules)}


def _parts(form: Any) -> tuple[str, Sequence[Any]]:
    if isinstance(form, Mapping) and form.keys() == {"trigger", "tags"}:
        trigger, tags = form["trigger"], form["tags"]
        if isinstance(trigger, str) and trigger and isinstance(tags, list) and tags:
            return trigger, [_checked(tag, trigger) for tag in tags]
    raise SchemaRefused(f"it has not the form {_SHAPE}")


def _checked(tag: Any, trigger: str) -> Mapping[str, Any]:
    if (
        not isinstance(tag, Mapping)
        or tag.keys() != {"begin", "schema", "end"}
        or not all(isinstance(tag[mark], str) and tag[mark] for mark in ("begin", "end"))
    ):
        raise SchemaRefused(f"it has not the form {_SHAPE}")
    if not tag["begin"].startswith(trigger):
        raise SchemaRefused(f"a tag begins with {tag['begin'][:60]!r}, expected {trigger!r} first")
    return tag


def _bounded(tag: Mapping[str, Any]) -> dict[str, Any]:
    try:
        schema = json.loads(bounded(json.dumps(tag["schema"])))
    except SchemaRefused as refused:
        begin = " ".join(tag["begin"].split())[:120]
        raise SchemaRefused(f"after {begin!r}: {refused}") from None
    return {"begin": tag["begin"], "schema": schema, "end": tag["end"]}
