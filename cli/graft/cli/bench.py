"""`graft bench`: the group of measurements. Knows their names; each one is in its own file."""

from __future__ import annotations

from collections.abc import Callable

import typer

from graft.cli.bench_acceptance import run_acceptance
from graft.cli.bench_compare import run_compare
from graft.cli.bench_cost import run_rounds, run_verify_cost
from graft.cli.bench_distance import run_distance
from graft.cli.bench_load import run_parity, run_serve
from graft.cli.bench_tiers import run_tiers

_COMMANDS: dict[str, Callable[..., None]] = {
    "parity": run_parity,
    "serve": run_serve,
    "rounds": run_rounds,
    "acceptance": run_acceptance,
    "compare": run_compare,
    "verify-cost": run_verify_cost,
    "distance": run_distance,
    "tiers": run_tiers,
}


def command(_name: str) -> typer.Typer:
    """The group of commands."""
    app = typer.Typer(
        help="Measure: texts, load, rounds, drafters, peers and the cost of a forward.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    for name, run in _COMMANDS.items():
        app.command(name)(run)
    return app
