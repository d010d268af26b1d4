"""Messages as families of models write them, cut in every way: the same parts come out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graft.gateway.speech.calls import FORMATS
from graft.gateway.speech.parts import CallArguments, CallBegun, Content, Part, Reasoning
from graft.gateway.speech.reader import Message, MessageReader, Speech, read_message
from graft.gateway.speech.reasoning import REASONING
from graft.gateway.text import Decided, StopStrings, TextStream

FUNCTIONS = frozenset({"weather", "look_up", "f"})
CITY = '{"city": "Zürich 😀", "note": "a \\"quoted\\" </tool_call> {brace"}'
NESTED = '{"list": [1, {"deep": ["東京", null]}], "n": -1.5e3}'

HERMES = [
    ("Just text, with a < and a <tool", "Just text, with a < and a <tool", []),
    (
        f'I look. 🔎\n\n<tool_call>\n{{"name": "weather", "arguments": {CITY}}}\n</tool_call>\n'
        f'<tool_call>{{"arguments": {NESTED}, "name": "look_up"}}</tool_call>',
        "I look. 🔎",
        [("weather", CITY), ("look_up", NESTED)],
    ),
    (
        '<tool_call>{"name": "f", "parameters": {}}</tool_call> Done.',
        " Done.",
        [("f", "{}")],
    ),
    ('<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": null}</tool_call>', "", [("f", "{}")]),
    (
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"é\\"}"}</tool_call>',
        "",
        [("f", '{"a": "é"}')],
    ),
    ("<tool_call>not a call</tool_call> 東", "<tool_call>not a call</tool_call> 東", []),
    ("<tool_call><tool_call>{", "<tool_call><tool_call>{", []),
    ('<tool_call>{"name": "f", "argu', '<tool_call>{"name": "f", "argu', []),
    ('<tool_call>{"name": "f", "arguments": {"a": "tr', "", [("f", '{"a": "tr')]),
    ('<tool_call>{"name": "f", "arguments": {"a": ]}}</tool_call>x', "x", [("f", '{"a": ]}}')]),
    ('<tool_call>{"name": "f", "arguments": {}}}</tool_call>', "", [("f", "{}")]),
    (
        '<tool_call>{"name": "f", "arguments": {}, "why": [1, "}"]}</tool_call>',
        "",
        [("f", "{}")],
    ),
]
LLAMA3 = [
    (f'{{"name": "weather", "parameters": {CITY}}}', "", [("weather", CITY)]),
    (
        f'<|python_tag|>{{"name": "f", "parameters": {NESTED}}}; '
        '{"name": "look_up", "parameters": {}}',
        "",
        [("f", NESTED), ("look_up", "{}")],
    ),
    ('{"answer": 42}', '{"answer": 42}', []),
    ('{"name": "Bob", "parameters": {}} 😀', '{"name": "Bob", "parameters": {}} 😀', []),
    ("<|python_tag|>print(1)", "<|python_tag|>print(1)", []),
    ("<|pyth", "<|pyth", []),
    ("Plain { text }", "Plain { text }", []),
]
MISTRAL = [
    (
        f'[TOOL_CALLS][{{"name": "weather", "arguments": {CITY}}}, '
        '{"name": "f", "arguments": {}}]',
        "",
        [("weather", CITY), ("f", "{}")],
    ),
    (
        f"Hm. [TOOL_CALLS]weather{CITY}[TOOL_CALLS]f[CALL_ID]abc123def[ARGS]{NESTED}",
        "Hm.",
        [("weather", CITY), ("f", NESTED)],
    ),
    ("[TOOL_CALLS] two words", "[TOOL_CALLS] two words", []),
    ("[TOOL_CALLS][]", "[TOOL_CALLS][]", []),
    ("[TOOL_CALL", "[TOOL_CALL", []),
    ('[TOOL_CALLS]f{"a": "', "", [("f", '{"a": "')]),
]
JSON = [
    (
        f'[{{"name": "weather", "arguments": {CITY}}}, {{"name": "f", "arguments": {{}}}}]\n',
        "",
        [("weather", CITY), ("f", "{}")],
    ),
    ("[1, 2]", "[1, 2]", []),
    ("  ", "  ", []),
    ("", "", []),
]
CASES = [
    (family, *case)
    for family, cases in (
        ("hermes", HERMES),
        ("llama3_json", LLAMA3),
        ("mistral", MISTRAL),
        ("json", JSON),
    )
    for case in cases
]
THOUGHTS = [
    ("<think>\nHm 東京 <b>\n</think>\n\nYes 😀.", "Hm 東京 <b>", "Yes 😀."),
    ("\n<think>cut o", "cut o", ""),
    ("No <think>thought</think>", "", "No <think>thought</think>"),
    ("<think></think>x", "", "x"),
    ("<thi", "", "<thi"),
    (" ", "", " "),
]


def speech_of(family: str) -> Speech:
    return Speech(FORMATS[family], FUNCTIONS)


def told(message: Message) -> tuple[str, str, list[tuple[str, str]]]:
    calls = [(call.name, call.arguments) for call in message.calls]
    return message.content, message.reasoning, calls


def cut(text: str, width: int) -> list[str]:
    return [text[at : at + width] for at in range(0, len(text), width)]


def read(pieces: Iterable[str], speech: Speech) -> Message:
    message, reader = Message(), MessageReader(speech)
    for piece in pieces:
        message.take(reader.feed(piece), speech)
    message.take(reader.finish(), speech)
    return message


def spoken(text: str, width: int, stops: Sequence[str] = ()) -> Iterator[str]:
    """The text as a stream gives it: bytes are tokens, `width` of them a round."""
    tokens = [Decided(byte) for byte in text.encode()]
    stream = TextStream(lambda token: bytes([token]), StopStrings(tuple(stops)))
    for at in range(0, len(tokens), width):
        yield stream.feed(tokens[at : at + width]).text
        if stream.stopped is not None:
            return
    yield stream.finish().text


@pytest.mark.parametrize(("family", "text", "content", "calls"), CASES)
def test_a_message_reads_the_same_however_it_is_cut(
    family: str, text: str, content: str, calls: list[tuple[str, str]]
) -> None:
    speech = speech_of(family)
    for width in [*range(1, 9), len(text) + 1]:
        assert told(read(cut(text, width), speech)) == (content, "", calls), width
        assert told(read(spoken(text, width), speech)) == (content, "", calls), width


@pytest.mark.parametrize(("text", "reasoning", "content"), THOUGHTS)
def test_reasoning_reads_the_same_however_it_is_cut(
    text: str, reasoning: str, content: str
) -> None:
    speech = Speech(FORMATS["hermes"], FUNCTIONS, reasoning=REASONING["think"])
    for width in [*range(1, 9), len(text) + 1]:
        assert told(read(spoken(text, width), speech)) == (content, reasoning, []), width


def test_a_message_may_begin_inside_its_reasoning() -> None:
    for form, inside in ((REASONING["think"], True), (REASONING["deepseek_r1"], False)):
        speech = Speech(reasoning=form, inside=inside)
        for text in ("so\n</think>\n\nyes", "<think>so</think>yes", "\n<think>\nso</think>yes"):
            for width in range(1, 9):
                assert told(read(cut(text, width), speech)) == ("yes", "so", [])


def test_calls_may_follow_reasoning_but_not_stand_in_it() -> None:
    call = '<tool_call>{"name": "f"}</tool_call>'
    speech = Speech(FORMATS["hermes"], FUNCTIONS, reasoning=REASONING["think"])
    for width in range(1, 9):
        found = told(read(cut(f"<think>{call}</think>Now.\n{call}", width), speech))
        assert found == ("Now.", call, [("f", "{}")])


@given(st.sampled_from(CASES), st.data())
def test_random_cuts_make_no_difference(
    case: tuple[str, str, str, list[tuple[str, str]]], data: st.DataObject
) -> None:
    family, text, content, calls = case
    places = sorted(data.draw(st.sets(st.integers(0, len(text)))))
    pieces = [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
    assert told(read(pieces, speech_of(family))) == (content, "", calls)


@given(
    st.sampled_from(sorted(FORMATS)),
    st.text(alphabet='<>{}[]",:/\\ \nab_tolcTOLCALS😀|', max_size=60),
    st.integers(1, 8),
)
def test_any_text_reads_the_same_and_nothing_is_invented(
    family: str, text: str, width: int
) -> None:
    speech = Speech(FORMATS[family], FUNCTIONS, reasoning=REASONING["think"])
    whole = told(read_message(text, speech))
    assert told(read(cut(text, width), speech)) == whole
    content, reasoning, calls = whole
    if not calls and not reasoning:
        assert content in (text, text.lstrip(" \n"), text.removeprefix("<think>"))


@given(
    st.dictionaries(st.text(max_size=8), st.text(max_size=12) | st.integers(), max_size=4),
    st.booleans(),
    st.integers(1, 8),
)
def test_arguments_come_out_as_they_went_in(
    arguments: dict[str, str | int], ascii_only: bool, width: int
) -> None:
    written = json.dumps(arguments, ensure_ascii=ascii_only)
    texts = {
        "hermes": f'<tool_call>\n{{"name": "f", "arguments": {written}}}\n</tool_call>',
        "llama3_json": f'{{"name": "f", "parameters": {written}}}',
        "mistral": f"[TOOL_CALLS]f{written}",
        "json": f'{{"arguments": {written}, "name": "f"}}',
    }
    for family, text in texts.items():
        message = read(cut(text, width), speech_of(family))
        assert [json.loads(call.arguments) for call in message.calls] == [arguments]


def test_arguments_leave_as_they_are_written() -> None:
    reader = MessageReader(speech_of("hermes"))
    text = f'<tool_call>{{"name": "f", "arguments": {NESTED}}}</tool_call>'
    late = sum(len(text_of(reader.feed(char))) for char in text[:-20])
    assert late >= len(NESTED) - 20


def test_no_more_than_what_may_be_a_mark_is_held_back() -> None:
    reader = MessageReader(speech_of("hermes"))
    shown = ""
    text = "One < two <tool <tool_c tools <|x|> done."
    for at, char in enumerate(text, 1):
        shown += text_of(reader.feed(char))
        assert text.startswith(shown) and len(shown) >= at - len("<tool_call>") - 1


def text_of(parts: Sequence[Part]) -> str:
    return "".join(part.text for part in parts if not isinstance(part, CallBegun))


@pytest.mark.parametrize("stop", ["rich", "😀", "</tool_call>", "東京", '"look_up"'])
def test_stop_strings_never_leak_into_any_part(stop: str) -> None:
    text = HERMES[1][0]
    before = text[: text.index(stop)]
    speech = speech_of("hermes")
    for width in range(1, 9):
        message = read(spoken(text, width, [stop]), speech)
        assert told(message) == told(read_message(before, speech))
        assert stop not in message.content + "".join(call.arguments for call in message.calls)


def test_only_the_first_call_counts_where_calls_may_not_be_parallel() -> None:
    speech = Speech(FORMATS["hermes"], FUNCTIONS, parallel=False)
    assert [call.name for call in read_message(HERMES[1][0], speech).calls] == ["weather"]


def test_neighbouring_parts_are_one() -> None:
    speech = Speech(FORMATS["hermes"], FUNCTIONS, reasoning=REASONING["think"])
    parts = MessageReader(speech).feed('<think>a b</think>c d<tool_call>{"name":"f","arguments":{')
    assert parts == [Reasoning("a b"), Content("c d"), CallBegun(0, "f"), CallArguments(0, "{")]


def test_tokens_of_reasoning_are_counted() -> None:
    texts = ["<think>", "a", "b", "</think>", "c"]
    message = read_message("".join(texts), Speech(reasoning=REASONING["think"]), texts)
    assert (message.num_reasoning_tokens, message.content) == (4, "c")


def test_a_thousand_open_marks_are_read_in_no_time() -> None:
    text = '<tool_call>{"name": "' * 2000
    assert read(cut(text, 7), speech_of("hermes")).content == text
