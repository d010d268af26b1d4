"""Draws the curves of a training run from its log. Knows the log's lines; knows no network."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from graft.bench.report.files import write
from graft.bench.report.page import Lines, Page

_MOST_POINTS = 60


def draw_training(folder: Path) -> list[Path]:
    """Writes training.html, .json and .csv beside `folder`'s metrics.jsonl.

    Raises:
        InvalidArgument: the folder cannot be written.
    """
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    steps = [row for row in rows if not row["held"]]
    held = [row for row in rows if row["held"]]
    plots = [
        Lines("Loss", "step", "loss", {"training": _smoothed(steps, "loss")}),
        Lines("Agreement with the target, training", "step", "share", _family(steps, "agree_")),
    ]
    if held:
        plots += [
            Lines("Agreement with the target, held out", "step", "share", _family(held, "agree_")),
            Lines(
                "Accept length of chains, held out",
                "step",
                "tokens a round",
                {"T = 0": [(row["step"], row["chain"]) for row in held if "chain" in row]},
            ),
        ]
    answer = {"steps": len(steps), "held": held[-1] if held else None}
    return write(Page("training", f"Training of {folder.name}", answer, plots=plots), folder)


def _family(rows: list[dict[str, Any]], prefix: str) -> dict[str, list[tuple[float, float]]]:
    names = [name for name in rows[-1] if name.startswith(prefix)] if rows else []
    return {name.replace("agree_", "token "): _smoothed(rows, name) for name in names}


def _smoothed(rows: list[dict[str, Any]], name: str) -> list[tuple[float, float]]:
    """Means of equal parts, so that a long run stays readable."""
    size = -(-len(rows) // _MOST_POINTS)
    parts = [rows[start : start + size] for start in range(0, len(rows), size or 1)]
    return [
        (float(part[-1]["step"]), sum(row.get(name, 0.0) for row in part) / len(part))
        for part in parts
    ]
