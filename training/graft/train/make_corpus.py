"""The corpus stage: turns, answers, closing; goes on where a former run was stopped.

Knows the order of the stage and what it tells; the parts know how.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from graft.common.model_files import resolve
from graft.train.answers import AnswerWriter, Shard
from graft.train.author import Author, Desk, load_author
from graft.train.corpus import close_corpus
from graft.train.files import lines_bytes, number_of, read_lines, write_whole
from graft.train.plan import DRAFT_VOCAB, CorpusPlan, default_layers, digest_files, settle_plan
from graft.train.prompts import Slot, read_slots
from graft.train.speech import Message, Speech
from graft.train.turns import Conversation, TurnWriter

_TURN_SHARD = 256


@dataclass(frozen=True, slots=True)
class CorpusOrder:
    """What the corpus stage is asked for. tokens: training tokens, prompts included; 0 takes all.

    draft_vocab: its size. layers: empty takes the default ones.
    """

    out: Path
    desk: Desk
    prompts: tuple[Path, ...]
    synth: int = 0
    seed: int = 0
    tokens: int = 0
    answer_tokens: int = 256
    max_prompt_tokens: int = 1024
    shard_prompts: int = 32
    held: float = 0.04
    draft_vocab: int = DRAFT_VOCAB
    layers: tuple[int, ...] = ()


class Teller(Protocol):
    """Shows how far a stage is."""

    def begin(self, what: str, total: float, done: float) -> None:
        """A stage of `total` units, of which `done` are there already."""

    def advance(self, units: float, note: str) -> None:
        """More of it is done."""

    def say(self, line: str) -> None:
        """A line that stays."""


def make_corpus(order: CorpusOrder, teller: Teller) -> Path:
    """Makes or completes the corpus and returns its folder.

    Raises:
        InvalidArgument: the folder holds the corpus of other settings.
        GraftError: the target cannot be loaded or run.
    """
    folder = order.out / "corpus"
    folder.mkdir(parents=True, exist_ok=True)
    slots = read_slots(order.prompts, order.synth, order.seed)
    author = load_author(order.desk, (), lambda _what, _share: None)
    target = author.loaded.target
    layers = order.layers or default_layers(target.config.num_layers)
    settle_plan(folder, _plan(order, author, layers))
    speech = Speech(resolve(order.desk.target, weights=False).folder)
    log = MetricsLog(order.out / "corpus-log.jsonl")
    longest = min(order.max_prompt_tokens, target.context_length - 1)
    turns = TurnWriter(author, speech, order.seed, order.answer_tokens, longest)
    conversations = _conversations(order, folder, slots, turns, teller, log)
    answering = Author(author.loaded, order.desk.sessions, layers)
    writer = AnswerWriter(folder, answering, speech, order.seed)
    shards = _answers(order, conversations, writer, teller, log)
    summary = close_corpus(folder, shards, target.eos_token_ids, order.draft_vocab)
    teller.say(summary.line())
    return folder


class MetricsLog:
    """JSON lines about a run, with the time of each."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, **fields: Any) -> None:
        """One line."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"time": round(time.time(), 3), **fields}) + "\n")


def _plan(order: CorpusOrder, author: Author, layers: tuple[int, ...]) -> CorpusPlan:
    target = author.loaded.target
    return CorpusPlan(
        target=target.name,
        tokenizer_digest=target.tokenizer_digest,
        precision=target.precision,
        kernels=author.loaded.ops.name,
        vocab_size=target.vocab_size,
        hidden_size=target.config.hidden_size,
        num_layers=target.config.num_layers,
        layers=layers,
        prompts=digest_files(order.prompts),
        synth=order.synth,
        seed=order.seed,
        answer_tokens=order.answer_tokens,
        max_prompt_tokens=order.max_prompt_tokens,
        shard_prompts=order.shard_prompts,
        held=order.held,
    )


def _conversations(
    order: CorpusOrder,
    folder: Path,
    slots: list[Slot],
    turns: TurnWriter,
    teller: Teller,
    log: MetricsLog,
) -> list[Conversation]:
    """All conversations; written down when the last of their turns is."""
    path = folder / "prompts.jsonl"
    if path.exists():
        return [_read(row) for row in read_lines(path)]
    rows: list[dict[str, Any]] = []
    teller.begin("user turns", len(slots), 0)
    for first in range(0, len(slots), _TURN_SHARD):
        part = slots[first : first + _TURN_SHARD]
        kept = folder / f"turns-{first // _TURN_SHARD:05d}.jsonl"
        if kept.exists():
            teller.advance(len(part), "")
        else:
            began = time.monotonic()
            done = turns.complete(part)
            write_whole(kept, lines_bytes(_row(one, order) for one in done))
            seconds = time.monotonic() - began
            log.write(stage="turns", slots=len(part), kept=len(done), seconds=round(seconds, 1))
            teller.advance(len(part), f"{len(done) / max(seconds, 1e-9):.1f} turns/s")
        rows += read_lines(kept)
    write_whole(path, lines_bytes(rows))
    return [_read(row) for row in rows]


def _answers(
    order: CorpusOrder,
    conversations: list[Conversation],
    writer: AnswerWriter,
    teller: Teller,
    log: MetricsLog,
) -> list[Shard]:
    """Whole shards up to the token budget, those of former runs first."""
    shards: list[Shard] = []
    number_of_shards = -(-len(conversations) // order.shard_prompts)
    while len(shards) < number_of_shards and not _enough(shards, order.tokens):
        found = writer.there(len(shards))
        if found is None:
            break
        shards.append(found)
    done = sum(shard.num_tokens for shard in shards)
    by_tokens = order.tokens > 0
    total = order.tokens if by_tokens else len(conversations)
    teller.begin("answers", total, done if by_tokens else sum(s.num_sequences for s in shards))
    if len(shards) == number_of_shards or _enough(shards, order.tokens):
        return shards
    began, before = time.monotonic(), done
    coming = writer.write(conversations, len(shards), order.shard_prompts, order.answer_tokens)
    for shard in coming:
        shards.append(shard)
        done += shard.num_tokens
        rate = (done - before) / (time.monotonic() - began)
        log.write(stage="answers", tokens=done, tokens_per_s=round(rate, 1), **asdict(shard))
        teller.advance(
            shard.num_tokens if by_tokens else shard.num_sequences, f"{rate:.0f} tokens/s"
        )
        if _enough(shards, order.tokens):
            break
    return shards


def _enough(shards: list[Shard], tokens: int) -> bool:
    return bool(tokens) and sum(shard.num_tokens for shard in shards) >= tokens


def _row(one: Conversation, order: CorpusOrder) -> dict[str, Any]:
    held = number_of(order.seed, "split", one.id) % 10_000 < order.held * 10_000
    return {
        "id": one.id,
        "source": one.source,
        "messages": [asdict(message) for message in one.messages],
        "split": "held" if held else "train",
    }


def _read(row: dict[str, Any]) -> Conversation:
    messages = tuple(Message(one["role"], one["content"]) for one in row["messages"])
    return Conversation(row["id"], row["source"], messages)
