"""Writes what `graft sim` found as a table and a plot. Knows its JSON object; runs nothing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graft.bench.report.page import Bars
from graft.bench.report.svg import standalone

_HEAD = (
    "workload",
    "plain",
    "best fixed tier",
    "field",
    "goodput",
    "of best",
    "worst 5 s, mean of seeds",
    "of the worst seed",
    "seeds never below 0.97",
    "switches a minute",
    "tries a minute",
)


def write(folder: Path, body: Mapping[str, Any]) -> list[Path]:
    """Puts tiers.md and tiers.svg into a folder, which is made; the files."""
    folder.mkdir(parents=True, exist_ok=True)
    table, plot = folder / "tiers.md", folder / "tiers.svg"
    table.write_text(markdown(body), encoding="utf-8")
    plot.write_text(standalone(bars(body)), encoding="utf-8")
    return [table, plot]


def markdown(body: Mapping[str, Any]) -> str:
    """A row for each workload; worst stretches and switches are those of goodput / field."""
    lines = ["| " + " | ".join(_HEAD) + " |", "|---" * len(_HEAD) + "|"]
    for name, one in body["workloads"].items():
        best, ours, theirs = one["best_fixed"], one["goodput"], one["field"]
        cells = [
            name,
            f"{one['plain']:.1f}",
            f"{best['tokens_per_s']:.1f} ({best['tier']})",
            f"{theirs['tokens_per_s']:.1f}",
            f"{ours['tokens_per_s']:.1f}",
            f"{one['goodput_of_best_fixed']:.3f}",
            _both(one, "worst_5s_of_plain_mean_of_seeds", ".3f"),
            _both(one, "worst_5s_of_plain", ".3f"),
            _both(one, "share_of_seeds_never_below", ".1%"),
            _both(one, "switches_per_minute", ".1f"),
            f"{ours['probes_per_minute']:.1f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def bars(body: Mapping[str, Any]) -> Bars:
    """Both policies by workload, as a share of the best fixed tier."""
    found: dict[str, Mapping[str, float]] = {}
    for name, one in body["workloads"].items():
        found[name] = {"goodput": one["goodput_of_best_fixed"]}
        found[f"{name}, field"] = {"field": one["field_of_best_fixed"]}
    return Bars("Tokens a second, as a share of the best fixed tier", "of best", found)


def _both(one: Mapping[str, Any], key: str, form: str) -> str:
    return f"{one['goodput'][key]:{form}} / {one['field'][key]:{form}}"
