"""Conversations as token ids and written tokens as text, with the target's own template.

Knows template and tokenizer; runs no model.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graft.common.errors import Unsupported
from graft.gateway.chat_template import ChatTemplate
from graft.gateway.tokenizer import Tokenizer

_PROBE = "graft probe of a user turn"
_SENTENCE_END = re.compile(r"[.!?][\"')\]]*(?=\s)")


@dataclass(frozen=True, slots=True)
class Message:
    """One turn."""

    role: str
    content: str


class Speech:
    """The words of one model folder."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer(folder)
        self._template = ChatTemplate(
            self.tokenizer.chat_template,
            bos_token=self.tokenizer.bos_token,
            eos_token=self.tokenizer.eos_token,
        )

    def prompt(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Ids of a conversation that asks the assistant to go on."""
        return tuple(self.tokenizer.encode(self._rendered(messages), specials=False))

    def user_turn(self, opening: str) -> tuple[int, ...]:
        """Ids of a conversation up to the user's first words.

        Raises:
            Unsupported: the template hides or changes what the user says.
        """
        before, found, _ = self._rendered([Message("user", _PROBE)]).partition(_PROBE)
        if not found:
            raise Unsupported("the chat template changes the user's words, so none can be written")
        return tuple(self.tokenizer.encode(before + opening, specials=False))

    def text(self, tokens: Sequence[int]) -> str:
        """What was written, without special tokens."""
        return self.tokenizer.decode(tokens, skip_specials=True)

    def _rendered(self, messages: Sequence[Message]) -> str:
        rows = [{"role": one.role, "content": one.content} for one in messages]
        return self._template.render(rows)


def whole_sentences(text: str) -> str:
    """A text that was cut off, without its unfinished sentence, if it has a finished one."""
    ends = [match.end() for match in _SENTENCE_END.finditer(text)]
    return text[: ends[-1]] if ends else text
