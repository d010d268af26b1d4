"""Makes conversations ready to be answered: the target writes what is not given.

A user turn that has only an opening is sampled, at temperature 1 if it names no other; of a
conversation of several turns the answers between them are written greedily. Knows conversations;
knows no split and no state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from graft.common.sampling import Sampling
from graft.train.author import Ask, Author
from graft.train.files import number_of
from graft.train.prompts import Slot
from graft.train.speech import Message, Speech, whole_sentences

_TURN_TOP_P = 0.95
_LEAST_CHARACTERS = 8


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is to be answered; the last message is the user's."""

    id: str
    source: str
    messages: tuple[Message, ...]


class TurnWriter:
    """Completes slots, by whole shards."""

    def __init__(
        self, author: Author, speech: Speech, seed: int, answer_tokens: int, max_prompt_tokens: int
    ) -> None:
        self._author = author
        self._speech = speech
        self._seed = seed
        self._answer_tokens = answer_tokens
        self._max_prompt_tokens = max_prompt_tokens

    def complete(self, slots: Sequence[Slot]) -> list[Conversation]:
        """The conversations of `slots`, in order; left out are those too long or next to empty."""
        said: dict[int, list[Message]] = {place: [] for place in range(len(slots))}
        dropped: set[int] = set()
        for place, text in self._openings(slots):
            if len(text) < _LEAST_CHARACTERS:
                dropped.add(place)
            said[place] = [Message("user", text)]
        for place, slot in enumerate(slots):
            if slot.opening is None:
                said[place] = [Message("user", slot.turns[0])]
        fits = self._fitting(said) - dropped
        depth = 1
        while asked := [p for p in sorted(fits) if len(slots[p].turns) > depth]:
            for place, answer in self._answers(asked, said):
                said[place] += [
                    Message("assistant", answer),
                    Message("user", slots[place].turns[depth]),
                ]
            depth += 1
            fits &= self._fitting(said)
        return [
            Conversation(slots[place].id, slots[place].source, tuple(said[place]))
            for place in sorted(fits)
        ]

    def _openings(self, slots: Sequence[Slot]) -> Iterator[tuple[int, str]]:
        asks = [
            Ask(
                place,
                self._speech.user_turn(slot.opening.text),
                Sampling(
                    temperature=slot.opening.temperature,
                    top_p=_TURN_TOP_P,
                    seed=number_of(self._seed, "turn", slot.id),
                ),
                slot.opening.max_tokens,
            )
            for place, slot in enumerate(slots)
            if slot.opening is not None
        ]
        for written in self._author.write(asks):
            opening = slots[written.ask.key].opening
            assert opening is not None
            text = self._speech.text(written.tokens)
            if written.finish == "length":
                text = whole_sentences(text)
            yield written.ask.key, (opening.text + text).strip() + opening.closing

    def _answers(
        self, places: Sequence[int], said: dict[int, list[Message]]
    ) -> Iterator[tuple[int, str]]:
        asks = [
            Ask(place, self._speech.prompt(said[place]), Sampling(), self._answer_tokens)
            for place in places
        ]
        for written in self._author.write(asks):
            yield written.ask.key, self._speech.text(written.tokens).strip()

    def _fitting(self, said: dict[int, list[Message]]) -> set[int]:
        return {
            place
            for place, messages in said.items()
            if messages and len(self._speech.prompt(messages)) <= self._max_prompt_tokens
        }
