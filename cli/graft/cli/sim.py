"""`graft sim`: tier policies over simulated workloads. Knows flags and screens; decides nothing."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from graft.common.errors import InvalidArgument

if TYPE_CHECKING:
    from graft.sim.compare import Compared


def command(_name: str) -> typer.Typer:
    """The command."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(run)
    return app


def run(
    seeds: Annotated[int, typer.Option(min=1, help="Runs of every workload and policy.")] = 200,
    workload: Annotated[
        list[str] | None, typer.Option(help="Only this workload; may be repeated.")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write a table and a plot into this folder.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object last.")] = False,
) -> None:
    """Tokens a second of plain decoding, every fixed tier and both policies, by workload.

    Two hundred seeds take some minutes on one core.
    """
    from graft.cli.sim_report import write
    from graft.sim.compare import WINDOW_S, compare_all
    from graft.sim.workloads import UNSEEN, WORKLOADS

    names = workload or []
    known = [one.name for one in WORKLOADS + UNSEEN]
    unknown = [name for name in names if name not in known]
    if unknown:
        raise InvalidArgument(
            f"there is no workload {unknown[0]!r}, only {', '.join(known)}", field="workload"
        )
    screen = Console(stderr=True)
    began = time.perf_counter()

    def told(done: Compared) -> None:
        screen.print(f"{done.workload.name}: done after {time.perf_counter() - began:.0f} s")

    compared = compare_all(seeds, names, told)
    screen.print(_table(compared, WINDOW_S))
    body = {
        "seeds": seeds,
        "seconds": round(time.perf_counter() - began, 1),
        "window_s": WINDOW_S,
        "workloads": {one.workload.name: one.as_body() for one in compared},
    }
    if report is not None:
        for path in write(report, body):
            screen.print(f"wrote {path}")
    if as_json:
        print(json.dumps(body), flush=True)


def _table(compared: Sequence[Compared], window_s: float) -> Table:
    table = Table(title="tokens a second")
    for name in ("workload", "plain", "best fixed tier", "", "field", "goodput"):
        table.add_column(name)
    for name in ("of best", f"worst {window_s:g} s of plain", "switches/min", "tries/min"):
        table.add_column(name, justify="right")
    for one in compared:
        tier, rate = one.best_fixed
        ours = one.goodput
        table.add_row(
            one.workload.name,
            f"{one.plain:.1f}",
            tier,
            f"{rate:.1f}",
            f"{one.field.goodput:.1f}",
            f"{ours.goodput:.1f}",
            f"{one.of_best_fixed:.3f}",
            f"{ours.worst_window:.3f}",
            f"{ours.switches_per_minute:.1f}",
            f"{ours.probes_per_minute:.1f}",
        )
    return table
