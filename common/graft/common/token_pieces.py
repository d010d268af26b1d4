"""The bytes behind the pieces of a tokenizer's vocabulary, read off its own decoder.

Knows the JSON of tokenizer.json: byte-level alphabets, and pieces with byte fallback.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from graft.common.errors import InvalidArgument
from graft.common.model_files import read_json

_SPACE = "\u2581"


def piece_decoder(decoder: Any, path: Path) -> Callable[[str], bytes]:
    """How one piece of the vocabulary becomes bytes, from the `decoder` of tokenizer.json.

    Raises:
        InvalidArgument: it decodes in a way we cannot follow; `path` is named.
    """
    steps = [decoder] if decoder else []
    if decoder and decoder.get("type") == "Sequence":
        steps = decoder["decoders"]
    kinds = [step.get("type") for step in steps]
    if "ByteLevel" in kinds:
        letters = _byte_letters()

        def from_letters(piece: str) -> bytes:
            try:
                return bytes([letters[letter] for letter in piece])
            except KeyError:
                return piece.encode()

        return from_letters
    known = {"Replace", "ByteFallback", "Fuse", "Strip", "Metaspace"}
    if not set(kinds) <= known:
        raise InvalidArgument(
            f"{path}: decoder {'+'.join(map(str, kinds))} is not supported; expected ByteLevel, "
            "or pieces with byte fallback",
            field="model",
        )
    fallback = "ByteFallback" in kinds

    def from_piece(piece: str) -> bytes:
        if fallback and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            try:
                return bytes([int(piece[3:5], 16)])
            except ValueError:
                pass
        return piece.replace(_SPACE, " ").encode()

    return from_piece


def vocabulary_bytes(folder: Path, vocab_size: int) -> list[bytes]:
    """The bytes of every id below `vocab_size`; none for special tokens and ids without a token.

    Raises:
        ModelNotFound: tokenizer.json is missing or damaged.
        InvalidArgument: it decodes in a way we cannot follow.
    """
    path = folder / "tokenizer.json"
    content = read_json(path)
    to_bytes = piece_decoder(content.get("decoder"), path)
    try:
        vocab = content["model"]["vocab"]
        pairs = (
            vocab.items()
            if isinstance(vocab, dict)
            else ((piece, token) for token, (piece, _) in enumerate(vocab))
        )
        found = {token: to_bytes(piece) for piece, token in pairs}
        for added in content.get("added_tokens") or ():
            found[added["id"]] = b"" if added.get("special") else added["content"].encode()
    except (KeyError, TypeError, ValueError, AttributeError):
        raise InvalidArgument(f"{path} is not a tokenizer", field="model") from None
    return [found.get(token, b"") for token in range(vocab_size)]


def _byte_letters() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 stands for itself, the rest from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    letters.update({chr(0x100 + i): byte for i, byte in enumerate(hidden)})
    return letters
