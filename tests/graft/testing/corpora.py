"""Corpora that tiny targets write, and a teller that stops them. Knows folders, checks nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from graft.testing.models import write_tiny_model
from graft.train.author import Desk
from graft.train.make_corpus import CorpusOrder

ROWS = [
    {"prompt": "What is a tree?"},
    {"turns": ["Name a river.", "And another."]},
    {"question": "Why is the sky blue?"},
    {"prompt": "Translate German to English: Der Hund schläft."},
    {"prompt": "Add two and three."},
    {"opening": "Tell me about", "weight": 2},
    {"opening": "Passage 1:", "closing": "\n\nWhat does it say?", "max_tokens": 30},
]


class Stopped(Exception):
    """What a `Recorder` raises in place of a kill."""


@dataclass
class Recorder:
    """Notes what a stage tells; stops it at the `stop_at`-th advance, 0 never."""

    stop_at: int = 0
    begun: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    advances: int = 0

    def begin(self, what: str, total: float, done: float) -> None:
        """Notes it."""
        self.begun.append(f"{what} {done:g}/{total:g}")

    def advance(self, units: float, note: str) -> None:
        """Counts it, and stops when it is time."""
        self.advances += 1
        if self.advances == self.stop_at:
            raise Stopped

    def say(self, line: str) -> None:
        """Notes it."""
        self.lines.append(line)


def tiny_target(folder: Path) -> Path:
    """A tiny model, where there is none yet."""
    if not (folder / "config.json").exists():
        write_tiny_model(folder, layers=6)
    return folder


def corpus_order(
    folder: Path, out: str, *, sessions: int = 4, synth: int = 9, tokens: int = 0, seed: int = 3
) -> CorpusOrder:
    """A small corpus in `folder / out`; the target lies beside it."""
    target = tiny_target(folder / "target")
    prompts = folder / "rows.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return CorpusOrder(
        out=folder / out,
        desk=Desk(str(target), "fp32", 1, sessions, kv_tokens=4096),
        prompts=(prompts,),
        synth=synth,
        seed=seed,
        tokens=tokens,
        answer_tokens=12,
        max_prompt_tokens=200,
        shard_prompts=4,
        held=0.25,
        draft_vocab=64,
    )


def corpus_bytes(folder: Path) -> dict[str, bytes]:
    """Every file of a corpus."""
    return {path.name: path.read_bytes() for path in sorted((folder / "corpus").iterdir())}
