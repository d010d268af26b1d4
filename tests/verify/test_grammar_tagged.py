"""Free text with tags that hold values of schemas: what is followed and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from graft.v1.sampling_pb2 import GrammarKind
from graft.verify.grammar.refused import SchemaRefused
from graft.verify.grammar.source import Source
from graft.verify.grammar.trial import try_out

KIND = GrammarKind.GRAMMAR_KIND_TAGGED_JSON
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"n": {"$ref": "#/$defs/count"}, "unit": {"enum": ["m", "km"]}},
    "required": ["n", "unit"],
    "$defs": {"count": {"type": "integer"}},
}
FORM = {
    "trigger": "<call>",
    "tags": [
        {"begin": "<call>far:", "schema": SCHEMA, "end": "</call>"},
        {"begin": "<call>any:", "schema": {"type": "object"}, "end": "</call>"},
    ],
}


@pytest.fixture(scope="module")
def source() -> Source:
    return Source([bytes([value]) for value in range(256)] + [b""], [256])


@pytest.mark.parametrize(
    ("text", "fits"),
    [
        ("", True),
        ("Nothing is called here, < or <cal", True),
        ('so<call>far:{"n": 3, "unit": "km"}</call> and more', True),
        ('<call>far:{"n": 3, "unit": "m"}</call><call>any:{"x": [1]}</call>', True),
        ('<call>far:{"n": "3', False),
        ('<call>far:{"unit"', False),
        ('<call>far:{"n":3', False),
        ("<call>near:", False),
        ('<call>far:{"n": 3, "unit": "m"} <', False),
        ("é😀<call>any:{}</call>é", True),
    ],
)
def test_a_tag_holds_its_value_and_text_is_free(text: str, fits: bool, source: Source) -> None:
    matcher = source.matcher(source.compile(KIND, try_out(source, KIND, json.dumps(FORM))))
    assert matcher.accept_string(text) is fits


def test_text_ends_where_no_tag_is_open(source: Source) -> None:
    compiled = source.compile(KIND, try_out(source, KIND, json.dumps(FORM)))
    ended, cut = source.matcher(compiled), source.matcher(compiled)
    ended.accept_string("Well. ")
    cut.accept_string('<call>any:{"x"')
    assert ended.accept_token(256)
    assert not cut.accept_token(256)


@pytest.mark.parametrize(
    ("form", "says"),
    [
        ("{", "not JSON"),
        ("[]", "has not the form"),
        (json.dumps({**FORM, "tags": []}), "has not the form"),
        (json.dumps({**FORM, "trigger": ""}), "has not the form"),
        (json.dumps({**FORM, "tags": [{"begin": "<call>", "end": "."}]}), "has not the form"),
        (json.dumps({**FORM, "trigger": "<tool>"}), "expected '<tool>' first"),
        (
            json.dumps({**FORM, "tags": [{"begin": "<call>f", "schema": {"not": {}}, "end": "."}]}),
            "after '<call>f': # uses 'not'",
        ),
    ],
)
def test_what_cannot_be_held_to_is_refused(form: str, says: str, source: Source) -> None:
    with pytest.raises(SchemaRefused, match=says.replace("'", ".").replace("(", ".")):
        try_out(source, KIND, form)
