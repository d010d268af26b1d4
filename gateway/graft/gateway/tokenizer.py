"""Words to ids and ids to bytes, for one model folder. Knows no request and no model weights.

A token's bytes are read off the tokenizer's own decoder (byte-level, or pieces with byte
fallback), so that a stream of tokens is a stream of bytes and nothing is decoded twice.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as _Tokenizer

from graft.common.errors import InvalidArgument
from graft.common.token_pieces import piece_decoder


class Tokenizer:
    """The tokenizer of a model folder.

    Raises:
        InvalidArgument: tokenizer.json is missing, broken, or decodes in a way we cannot follow.
    """

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            self._tokenizer = _Tokenizer.from_str(json.dumps(content))
        except OSError as error:
            raise InvalidArgument(f"cannot read {path}: {error.strerror}", field="model") from None
        except Exception as error:  # tokenizers raises bare Exception
            raise InvalidArgument(f"{path} is not a tokenizer: {error}", field="model") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        config = _read_json(folder / "tokenizer_config.json")
        self.chat_template = _chat_template(folder, config)
        self.bos_token = _content(config.get("bos_token"))
        self.eos_token = _content(config.get("eos_token"))
        self._to_bytes = piece_decoder(content.get("decoder"), path)
        self._special: dict[int, bytes] = {}
        self._added: dict[int, bytes] = {}
        for token, added in self._tokenizer.get_added_tokens_decoder().items():
            (self._special if added.special else self._added)[token] = added.content.encode()
        self._bytes: dict[int, bytes] = {}

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def bos_id(self) -> int | None:
        """Id of the beginning-of-sequence token, where there is one."""
        found = self._tokenizer.token_to_id(self.bos_token) if self.bos_token else None
        return None if found is None else int(found)

    def encode(self, text: str, *, specials: bool) -> list[int]:
        """Ids of `text`; with `specials` the model's own frame, such as BOS, is added.

        Raises:
            InvalidArgument: the text is not valid Unicode.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise InvalidArgument("the text holds half a surrogate pair", field="prompt") from None
        return list(self._tokenizer.encode(text, add_special_tokens=specials).ids)

    def decode(self, tokens: Sequence[int], *, skip_specials: bool = False) -> str:
        """The text of a whole sequence."""
        return str(self._tokenizer.decode(list(tokens), skip_special_tokens=skip_specials))

    def token_bytes(self, token: int, *, skip_specials: bool = True) -> bytes:
        """The bytes a token adds to the text; none for special tokens when they are skipped."""
        if token in self._special:
            return b"" if skip_specials else self._special[token]
        found = self._bytes.get(token)
        if found is None:
            found = self._added.get(token)
            if found is None:
                piece = self._tokenizer.id_to_token(token)
                found = b"" if piece is None else self._to_bytes(piece)
            self._bytes[token] = found
        return found

    def specials_of(self, texts: Iterable[str]) -> frozenset[int]:
        """Special tokens whose whole text is one of these."""
        wanted = {text.encode() for text in texts}
        return frozenset(token for token, text in self._special.items() if text in wanted)

    def own_bytes(self, token: int) -> bytes:
        """The bytes of a token by itself, specials written out; for logprob entries."""
        return self.token_bytes(token, skip_specials=False)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"cannot read {path}: {error}", field="model") from None
    return content if isinstance(content, dict) else {}


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja wins; a list of named templates gives the one called default."""
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry.get("name"): entry.get("template") for entry in template}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _content(token: Any) -> str:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""
