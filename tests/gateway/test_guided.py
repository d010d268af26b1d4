"""vLLM's names for structured output: each comes to the grammar that our own field comes to."""

from __future__ import annotations

from typing import Any

import pytest
import xgrammar
from pydantic import ValidationError

from graft.common.errors import InvalidArgument
from graft.gateway.chat_request import ChatRequest
from graft.gateway.guided import one_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}


def request(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "x"}], **fields})


@pytest.mark.parametrize(
    ("theirs", "ours", "field"),
    [
        ({"guided_json": SCHEMA}, {"response_format": FORMAT}, "guided_json"),
        (
            {"guided_json": '{"type": "object", "properties": {"a": {"type": "integer"}}}'},
            {"response_format": FORMAT},
            "guided_json",
        ),
        ({"guided_regex": "a+"}, {"regex": "a+"}, "guided_regex"),
        ({"guided_grammar": 'root ::= "a"'}, {"ebnf": 'root ::= "a"'}, "guided_grammar"),
        ({"guided_choice": ["a", "b"]}, {"ebnf": 'root ::= "a" | "b"'}, "guided_choice"),
        (
            {"structured_outputs": {"json": SCHEMA}},
            {"response_format": FORMAT},
            "structured_outputs.json",
        ),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}, "structured_outputs.regex"),
        (
            {"structured_outputs": {"json_object": True}},
            {"response_format": {"type": "json_object"}},
            "structured_outputs.json_object",
        ),
        (
            {"structured_outputs": {"choice": ["a"]}},
            {"ebnf": 'root ::= "a"'},
            "structured_outputs.choice",
        ),
    ],
)
def test_another_name_means_the_same(
    theirs: dict[str, Any], ours: dict[str, Any], field: str
) -> None:
    found, wanted = request(**theirs).structure(), request(**ours).structure()
    assert found is not None and wanted is not None
    assert (found.grammar, found.field) == (wanted.grammar, field)
    assert request(**theirs).unheeded == []


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": [1]}, "guided_json"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
        ({"guided_regex": "a", "regex": "a"}, "guided_regex"),
        ({"guided_regex": "a", "response_format": FORMAT}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs.choice"),
        ({"guided_choice": ["\ud800"]}, "guided_choice"),
    ],
)
def test_what_cannot_be_meant_is_refused_by_its_name(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        request(**fields).check()
    assert raised.value.field == field


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_choice": []},
        {"structured_outputs": {"structural_tag": "x"}},
        {"structured_outputs": {"choice": "a"}},
    ],
)
def test_what_is_not_known_is_no_request(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        request(**fields)


def test_a_choice_is_written_as_it_is() -> None:
    texts = ["yes", 'no "q" \\ \n x', "東京 😀", "tab\t\x01", "."]
    vocabulary = [bytes([byte]) for byte in range(256)] + [b"</s>"]
    compiler = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(vocabulary, stop_token_ids=[256]))
    grammar = compiler.compile_grammar(one_of(texts))
    for text in texts:
        matcher = xgrammar.GrammarMatcher(grammar)
        assert matcher.accept_string(text) and matcher.accept_token(256)
    for text in ("y", "maybe", "a", "yess"):
        matcher = xgrammar.GrammarMatcher(grammar)
        assert not (matcher.accept_string(text) and matcher.accept_token(256))
