"""Reads a corpus: token ids, and the target's states at every position but the last.

A corpus that is still being made can be read as far as it is whole. Knows files and shapes; knows
no drafter.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from safetensors import safe_open
from torch import Tensor

from graft.common.errors import InvalidArgument
from graft.train.answers import Shard, answers_path, states_path
from graft.train.files import json_bytes, read_lines, write_whole
from graft.train.quantise import restore

Split = Literal["train", "held"]

_OPEN_SHARDS = 4096


@dataclass(frozen=True, slots=True)
class SequenceRef:
    """One conversation with its answer. first_row: of its states within its shard."""

    id: str
    shard: int
    first_row: int
    length: int
    prompt_len: int
    temperature: float
    finish: str
    index: int


@dataclass(frozen=True, slots=True)
class CorpusSummary:
    """What a closed corpus holds. coverage: the share of training answers in the vocabulary."""

    shards: int
    sequences: int
    tokens: int
    answer_tokens: int
    ended: int
    draft_vocab: int
    coverage: float

    def line(self) -> str:
        """One line for people."""
        return (
            f"corpus: {self.sequences} conversations, {self.tokens} tokens, {self.answer_tokens} "
            f"of them answers, {self.ended / max(1, self.sequences):.0%} ended by themselves; "
            f"draft vocabulary of {self.draft_vocab} covers {self.coverage:.2%}"
        )


class Corpus:
    """The corpus in a folder.

    Raises:
        InvalidArgument: there is none.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self.plan: dict[str, Any] = json.loads((folder / "plan.json").read_text("utf-8"))
            prompts = read_lines(folder / "prompts.jsonl")
        except OSError as error:
            raise InvalidArgument(f"{folder} holds no corpus: {error}", field="out") from None
        self.layers: tuple[int, ...] = tuple(self.plan["layers"])
        self.hidden_size = int(self.plan["hidden_size"])
        self._splits: dict[str, str] = {row["id"]: row["split"] for row in prompts}
        self._tokens: list[npt.NDArray[np.int32]] = []
        self._refs: list[SequenceRef] = []
        for shard in range(_num_shards(folder)):
            self._read(shard)
        self._open = lru_cache(_OPEN_SHARDS)(self._map)

    def sequences(self, split: Split) -> list[SequenceRef]:
        """The conversations of a split, in the order they were asked."""
        return [ref for ref in self._refs if self._splits[ref.id] == split]

    def tokens(self, ref: SequenceRef) -> npt.NDArray[np.int32]:
        """[length], prompt and answer."""
        return self._tokens[ref.index]

    def states(self, ref: SequenceRef) -> Tensor:
        """[length - 1, layers, hidden], float32; row i is the states whose input is token i."""
        rows, scales = self.coded_states(ref)
        return restore(rows, scales)

    def coded_states(self, ref: SequenceRef) -> tuple[Tensor, Tensor]:
        """The same as it is stored: int8 rows and float32 scales, [length - 1, layers]."""
        rows, scales = self._open(ref.shard)
        span = slice(ref.first_row, ref.first_row + ref.length - 1)
        return rows[span], scales[span]

    @property
    def num_tokens(self) -> int:
        """Tokens of all conversations."""
        return sum(ref.length for ref in self._refs)

    def draft_vocab(self) -> Tensor:
        """Ids of the draft vocabulary, ascending, int64.

        Raises:
            InvalidArgument: the corpus is not closed yet.
        """
        path = self.folder / "draft_vocab.json"
        try:
            return torch.tensor(json.loads(path.read_text("utf-8"))["ids"], dtype=torch.int64)
        except OSError as error:
            raise InvalidArgument(f"the corpus is not finished: {error}", field="out") from None

    def _read(self, shard: int) -> None:
        first_row = 0
        for line in read_lines(answers_path(self.folder, shard)):
            tokens = np.asarray(line["tokens"], np.int32)
            self._refs.append(
                SequenceRef(
                    line["id"],
                    shard,
                    first_row,
                    len(tokens),
                    line["prompt_len"],
                    line["temperature"],
                    line["finish"],
                    len(self._tokens),
                )
            )
            self._tokens.append(tokens)
            first_row += len(tokens) - 1

    def _map(self, shard: int) -> tuple[Tensor, Tensor]:
        with safe_open(states_path(self.folder, shard), framework="pt") as file:
            return file.get_tensor("rows"), file.get_tensor("scales")


def close_corpus(
    folder: Path, shards: Sequence[Shard], specials: Sequence[int], size: int
) -> CorpusSummary:
    """Writes which shards count, and the draft vocabulary of their training answers."""
    write_whole(folder / "closed.json", json_bytes({"shards": len(shards)}))
    corpus = Corpus(folder)
    counts: Counter[int] = Counter()
    for ref in corpus.sequences("train"):
        counts.update(corpus.tokens(ref)[ref.prompt_len :].tolist())
    ids, coverage = draft_vocabulary(counts, int(corpus.plan["vocab_size"]), specials, size)
    write_whole(
        folder / "draft_vocab.json", json_bytes({"ids": ids, "coverage": round(coverage, 6)})
    )
    return CorpusSummary(
        len(shards),
        sum(shard.num_sequences for shard in shards),
        sum(shard.num_tokens for shard in shards),
        sum(shard.num_written for shard in shards),
        sum(shard.num_ended for shard in shards),
        len(ids),
        coverage,
    )


def draft_vocabulary(
    counts: Counter[int], vocab_size: int, specials: Sequence[int], size: int
) -> tuple[list[int], float]:
    """The most frequent ids and the specials, ascending, and the share of `counts` they cover.

    Equal counts go by id; when the text has too few ids, unseen ones fill up.
    """
    kept = set(specials)
    order = sorted(range(vocab_size), key=lambda token: (-counts[token], token))
    for token in order:
        if len(kept) >= min(size, vocab_size):
            break
        kept.add(token)
    total = sum(counts.values())
    covered = sum(counts[token] for token in kept)
    return sorted(kept), covered / total if total else 0.0


def _num_shards(folder: Path) -> int:
    """Those of a closed corpus, else as many as are whole without a gap."""
    closed = folder / "closed.json"
    if closed.exists():
        return int(json.loads(closed.read_text("utf-8"))["shards"])
    number = 0
    while answers_path(folder, number).exists() and states_path(folder, number).exists():
        number += 1
    return number
