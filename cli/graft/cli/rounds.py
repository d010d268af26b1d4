"""Rounds of an answer in the terminal, and the file of them that the page can open.

Knows the `speculation_trace` objects of the gateway; knows no request.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from rich.text import Text
from rich.tree import Tree

from graft.cli.answer import STYLES, printable

FORMAT = "graft-recording-1"
_STAGES = {
    "draft": "draft",
    "tree_wait": "wait",
    "queue": "queue",
    "forward": "forward",
    "choice": "choice",
}

Round = Mapping[str, Any]


@dataclass(slots=True)
class Recording:
    """What came of one request."""

    words: str
    model: str
    parameters: Mapping[str, Any]
    tokens: list[dict[str, Any]] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)
    finish: str | None = None
    metrics: Mapping[str, Any] | None = None

    def take(self, chunk: Mapping[str, Any]) -> list[Round]:
        """Adds a chunk of the stream; returns the rounds that came with it."""
        if chunk.get("metrics"):
            self.metrics = chunk["metrics"].get("speculative_decoding")
        came: list[Round] = []
        for choice in chunk.get("choices") or []:
            came += choice.get("speculation_trace") or []
            at = (came or self.rounds or [{"at_ms": 0}])[-1]["at_ms"]
            for text, origin in zip(
                choice.get("token_texts") or [], choice.get("token_origins") or [], strict=True
            ):
                self.tokens.append({"text": text, "origin": origin, "at_ms": at})
            self.finish = choice.get("finish_reason") or self.finish
        self.rounds += came
        return came

    def as_body(self) -> dict[str, Any]:
        """The recording as the page saves and opens it."""
        return {
            "format": FORMAT,
            "created": datetime.now(UTC).isoformat(),
            "words": self.words,
            "model": self.model,
            "parameters": dict(self.parameters),
            "tokens": self.tokens,
            "rounds": self.rounds,
            "finish": self.finish,
            "metrics": self.metrics,
        }


def round_view(one: Round) -> Tree:
    """One round: what it came to, where its time went, and its tree with the accepted path."""
    view = Tree(_headline(one), guide_style="dim")
    view.add(Text(_times(one["timing_us"]), style="dim"))
    if one.get("tree"):
        _grow(view, one)
    return view


def totals(rounds: Sequence[Round]) -> list[str]:
    """The whole answer in a few lines."""
    after = [one for one in rounds if one["plain_reason"] != "prefill"]
    tokens = sum(len(one["tokens"]) for one in after)
    drafted = sum(one["num_drafted"] for one in after)
    accepted = sum(one["num_accepted"] for one in after)
    lines = [f"{tokens + len(rounds) - len(after)} tokens in {len(after)} rounds"]
    if after:
        lines[0] += f", {tokens / len(after):.2f} a round"
    if drafted:
        share = accepted / drafted
        lines.append(f"{accepted} of {drafted} drafted tokens accepted ({share:.0%})")
        lines.append(f"acceptance by depth: {_by_depth(after)}")
    reasons = Counter(str(one["plain_reason"]) for one in after if one["plain_reason"])
    if reasons:
        words = ", ".join(f"{name} {count}" for name, count in reasons.most_common())
        lines.append(f"rounds without a tree: {words}")
    micros: Counter[str] = Counter()
    for one in after:
        micros.update(one["timing_us"])
    lines.append(f"time: {_times(micros)}")
    return lines


def _headline(one: Round) -> Text:
    name = "prompt" if one["plain_reason"] == "prefill" else f"round {one['round']}"
    line = Text(f"{name}  ", style="bold")
    own = len(one["tokens"]) - one["num_accepted"]
    if one["plain_reason"]:
        line.append(f"no tree ({one['plain_reason']})", style="dim")
    else:
        line.append(f"{one['num_accepted']} of {one['num_drafted']} accepted, {own} of its own")
    for place, text in enumerate(one["texts"]):
        line.append(" " if place else "  ")
        line.append(_quoted(text), style=STYLES[_origin(one, place)])
    return line


def _origin(one: Round, place: int) -> str:
    if place < one["num_accepted"]:
        return "accepted"
    return "bonus" if one["num_drafted"] else "plain"


def _grow(view: Tree, one: Round) -> None:
    """Adds the nodes below one another; the target's own token stands last, where it was said."""
    tree = one["tree"]
    path = set(tree["accepted"])
    branches = [view.add(Text(_quoted(tree["texts"][0]), style="bold"))]
    for node, parent in enumerate(tree["parents"][1:], 1):
        taken = node in path
        label = Text("✓ " if taken else "✕ ", style=STYLES["accepted"] if taken else "dim")
        label.append(f"{_quoted(tree['texts'][node])} {tree['probabilities'][node]:.0%}")
        branches.append(branches[parent].add(label))
    if len(one["tokens"]) > one["num_accepted"]:
        last = max(path, default=0)
        own = f"+ {_quoted(one['texts'][-1])} {tree['bonus_probability']:.0%}"
        branches[last].add(Text(own, style=STYLES[_origin(one, one["num_accepted"])]))


def _times(micros: Mapping[str, int]) -> str:
    return ", ".join(f"{word} {micros[name] / 1000:.1f} ms" for name, word in _STAGES.items())


def _by_depth(rounds: Sequence[Round]) -> str:
    offered: Counter[int] = Counter()
    accepted: Counter[int] = Counter()
    for one in rounds:
        depth = [0]
        for parent in one["tree"]["parents"][1:] if one.get("tree") else ():
            depth.append(depth[parent] + 1)
        offered.update(range(1, max(depth) + 1))
        accepted.update(range(1, one["num_accepted"] + 1))
    return ", ".join(f"{depth}: {accepted[depth] / offered[depth]:.0%}" for depth in offered)


def _quoted(text: str) -> str:
    return repr(printable(text))
