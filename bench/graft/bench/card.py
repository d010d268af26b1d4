"""The card of a trained drafter: what it was made of, how its loss fell, and what it comes to.

Reads a run of `graft train` and the object of `graft bench acceptance`; writes beside a copy of the
checkpoint card.json for programs, README.md for people and two plots. Trains and measures nothing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graft.bench.report.page import Bars, Lines
from graft.bench.report.svg import standalone
from graft.common.errors import InvalidArgument
from graft.common.model_files import read_json

CHECKPOINT_FILES = ("config.json", "model.safetensors")
CARD_FILE = "card.json"
_MOST_POINTS = 60
_SKIPPED = ("step", "held", "rows_per_s", "gradient")


@dataclass(frozen=True, slots=True)
class Run:
    """A trained drafter. steps: lines of training; looks: lines of held-out text."""

    folder: Path
    steps: tuple[Mapping[str, Any], ...]
    looks: tuple[Mapping[str, Any], ...]
    training: Mapping[str, Any]
    corpus: Mapping[str, Any]

    @property
    def num_steps(self) -> int:
        """Steps of the optimizer."""
        return int(self.steps[-1]["step"]) if self.steps else 0


@dataclass(frozen=True, slots=True)
class Card:
    """All that a card says. results: the part of `graft bench acceptance` about this drafter."""

    proposer: str
    target: str
    run: Run
    results: Mapping[str, Any]
    notes: Sequence[str] = ()

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "proposer": self.proposer,
            "target": self.target,
            "results": dict(self.results),
            "training": {"steps": self.run.num_steps, **self.run.training},
            "corpus": dict(self.run.corpus),
            "bytes": (self.run.folder / "model.safetensors").stat().st_size,
        }


def read_run(folder: Path) -> Run:
    """The run in a folder of `graft train`, its corpus beside or within it.

    Raises:
        InvalidArgument: there is no checkpoint.
    """
    for name in CHECKPOINT_FILES:
        if not (folder / name).is_file():
            raise InvalidArgument(f"{folder} has no {name}, expected a run of graft train")
    lines = _lines(folder / "metrics.jsonl")
    corpus = next(
        (one for one in (folder / "corpus", folder.parent / "corpus") if one.is_dir()), None
    )
    steps = tuple(line for line in lines if not line.get("held"))
    return Run(
        folder,
        steps,
        tuple(line for line in lines if line.get("held")),
        _training(folder / "plan.json", steps),
        {} if corpus is None else _corpus(corpus),
    )


def write_card(card: Card, out: Path) -> list[Path]:
    """The checkpoint and its card in `out`; what was there under these names is replaced.

    Raises:
        InvalidArgument: the folder cannot be written.
    """
    plots = {"loss.svg": loss_plot(card.run), "acceptance.svg": acceptance_plot(card)}
    texts = {
        CARD_FILE: json.dumps(card.as_json(), indent=2) + "\n",
        "README.md": page(card, [name for name, plot in plots.items() if plot is not None]),
        **{name: standalone(plot) for name, plot in plots.items() if plot is not None},
    }
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in CHECKPOINT_FILES:
            if (card.run.folder / name).resolve() != (out / name).resolve():
                shutil.copyfile(card.run.folder / name, out / name)
        for name, text in texts.items():
            (out / name).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"cannot write the card to {out}: {error.strerror}") from None
    return [out / name for name in (*CHECKPOINT_FILES, *texts)]


def loss_plot(run: Run) -> Lines | None:
    """The loss over steps, thinned by means, and that of held-out text where it was logged."""
    curves = {"training": _thinned([(line["step"], line["loss"]) for line in run.steps])}
    looked = [(line["step"], line["loss"]) for line in run.looks if "loss" in line]
    if looked:
        curves["held out"] = looked
    if not curves["training"]:
        return None
    return Lines("Loss", "step", "loss", curves)


def acceptance_plot(card: Card) -> Bars | None:
    """Accept length of each way."""
    ways = ways_of(card.results)
    if not ways:
        return None
    return Bars("Accept length", "tokens/round", {way: {"": v} for way, v in ways.items()})


def ways_of(results: Mapping[str, Any]) -> dict[str, float]:
    """Accept lengths by way; what else a result holds is left out."""
    return {way: float(one) for way, one in results.items() if isinstance(one, int | float)}


def page(card: Card, plots: Sequence[str]) -> str:
    """The card as Markdown."""
    spread = card.results.get("spread") or {}
    lines = [
        f"# {card.proposer} for {card.target}",
        "",
        f"A drafter for speculative decoding with {card.target}, trained by `graft train` on the"
        " target's own answers. It proposes tokens; the target decides, so texts are the target's"
        " with or without it.",
        "",
        f"    graft up --model {card.target} --proposers {card.proposer}",
        "",
        *_table(
            "What it accepts",
            ("way", "tokens a round", "+-"),
            [
                (f"`{way}`", f"{length:.2f}", f"{spread[way]:.2f}" if way in spread else "")
                for way, length in ways_of(card.results).items()
            ],
        ),
        *_positions(card.results.get("per_position") or []),
        *_facts("Data", card.run.corpus),
        *_facts("Training", {"steps": card.run.num_steps, **card.run.training}),
        *_table(
            "On held-out conversations of the corpus",
            ("figure", "at the first look", "at the last"),
            _figures(card.run.looks),
        ),
    ]
    for name in plots:
        lines += [f"![{name.removesuffix('.svg')}]({name})", ""]
    for note in card.notes:
        lines += [note, ""]
    return "\n".join(lines).rstrip() + "\n"


def _positions(shares: Sequence[float]) -> list[str]:
    before = [1.0, *shares]
    rows = [
        (f"{place + 1}", f"{share:.1%}", f"{share / above:.1%}" if above else "")
        for place, (share, above) in enumerate(zip(shares, before, strict=False))
    ]
    columns = ("drafted token", "accepted", "where all before were")
    return _table("By position", columns, rows)


def _figures(looks: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    if not looks:
        return []
    first, last = looks[0], looks[-1]
    return [
        (name, f"{first[name]:.3f}" if name in first else "", f"{value:.3f}")
        for name, value in last.items()
        if name not in _SKIPPED and isinstance(value, float)
    ]


def _facts(title: str, facts: Mapping[str, Any]) -> list[str]:
    rows = [(name.replace("_", " "), _shown(value)) for name, value in facts.items()]
    return _table(title, ("", ""), rows)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    if not rows:
        return []
    return [
        f"## {title}",
        "",
        f"| {' | '.join(columns)} |",
        f"|{'---|' * len(columns)}",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
    ]


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)


def _training(plan_file: Path, steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the run was told, how many rows it learnt at, and how long that took at its speed."""
    if not plan_file.is_file():
        return {}
    plan = read_json(plan_file)
    wanted = ("seed", "window", "windows", "accumulate", "rate", "half")
    found = {key: plan[key] for key in wanted if key in plan}
    rows = plan["steps"] * plan["accumulate"] * plan["window"] * plan["windows"]
    found |= {"rows": rows, "times_through_the_corpus": round(rows / plan["rows"], 2)}
    if steps and steps[-1].get("rows_per_s"):
        found["minutes"] = round(rows / float(steps[-1]["rows_per_s"]) / 60, 1)
    return found


def _corpus(folder: Path) -> dict[str, Any]:
    """Counts over the answers, and what the plan and the draft vocabulary say."""
    rows = [line for path in sorted(folder.glob("answers-*.jsonl")) for line in _lines(path)]
    tokens = sum(len(row["tokens"]) for row in rows)
    answers = tokens - sum(int(row["prompt_len"]) for row in rows)
    found: dict[str, Any] = {
        "conversations": len(rows),
        "tokens": tokens,
        "tokens_of_answers": answers,
        "share_written_greedily": round(
            sum(row["temperature"] == 0 for row in rows) / max(1, len(rows)), 3
        ),
    }
    plan = folder / "plan.json"
    if plan.is_file():
        wanted = ("precision", "layers", "prompts", "synth", "seed", "held")
        found |= {key: value for key, value in read_json(plan).items() if key in wanted}
    vocabulary = folder / "draft_vocab.json"
    if vocabulary.is_file():
        content = read_json(vocabulary)
        found["draft_vocabulary"] = len(content["ids"])
        found["share_of_answers_in_it"] = content["coverage"]
    return found


def _thinned(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most _MOST_POINTS points, each the mean of as many neighbours."""
    size = -(-len(points) // _MOST_POINTS) or 1
    groups = [points[start : start + size] for start in range(0, len(points), size)]
    return [
        (sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group))
        for group in groups
    ]


def _lines(path: Path) -> list[dict[str, Any]]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]
