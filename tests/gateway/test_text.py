from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graft.gateway.text import Decided, Piece, StopStrings, TextStream, shown, token_texts

texts = st.text(alphabet="ab é😀", max_size=24)
stop_lists = st.lists(st.text(alphabet="ab é😀", min_size=1, max_size=5), max_size=4)


@st.composite
def cut_texts(draw: st.DrawFn) -> tuple[str, list[bytes], list[int]]:
    """A text, its bytes cut into tokens anywhere, and sizes of the rounds that bring them."""
    text = draw(texts)
    raw = text.encode()
    cuts = sorted(draw(st.sets(st.integers(0, len(raw)), max_size=len(raw))))
    edges = [0, *cuts, len(raw)]
    tokens = [raw[a:b] for a, b in pairwise(edges)]
    sizes = draw(st.lists(st.integers(1, 8), min_size=1, max_size=8))
    return text, tokens, sizes


def rounds(tokens: Sequence[bytes], sizes: Sequence[int]) -> list[list[Decided]]:
    decided = [Decided(index) for index in range(len(tokens))]
    blocks = []
    turn = 0
    while decided:
        size = sizes[turn % len(sizes)]
        blocks.append(decided[:size])
        decided = decided[size:]
        turn += 1
    return blocks


def play(
    tokens: Sequence[bytes], sizes: Sequence[int], stops: StopStrings | None = None
) -> tuple[TextStream, Piece]:
    stream = TextStream(lambda token: tokens[token], stops or StopStrings())
    whole = Piece()
    for block in rounds(tokens, sizes):
        whole = whole + stream.feed(block)
        if stream.stopped is not None:
            return stream, whole
    return stream, whole + stream.finish()


def naive_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Where the text is cut: the stop string that is complete first, the longest of those."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            longest = max(found, key=len)
            return end - len(longest), longest
    return None


@given(cut_texts())
def test_whole_characters_join_to_the_text_however_it_is_cut(
    case: tuple[str, list[bytes], list[int]],
) -> None:
    text, tokens, sizes = case
    _, whole = play(tokens, sizes)
    assert whole.text == text
    assert "".join(one.text for one in whole.tokens) == text
    assert [one.token for one in whole.tokens] == list(range(len(tokens)))


@given(cut_texts(), stop_lists)
def test_the_first_complete_stop_string_wins_however_the_text_is_cut(
    case: tuple[str, list[bytes], list[int]], stops: list[str]
) -> None:
    text, tokens, sizes = case
    stream, whole = play(tokens, sizes, StopStrings(tuple(stops)))
    expected = naive_stop(text, stops)
    if expected is None:
        assert (stream.stopped, whole.text) == (None, text)
        assert len(whole.tokens) == len(tokens)
        return
    at, stop = expected
    assert (stream.stopped, whole.text) == (stop, text[:at])
    assert "".join(one.text for one in whole.tokens) == text[:at]


@given(cut_texts(), stop_lists)
def test_an_included_stop_string_is_the_end_of_the_text(
    case: tuple[str, list[bytes], list[int]], stops: list[str]
) -> None:
    text, tokens, sizes = case
    stream, whole = play(tokens, sizes, StopStrings(tuple(stops), included=True))
    expected = naive_stop(text, stops)
    if expected is not None:
        at, stop = expected
        assert whole.text == text[: at + len(stop)]
        assert "".join(one.text for one in whole.tokens) == whole.text
    assert (stream.stopped is None) == (expected is None)


@given(cut_texts(), stop_lists)
def test_only_the_start_of_a_stop_string_is_held_back(
    case: tuple[str, list[bytes], list[int]], stops: list[str]
) -> None:
    _, tokens, sizes = case
    stream = TextStream(lambda token: tokens[token], StopStrings(tuple(stops)))
    released, fed = "", b""
    for block in rounds(tokens, sizes):
        released += stream.feed(block).text
        fed += b"".join(tokens[one.token] for one in block)
        if stream.stopped is not None:
            return
        held = fed.decode(errors="ignore")[len(released) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("place", range(8))
def test_a_stop_of_any_token_count_is_found_at_every_index_of_a_block(
    size: int, width: int, place: int
) -> None:
    before = b"abcdefgh"[:place]
    tokens = [bytes([byte]) for byte in before + b"STOP!"[:size] + b"tail tail"]
    stop = "STOP!"[:size]
    stream, whole = play(tokens, [width], StopStrings((stop,)))
    assert stream.stopped == stop
    assert whole.text == before.decode()
    assert [one.token for one in whole.tokens] == list(range(place))
    assert stream.num_fed == place + size


@pytest.mark.parametrize("cut", range(1, 12))
def test_no_part_of_a_stop_string_is_streamed_before_it_is_complete(cut: int) -> None:
    text = "abcDEFGHIJk"
    tokens = [text[:cut].encode(), text[cut:].encode()]
    stream = TextStream(lambda token: tokens[token], StopStrings(("DEFGHIJ",)))
    seen = ""
    for index in range(2):
        seen += stream.feed([Decided(index)]).text
        assert "D" not in seen
        if stream.stopped:
            break
    assert seen == "abc"


def test_what_only_looked_like_a_stop_is_released_at_the_end() -> None:
    stream, whole = play([b"abcDEF"], [1], StopStrings(("DEFGHIJ",)))
    assert stream.stopped is None
    assert whole.text == "abcDEF"


def test_a_half_character_at_the_end_is_dropped_and_its_tokens_are_kept() -> None:
    raw = "a😀".encode()
    _, whole = play([raw[:1], raw[1:3], raw[3:4]], [1])
    assert whole.text == "a"
    assert [one.text for one in whole.tokens] == ["a", "", ""]


def test_bytes_that_are_no_text_become_the_replacement_character() -> None:
    _, whole = play([b"a\xff", b"b"], [1])
    assert whole.text == "a\ufffdb"


def test_half_of_a_stops_first_character_is_not_emitted() -> None:
    raw = "a😀b".encode()
    _, whole = play([raw[:1], raw[1:3], raw[3:]], [1], StopStrings(("😀",)))
    assert whole.text == "a"
    assert [one.token for one in whole.tokens] == [0]


def test_a_token_that_is_half_stop_loses_that_half() -> None:
    _, whole = play([b"ab", b"cSTO", b"P!d"], [1], StopStrings(("STOP",)))
    assert [one.text for one in whole.tokens] == ["ab", "c"]
    _, whole = play([b"ab", b"cSTO", b"P!d"], [1], StopStrings(("STOP",), included=True))
    assert [one.text for one in whole.tokens] == ["ab", "cSTO", "P"]


def test_a_token_that_ends_a_stop_and_begins_a_character_keeps_the_stop() -> None:
    raw = "😀é".encode()
    _, whole = play([raw[:5], raw[5:]], [1], StopStrings(("😀",), included=True))
    assert [one.text for one in whole.tokens] == ["😀"]


@pytest.mark.parametrize("width", [1, 2, 8])
def test_a_stop_that_ends_within_min_tokens_does_not_count(width: int) -> None:
    tokens = [bytes([byte]) for byte in b"xSTxSTyy"]
    stops = StopStrings(("ST",), min_tokens=3)
    stream, whole = play(tokens, [width], stops)
    assert (stream.stopped, whole.text) == ("ST", "xSTx")


def test_prompt_texts_put_a_character_with_the_token_that_completes_it() -> None:
    raw = "é!".encode()
    assert token_texts([0, 1, 2], lambda token: raw[token : token + 1]) == ["", "é", "!"]


def test_half_characters_are_shown_as_bytes() -> None:
    assert (shown(b"ok"), shown(b"\xf0\x9f")) == ("ok", "bytes:\\xf0\\x9f")
