"""What verifying N nodes costs: milliseconds of a target forward against its rows.

A forward is one tree of N nodes behind a cached context, all layers and the logits of every row.
Precisions, row counts and readings of the memory bandwidth take turns, so that a busy moment hits
all of them; medians are reported.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graft.bench.limits import Limits
from graft.bench.parts import Part
from graft.bench.parts import measure as parts_of
from graft.bench.report.page import Bars, Cell, Lines, Page, Table
from graft.bench.step import binary_tree, random_cache, tree_step
from graft.kernels.ops import Ops, select
from graft.models.load import Target, load_target, read_config
from graft.models.storage import Precision, resolve_for, storage_of

ROWS = (1, 2, 4, 8, 16, 32)
CONTEXT = 256
PART_ROWS = (1, 8)


@dataclass(frozen=True, slots=True)
class Costs:
    """One precision. milliseconds, least: medians and minima by row count.

    num_bytes: weights and cached keys that every forward reads. row_flop: products and sums of the
    weights for one row; 0 where they are not of float32.
    """

    precision: str
    held_as: str
    num_bytes: int
    row_flop: int
    milliseconds: dict[int, float]
    least: dict[int, float]


@dataclass(frozen=True, slots=True)
class VerifyCost:
    """One run, beside the best readings of memory bandwidth and float32 products in it.

    parts: precision, rows, and the parts of such a forward.
    """

    stream_gb_s: float
    fp32_gflop_s: float
    costs: tuple[Costs, ...]
    parts: tuple[tuple[str, int, tuple[Part, ...]], ...] = ()

    def bound_ms(self, cost: Costs, rows: int) -> float:
        """No forward of so many rows can be faster here: bytes over bandwidth, FLOP over peak."""
        streaming = cost.num_bytes / self.stream_gb_s
        return max(streaming, rows * cost.row_flop / self.fp32_gflop_s) / 1e6

    def as_json(self) -> dict[str, Any]:
        """One object for machines."""
        found: dict[str, Any] = {"stream_gb_s": round(self.stream_gb_s, 2)}
        for cost in self.costs:
            found[cost.precision] = {
                str(rows): round(ms, 3) for rows, ms in cost.milliseconds.items()
            }
        return found

    def page(self, facts: dict[str, str]) -> Page:
        """The report: a table and a curve a precision, with its bound beside it."""
        lines: list[list[Cell]] = []
        curves: dict[str, list[tuple[float, float]]] = {}
        for cost in self.costs:
            alone = cost.milliseconds[min(cost.milliseconds)]
            for rows, ms in cost.milliseconds.items():
                bound = self.bound_ms(cost, rows)
                least = cost.least[rows]
                values = (ms, ms / alone, least, bound, bound / least)
                head = (cost.precision, cost.held_as, rows)
                lines.append([*head, *(round(one, 3) for one in values)])
                curves.setdefault(cost.precision, []).append((float(rows), ms))
                curves.setdefault(f"{cost.precision} bound", []).append((float(rows), bound))
        columns = (
            "precision",
            "held as",
            "rows",
            "ms",
            "times 1 row",
            "least ms",
            "bound ms",
            "bound / least",
        )
        limits = {
            "streaming bandwidth": f"{self.stream_gb_s:.1f} GB/s",
            "float32 products": f"{self.fp32_gflop_s:.0f} GFLOP/s",
        }
        return Page(
            "verify-cost",
            "Cost of a target forward against its rows",
            self.as_json(),
            {**facts, **limits},
            [Table("Medians and bounds", columns, lines), self._parts()],
            [
                Lines("Milliseconds against rows", "rows", "ms", curves),
                Bars(
                    "Parts of a forward",
                    "ms",
                    {
                        f"{precision}, {_rows(rows)}": {
                            one.name: one.seconds * 1e3 for one in parts
                        }
                        for precision, rows, parts in self.parts
                    },
                ),
            ],
        )

    def _parts(self) -> Table:
        return Table(
            "Parts of a forward, the fastest of each",
            ("precision", "rows", "part", "ms", "GB/s"),
            [
                (
                    precision,
                    rows,
                    part.name,
                    round(part.seconds * 1e3, 3),
                    round(part.num_bytes / part.seconds / 1e9, 2) if part.num_bytes else None,
                )
                for precision, rows, parts in self.parts
                for part in parts
            ],
        )


def run(
    model: str,
    precisions: Sequence[Precision],
    *,
    threads: int,
    rounds: int = 9,
    rows: Sequence[int] = ROWS,
    context: int = CONTEXT,
    on_round: Callable[[], None] | None = None,
) -> VerifyCost:
    """Loads the model once a precision and measures all of them side by side.

    Raises:
        GraftError: the model cannot be loaded so.
    """
    ops = select("cpu", threads)
    torch.set_num_threads(threads)
    targets = [_load(model, ops, precision, context + max(rows)) for precision in precisions]
    forwards = [[_forward(target, count, context) for count in rows] for target, _ in targets]
    limits = Limits(ops)
    times: list[list[list[float]]] = [[[] for _ in rows] for _ in targets]
    with torch.inference_mode():
        for number in range(rounds + 1):
            limits.measure()
            for place, column in enumerate(forwards):
                column[0]()  # whoever comes after others' weights meets cold pages and caches
                for index, forward in enumerate(column):
                    seconds = _seconds(forward)
                    if number:  # the first round warms up
                        times[place][index].append(seconds)
            if on_round is not None:
                on_round()
    costs = []
    for precision, (target, num_bytes), measured in zip(precisions, targets, times, strict=True):
        taken = dict(zip(rows, measured, strict=True))
        found = {count: statistics.median(seconds) * 1e3 for count, seconds in taken.items()}
        least = {count: min(seconds) * 1e3 for count, seconds in taken.items()}
        floats = target.precision == Precision.FP32
        row_flop = num_bytes // 2 if floats else 0  # two operations for four bytes
        kv_bytes = context * 8 * target.config.num_layers * target.config.kv_width
        costs.append(
            Costs(precision.value, target.precision, num_bytes + kv_bytes, row_flop, found, least)
        )
    parts = [
        (precision.value, count, tuple(parts_of(target, count, context, rounds)))
        for precision, (target, _) in zip(precisions, targets, strict=True)
        for count in rows
        if count in PART_ROWS
    ]
    return VerifyCost(limits.stream_gb_s, limits.fp32_gflop_s, tuple(costs), tuple(parts))


def _rows(count: int) -> str:
    return "1 row" if count == 1 else f"{count} rows"


def _load(model: str, ops: Ops, precision: Precision, context: int) -> tuple[Target, int]:
    files = resolve_for(model, precision)
    config = read_config(files)
    storage = storage_of(files, config, precision)
    target = load_target(files, ops, None, min(context, config.context_length), storage)
    return target, storage.num_bytes(ops.keeps_blocks)


def _forward(target: Target, num_rows: int, context: int) -> Callable[[], object]:
    tree = binary_tree(num_rows, num_rows, target.vocab_size)
    tokens, rows, num_slots = tree_step([tree], context)
    kv, decoder = random_cache(target.config, num_slots), target.decoder
    return lambda: decoder.logits(decoder.forward(tokens, rows, kv, None))


def _seconds(part: Callable[[], object]) -> float:
    start = time.perf_counter()
    part()
    return time.perf_counter() - start
