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

from graft.bench.bandwidth import Stream
from graft.bench.report.page import Lines, Page, Table
from graft.bench.step import binary_tree, random_cache, tree_step
from graft.kernels.ops import Ops, select
from graft.models.load import Target, load_target, read_config
from graft.models.storage import Precision, resolve_for, storage_of

ROWS = (1, 2, 4, 8, 16, 32)
CONTEXT = 256


@dataclass(frozen=True, slots=True)
class Costs:
    """Medians. milliseconds: of each row count; weight_bytes: read by every forward."""

    precision: str
    held_as: str
    weight_bytes: int
    milliseconds: dict[int, float]

    def gb_s(self, rows: int) -> float:
        """Weights streamed a second."""
        return self.weight_bytes / self.milliseconds[rows] / 1e6


@dataclass(frozen=True, slots=True)
class VerifyCost:
    """One run. stream_gb_s: the best reading of the memory bandwidth."""

    stream_gb_s: float
    costs: tuple[Costs, ...]

    def as_json(self) -> dict[str, Any]:
        """One object for machines."""
        found: dict[str, Any] = {"stream_gb_s": round(self.stream_gb_s, 2)}
        for cost in self.costs:
            found[cost.precision] = {
                str(rows): round(ms, 3) for rows, ms in cost.milliseconds.items()
            }
        return found

    def page(self, facts: dict[str, str]) -> Page:
        """The report: a table and a curve a precision."""
        lines = [
            (
                cost.precision,
                cost.held_as,
                rows,
                round(ms, 3),
                round(ms / cost.milliseconds[min(cost.milliseconds)], 3),
                round(cost.gb_s(rows), 2),
                round(cost.gb_s(rows) / self.stream_gb_s, 3),
            )
            for cost in self.costs
            for rows, ms in cost.milliseconds.items()
        ]
        columns = ("precision", "held as", "rows", "ms", "times 1 row", "GB/s", "of the stream")
        curves = {
            cost.precision: [(float(rows), ms) for rows, ms in cost.milliseconds.items()]
            for cost in self.costs
        }
        return Page(
            "verify-cost",
            "Cost of a target forward against its rows",
            self.as_json(),
            {**facts, "streaming bandwidth": f"{self.stream_gb_s:.1f} GB/s"},
            [Table("Medians", columns, lines)],
            [Lines("Milliseconds against rows", "rows", "ms", curves)],
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
    stream = Stream()
    times: list[list[list[float]]] = [[[] for _ in rows] for _ in targets]
    with torch.inference_mode():
        for number in range(rounds + 1):
            stream.measure()
            for place, column in enumerate(forwards):
                for index, forward in enumerate(column):
                    seconds = _seconds(forward)
                    if number:  # the first round warms up
                        times[place][index].append(seconds)
            if on_round is not None:
                on_round()
    costs = tuple(
        Costs(
            precision.value,
            target.precision,
            weight_bytes,
            {
                count: statistics.median(found) * 1e3
                for count, found in zip(rows, column, strict=True)
            },
        )
        for precision, (target, weight_bytes), column in zip(
            precisions, targets, times, strict=True
        )
    )
    return VerifyCost(stream.best_gb_s, costs)


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
