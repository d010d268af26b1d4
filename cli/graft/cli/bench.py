"""`graft bench`: measurements against a running gateway. Knows screens, not how to measure."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from graft.bench import parity, prompts

Url = Annotated[str, typer.Option(help="Base URL of the gateway.")]
Limit = Annotated[int | None, typer.Option(min=1, help="Questions taken, spread over the file.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Tokens of an answer.")]
Concurrency = Annotated[int, typer.Option(min=1, help="Questions asked at a time.")]
ApiKey = Annotated[str | None, typer.Option(envvar="GRAFT_API_KEY", help="Key of the gateway.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object last.")]


def command(_name: str) -> typer.Typer:
    """The group of commands."""
    app = typer.Typer(
        help="Measure a running gateway.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )
    app.callback()(_group)
    app.command("parity", help="Ask with speculation on and off; exit 1 when a text differs.")(
        _parity
    )
    return app


def _group() -> None:
    """Keeps `parity` a subcommand while it is the only one."""


def _parity(
    url: Url = "http://127.0.0.1:8000",
    prompts_file: Annotated[
        Path | None,
        typer.Option("--prompts", help="JSON lines with `turns` or `prompt`; ours by default."),
    ] = None,
    limit: Limit = None,
    max_tokens: MaxTokens = 64,
    concurrency: Concurrency = 1,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    questions = prompts.read(prompts_file, limit)
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("equal so far", total=len(questions) * len(parity.LAWS))
        report = asyncio.run(
            parity.run(
                url,
                questions,
                max_tokens=max_tokens,
                concurrency=concurrency,
                api_key=api_key,
                on_pair=lambda _pair: progress.advance(task),
            )
        )
    for pair in report.pairs:
        if not pair.equal:
            place = f"character {pair.first_difference}"
            print(f"differs at {place}: T={pair.law.temperature:g} {pair.prompt.text[:60]!r}")
    print(
        f"{report.num_equal} of {len(report.pairs)} texts equal with speculation on and off, "
        f"accept length {report.accept_length:.2f}"
    )
    if as_json:
        print(json.dumps(report.as_json()))
    if report.num_equal < len(report.pairs):
        sys.exit(1)
