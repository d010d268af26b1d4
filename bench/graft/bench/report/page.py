"""What a measurement came to, as values: facts, tables and plots. Knows no file and no screen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

Cell: TypeAlias = str | float | int | None


@dataclass(frozen=True, slots=True)
class Table:
    """Rows under named columns; every row is as long as the columns."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


@dataclass(frozen=True, slots=True)
class Lines:
    """A plot of named curves, each a list of (x, y)."""

    title: str
    x_label: str
    y_label: str
    curves: Mapping[str, Sequence[tuple[float, float]]]


@dataclass(frozen=True, slots=True)
class Bars:
    """A plot of one bar a name, each a stack of named parts; a plain bar has one part."""

    title: str
    unit: str
    bars: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class Page:
    """One run of one tool. name: of its files. answer: the JSON object; tables go to CSV."""

    name: str
    title: str
    answer: Mapping[str, Any]
    facts: Mapping[str, str] = field(default_factory=dict)
    tables: Sequence[Table] = ()
    plots: Sequence[Lines | Bars] = ()
    notes: Sequence[str] = ()
