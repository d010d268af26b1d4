"""Schemas in the words that xgrammar keeps to: what is written fits, what cannot be is refused."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.testing.schemas import schema
from graft.verify.grammar.refused import SchemaRefused
from graft.verify.grammar.schema import bounded
from graft.verify.grammar.source import Source

VOCAB = 320
ENDS = (256, 258)
JSON_SCHEMA = 2
CLOSERS = tuple(b'"]},')
TEXT, WHOLE = {"type": "string"}, {"type": "integer"}


@pytest.fixture(scope="module")
def source() -> Source:
    """Bytes as tokens, like the tiny model's."""
    vocabulary = [bytes([byte]) for byte in range(256)] + [b""] * (VOCAB - 256)
    return Source(vocabulary, ENDS)


def written(source: Source, wanted: Any, seed: int, limit: int = 800) -> str | None:
    """A text by chance that the schema allows; None when it had no end."""
    text = bounded(json.dumps(wanted, ensure_ascii=False))
    matcher = source.matcher(source.compile(JSON_SCHEMA, text))
    rng, out = random.Random(seed), bytearray()
    row = torch.zeros(1, VOCAB // 32, dtype=torch.int32)
    for _ in range(limit):
        row.fill_(-1)
        matcher.fill_next_token_bitmask(row, 0)
        bits = np.unpackbits(row.numpy().view(np.uint8), bitorder="little")
        allowed = np.flatnonzero(bits).tolist()
        going_on = [token for token in allowed if token not in ENDS]
        if len(going_on) < len(allowed) and (not going_on or rng.random() < 0.6):
            return out.decode(errors="replace")
        closing = [token for token in going_on if token in CLOSERS]
        token = rng.choice(closing if closing and rng.random() < 0.35 else going_on)
        assert matcher.accept_token(token)
        out.append(token)
    return None


def check(source: Source, wanted: Any, seeds: int = 12) -> None:
    validator = jsonschema.Draft202012Validator(wanted)
    texts = [written(source, wanted, seed) for seed in range(seeds)]
    assert any(text is not None for text in texts)
    for text in texts:
        if text is not None:
            validator.validate(json.loads(text))


@pytest.mark.parametrize("number", range(60))
def test_what_a_schema_allows_fits_it(source: Source, number: int) -> None:
    check(source, schema(number), seeds=4)


KEPT: dict[str, Any] = {
    "lengths": {"type": "string", "minLength": 3, "maxLength": 5},
    "no length": {"type": "string", "maxLength": 0},
    "a pattern without ends": {"type": "string", "pattern": "a.b"},
    "an address": {"type": "string", "format": "email"},
    "an unknown format": {"type": "string", "format": "colour"},
    "bounds": {"type": "integer", "exclusiveMinimum": 0.5, "maximum": 4},
    "bounds of a number": {"type": "number", "minimum": -1.5, "exclusiveMaximum": 2},
    "multiples": {"type": "integer", "minimum": 0, "maximum": 50, "multipleOf": 7},
    "listed values of a type": {"type": "string", "enum": ["a", 1, "😀"]},
    "a value": {"const": {"a": [1, None, "x\n"]}},
    "types": {"type": ["string", "integer"], "minimum": 3, "maximum": 4, "maxLength": 2},
    "bounds without a type": {"minimum": 5, "maximum": 6},
    "lengths without a type": {"maxLength": 2},
    "a list": {"type": "array", "minItems": 2, "maxItems": 3},
    "a tuple": {"type": "array", "prefixItems": [WHOLE, TEXT], "items": False},
    "one of, told apart by type": {"oneOf": [{"type": "boolean"}, {"type": "null"}]},
    "one of, told apart by a name": {
        "oneOf": [
            {"$ref": "#/$defs/a"},
            {"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"]},
        ],
        "$defs": {"a": {"type": "object", "properties": {"k": {"const": "a"}}, "required": ["k"]}},
    },
    "all of one": {"allOf": [{"type": "boolean"}], "description": "yes or no"},
    "names by pattern": {
        "type": "object",
        "patternProperties": {"^x[0-9]$": WHOLE},
        "additionalProperties": False,
    },
    "names with lengths": {
        "type": "object",
        "propertyNames": {"maxLength": 3},
        "additionalProperties": WHOLE,
        "maxProperties": 2,
    },
    "further names": {
        "type": "object",
        "properties": {"a": WHOLE},
        "required": ["a"],
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 3,
    },
    "a count of names": {"type": "object", "minProperties": 1, "maxProperties": 2},
    "nothing said": {},
    "true": True,
}


@pytest.mark.parametrize("name", KEPT)
def test_a_keyword_is_kept(source: Source, name: str) -> None:
    check(source, KEPT[name])


def test_objects_are_closed_unless_they_say_otherwise(source: Source) -> None:
    wanted = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    for seed in range(10):
        assert written(source, wanted, seed) in ('{"a": true}', '{"a": false}')


REFUSED: dict[str, tuple[Any, str]] = {
    "not": ({"type": "integer", "not": {"const": 3}}, "'not'"),
    "if": ({"if": {}, "then": {}}, "'if'"),
    "contains": ({"type": "array", "contains": WHOLE}, "'contains'"),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "'uniqueItems'"),
    "dependentRequired": ({"type": "object", "dependentRequired": {}}, "'dependentRequired'"),
    "all of several": ({"allOf": [WHOLE, {"maximum": 5}]}, "'allOf'"),
    "one of, overlapping": ({"oneOf": [WHOLE, {"type": "number"}]}, "'oneOf'"),
    "any of, with a type": ({"type": "integer", "anyOf": [{"maximum": 5}]}, "'type' beside"),
    "a reference with bounds": ({"$ref": "#/$defs/n", "maximum": 5}, "'maximum' beside"),
    "a reference elsewhere": ({"$ref": "http://example.org/a.json"}, "$ref"),
    "a name that is not declared": ({"properties": {"a": WHOLE}, "required": ["z"]}, "'z'"),
    "a pattern with a quote": ({"type": "string", "pattern": 'a"b'}, "#/pattern"),
    "a pattern with all but a": ({"type": "string", "pattern": "[^a]"}, "#/pattern"),
    "a pattern with space": ({"type": "string", "pattern": r"\s"}, "#/pattern"),
    "a broken pattern": ({"type": "string", "pattern": "(a"}, "no regular expression"),
    "a pattern with lengths": ({"pattern": "a", "maxLength": 3}, "together"),
    "multiples of a number": ({"type": "number", "multipleOf": 0.5}, "multipleOf"),
    "a great number": ({"const": 1 << 70}, "64 bits"),
    "an unknown type": ({"type": "colour"}, "colour"),
    "no value": ({"type": "string", "enum": [1]}, "no value"),
    "no schema": ([1], "neither"),
    "a bad place": ({"properties": {"a": {"items": 3}}}, "#/properties/a/items"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_kept_is_refused_by_name(name: str) -> None:
    wanted, says = REFUSED[name]
    with pytest.raises(SchemaRefused) as refused:
        bounded(json.dumps(wanted))
    assert says in str(refused.value)


@pytest.mark.parametrize("text", ["", "{", "nul", '{"const": NaN}', "[" * 100_000, '{"a": ' * 5000])
def test_a_text_that_is_no_schema_is_refused(text: str) -> None:
    with pytest.raises(SchemaRefused):
        bounded(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                "type properties required items prefixItems enum const anyOf oneOf allOf $ref "
                "$defs pattern minLength maxLength minimum multipleOf minItems not format x".split()
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(JSON)
@settings(max_examples=300, deadline=None)
def test_nothing_but_a_refusal_comes_of_any_json(wanted: Any) -> None:
    try:
        assert isinstance(bounded(json.dumps(wanted)), str)
    except SchemaRefused as refused:
        assert str(refused)
