from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Library

from graft.common.errors import InvalidArgument
from graft.gateway.chat_template import DEFAULT_TEMPLATE, MAX_RENDERED_CHARS, ChatTemplate
from graft.gateway.text import token_texts
from graft.gateway.tokenizer import Tokenizer
from graft.testing.models import IM_END, write_tiny_model


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture(scope="module")
def pieces(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("pieces")
    vocab = {"<unk>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    for piece in ("▁", "a", "b", "▁a", "ab"):
        vocab[piece] = len(vocab)
    model = models.BPE(
        vocab=vocab, merges=[("▁", "a"), ("a", "b")], unk_token="<unk>", byte_fallback=True
    )
    library = Library(model)
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    library.add_special_tokens([AddedToken("<s>", special=True)])
    library.add_tokens([AddedToken("<think>", special=False)])
    library.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@given(st.text(max_size=30))
def test_the_bytes_of_byte_level_tokens_are_the_text(byte_level: Tokenizer, text: str) -> None:
    tokens = byte_level.encode(text, specials=False)
    raw = b"".join(byte_level.own_bytes(token) for token in tokens)
    assert raw.decode() == text
    assert "".join(token_texts(tokens, byte_level.own_bytes)) == byte_level.decode(tokens)


@given(st.text(alphabet="ab é😀", max_size=20))
def test_pieces_with_byte_fallback_join_to_the_text(pieces: Tokenizer, text: str) -> None:
    tokens = pieces.encode("▁" + text.replace(" ", "▁"), specials=False)
    assert "".join(token_texts(tokens, pieces.token_bytes)) == " " + text
    assert pieces.decode(tokens) == text


def test_special_tokens_have_no_text_unless_kept(byte_level: Tokenizer) -> None:
    assert byte_level.token_bytes(IM_END) == b""
    assert byte_level.token_bytes(IM_END, skip_specials=False) == b"<|im_end|>"


def test_added_tokens_that_are_not_special_are_text(pieces: Tokenizer) -> None:
    (token,) = pieces.encode("<think>", specials=False)
    assert pieces.token_bytes(token) == b"<think>"


def test_ids_without_a_token_have_no_text(byte_level: Tokenizer) -> None:
    assert byte_level.token_bytes(300) == b""


def test_half_a_surrogate_pair_is_refused(byte_level: Tokenizer) -> None:
    with pytest.raises(InvalidArgument, match="surrogate"):
        byte_level.encode("\ud800", specials=False)


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (None, "cannot read"),
        ("{", "is not a tokenizer"),
        ("{}", "is not a tokenizer"),
    ],
)
def test_a_broken_folder_is_named(tmp_path: Path, content: str | None, sentence: str) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(InvalidArgument, match=sentence):
        Tokenizer(tmp_path)


def test_a_decoder_we_cannot_follow_is_named(tmp_path: Path) -> None:
    library = Library(models.BPE(vocab={"a": 0}, merges=[]))
    library.decoder = decoders.WordPiece()
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(InvalidArgument, match="decoder WordPiece is not supported"):
        Tokenizer(tmp_path)


def test_a_template_file_wins_and_lists_give_the_default(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    config["chat_template"] = [
        {"name": "tools", "template": "t"},
        {"name": "default", "template": "d"},
    ]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert Tokenizer(tmp_path).chat_template == "d"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert Tokenizer(tmp_path).chat_template == "file"


def test_a_template_cannot_reach_outside() -> None:
    for source in (
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{% include '/etc/passwd' %}",
        "{% for i in range(1000000) %}x{% endfor %}",
    ):
        with pytest.raises(InvalidArgument, match="refuses these messages"):
            ChatTemplate(source).render([{"role": "user", "content": "x"}])


def test_a_template_renders_only_so_much() -> None:
    source = "{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}"
    with pytest.raises(InvalidArgument, match=f"more than {MAX_RENDERED_CHARS}"):
        ChatTemplate(source).render([{"role": "user", "content": "x" * 1000}])


def test_a_template_may_refuse_in_its_own_words() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InvalidArgument, match="roles must alternate"):
        template.render([{"role": "user", "content": "x"}])


def test_a_template_that_does_not_compile_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="does not compile"):
        ChatTemplate("{% for %}")


def test_templates_know_the_specials_and_extras() -> None:
    template = ChatTemplate("{{ bos_token }}{{ mood }}{{ messages | tojson }}", bos_token="<s>")
    message: dict[str, Any] = {"role": "user", "content": "é"}
    assert template.render([message], {"mood": "!", "bos_token": "x"}) == (
        '<s>![{"role": "user", "content": "é"}]'
    )


def test_a_model_without_a_template_gets_a_plain_one() -> None:
    text = ChatTemplate(None).render([{"role": "user", "content": "hi"}])
    assert text == "user: hi\nassistant:"
    assert DEFAULT_TEMPLATE
