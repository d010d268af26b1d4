"""What a text may be held to: a kind of grammar and its text. Knows nothing of what it says."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Final

from graft.common.errors import InvalidArgument, Unsupported
from graft.v1 import sampling_pb2
from graft.v1.sampling_pb2 import GrammarKind

GRAMMAR_KINDS: Final = (
    GrammarKind.GRAMMAR_KIND_JSON_OBJECT,
    GrammarKind.GRAMMAR_KIND_JSON_SCHEMA,
    GrammarKind.GRAMMAR_KIND_REGEX,
    GrammarKind.GRAMMAR_KIND_EBNF,
    GrammarKind.GRAMMAR_KIND_TAGGED_JSON,
)
MAX_GRAMMAR_BYTES: Final = 128 << 10


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar; the meaning of each kind is in sampling.proto.

    Raises:
        InvalidArgument: the text is missing, or too long; `field` is "grammar".
        Unsupported: there is no such kind.
    """

    kind: GrammarKind.ValueType
    text: str = ""

    def __post_init__(self) -> None:
        if self.kind not in GRAMMAR_KINDS:
            raise Unsupported(f"grammar kind {self.kind} is not offered", field="grammar")
        if bool(self.text) == (self.kind == GrammarKind.GRAMMAR_KIND_JSON_OBJECT):
            state = "has a text, expected none" if self.text else "is empty"
            raise InvalidArgument(f"the grammar {state}", field="grammar")
        try:
            size = len(self.text.encode())
        except UnicodeEncodeError:
            raise InvalidArgument(
                f"{self.name} holds half a surrogate pair", field="grammar"
            ) from None
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidArgument(
                f"{self.name} has {size} bytes, limit is {MAX_GRAMMAR_BYTES}", field="grammar"
            )

    @property
    def name(self) -> str:
        """What to call it in a sentence."""
        return _NAMES[self.kind]

    @property
    def digest(self) -> bytes:
        """Equal for equal grammars."""
        return hashlib.sha256(f"{self.kind}:{self.text}".encode()).digest()


_NAMES = {
    GrammarKind.GRAMMAR_KIND_JSON_OBJECT: "the JSON object",
    GrammarKind.GRAMMAR_KIND_JSON_SCHEMA: "the JSON schema",
    GrammarKind.GRAMMAR_KIND_REGEX: "the regular expression",
    GrammarKind.GRAMMAR_KIND_EBNF: "the EBNF grammar",
    GrammarKind.GRAMMAR_KIND_TAGGED_JSON: "the form of the calls",
}


def kind_name(kind: GrammarKind.ValueType) -> str:
    """The kind in lower case, as requests and server information write it."""
    return GrammarKind.Name(kind).removeprefix("GRAMMAR_KIND_").lower()


def grammar_from_proto(message: sampling_pb2.Grammar) -> Grammar:
    """Reads the wire form."""
    return Grammar(message.kind, message.text)


def grammar_to_proto(grammar: Grammar) -> sampling_pb2.Grammar:
    """The wire form."""
    return sampling_pb2.Grammar(kind=grammar.kind, text=grammar.text)
