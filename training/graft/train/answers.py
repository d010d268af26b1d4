"""Answers with their states, shard by shard: what is whole stays, what is missing is made again.

Conversations are answered beyond the end of a shard, so that the batch stays full; a shard is
written once its last answer is there. Knows tokens and states; knows no window and no loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save

from graft.common.sampling import Sampling
from graft.train.author import Ask, Author, Written
from graft.train.files import lines_bytes, number_of, read_lines, write_whole
from graft.train.speech import Speech
from graft.train.turns import Conversation

_GREEDY_OF_64 = 32
_COOLEST, _HOTTEST = 0.7, 1.0


@dataclass(frozen=True, slots=True)
class Shard:
    """A shard that is whole."""

    number: int
    num_sequences: int
    num_tokens: int
    num_written: int
    num_ended: int


def answers_path(folder: Path, shard: int) -> Path:
    """The tokens of a shard."""
    return folder / f"answers-{shard:05d}.jsonl"


def states_path(folder: Path, shard: int) -> Path:
    """The states of a shard."""
    return folder / f"states-{shard:05d}.safetensors"


def law_of(seed: int, name: str) -> Sampling:
    """How a conversation is answered: half greedily, half at a temperature from 0.7 to 1."""
    drawn = number_of(seed, "law", name)
    if drawn % 64 < _GREEDY_OF_64:
        return Sampling(seed=number_of(seed, "answer", name))
    share = (drawn >> 6) % 301 / 300
    temperature = round(_COOLEST + share * (_HOTTEST - _COOLEST), 3)
    return Sampling(temperature=temperature, seed=number_of(seed, "answer", name))


class AnswerWriter:
    """Answers conversations and writes shards of them into a folder."""

    def __init__(self, folder: Path, author: Author, speech: Speech, seed: int) -> None:
        self._folder = folder
        self._author = author
        self._speech = speech
        self._seed = seed

    def there(self, shard: int) -> Shard | None:
        """A shard that was written before; None when it is not whole."""
        answers = answers_path(self._folder, shard)
        if not (answers.exists() and states_path(self._folder, shard).exists()):
            return None
        return _counted(shard, read_lines(answers))

    def write(
        self, conversations: Sequence[Conversation], first: int, shard_prompts: int, most: int
    ) -> Iterator[Shard]:
        """Writes the shards from number `first` on; most: tokens of an answer."""
        started = first * shard_prompts
        asks = (
            self._ask(place, conversations[place], most)
            for place in range(started, len(conversations))
        )
        waiting: dict[int, Written] = {}
        shard = first
        for written in self._author.write(asks):
            waiting[written.ask.key] = written
            while members := range(
                shard * shard_prompts, min((shard + 1) * shard_prompts, len(conversations))
            ):
                if not all(place in waiting for place in members):
                    break
                yield self._save(shard, [(conversations[p], waiting.pop(p)) for p in members])
                shard += 1

    def _ask(self, place: int, conversation: Conversation, most: int) -> Ask:
        prompt = self._speech.prompt(conversation.messages)
        return Ask(place, prompt, law_of(self._seed, conversation.id), most)

    def _save(self, shard: int, members: Sequence[tuple[Conversation, Written]]) -> Shard:
        lines = [
            {
                "id": conversation.id,
                "tokens": [*written.ask.prompt, *written.tokens],
                "prompt_len": len(written.ask.prompt),
                "temperature": written.ask.sampling.temperature,
                "seed": written.ask.sampling.seed,
                "finish": written.finish,
            }
            for conversation, written in members
        ]
        rows = [written.rows for _, written in members if written.rows is not None]
        scales = [written.scales for _, written in members if written.scales is not None]
        states = save({"rows": np.concatenate(rows), "scales": np.concatenate(scales)})
        write_whole(states_path(self._folder, shard), states)
        write_whole(answers_path(self._folder, shard), lines_bytes(lines))
        return _counted(shard, lines)


def _counted(shard: int, lines: Sequence[dict[str, Any]]) -> Shard:
    total = sum(len(line["tokens"]) for line in lines)
    prompts = sum(int(line["prompt_len"]) for line in lines)
    ended = sum(line["finish"] != "length" for line in lines)
    return Shard(shard, len(lines), total, total - prompts, ended)
