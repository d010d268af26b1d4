"""What the commands of `graft bench` share: their flags, progress, and how they end.

Knows screens and pages; knows no measurement.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table as ScreenTable

from graft.bench import machine
from graft.bench.report.files import shown, write
from graft.bench.report.page import Page

Url = Annotated[str, typer.Option(help="Base URL of the gateway.", envvar="GRAFT_URL")]
Model = Annotated[str, typer.Option(help="Embedded name, Hugging Face id, folder or GGUF file.")]
Prompts = Annotated[
    Path | None,
    typer.Option("--prompts", help="JSON lines with `turns` or `prompt`; ours by default."),
]
Limit = Annotated[int | None, typer.Option(min=1, help="Questions taken, spread over the file.")]
MaxTokens = Annotated[int, typer.Option(min=1, help="Tokens of an answer.")]
Temperature = Annotated[float, typer.Option(min=0.0, help="Temperature; 0 is greedy.")]
Seed = Annotated[int, typer.Option(min=0, help="Seed of the answers.")]
Threads = Annotated[int, typer.Option(min=0, help="Threads of a target; 0 takes all cores.")]
ApiKey = Annotated[str | None, typer.Option(envvar="GRAFT_API_KEY", help="Key of the gateway.")]
Config = Annotated[
    Path | None, typer.Option(help="YAML file of settings for the services that are started.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object last.")]
Report = Annotated[
    Path | None, typer.Option(help="Folder for the JSON, CSV and HTML files of the run.")
]

console = Console(stderr=True)


@contextmanager
def progress_of(what: str, total: int) -> Iterator[Callable[[], None]]:
    """A progress bar on stderr; the function moves it by one."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)


def say(what: str, _share: float) -> None:
    """A line about what is being prepared."""
    console.print(f"{what} ...", highlight=False)


def facts(more: dict[str, str]) -> dict[str, str]:
    """The head of a report, taken before the run; warns when the machine is busy."""
    if warning := machine.busy_sentence():
        console.print(f"warning: {warning}", highlight=False)
    return machine.facts(more)


def finish(page: Page, report: Path | None, as_json: bool, tables: int = 1) -> None:
    """Prints the first tables of a page and its notes, writes its files, and the JSON last."""
    if warning := machine.busy_sentence():
        page = replace(page, facts={**page.facts, "after the run": warning})
    screen = Console(highlight=False, soft_wrap=True)
    for table in page.tables[:tables]:
        drawn = ScreenTable(*table.columns, title=table.title)
        for row in table.rows:
            drawn.add_row(*map(shown, row))
        screen.print(drawn)
    for note in page.notes:
        screen.print(note, markup=False)
    if report is not None:
        for path in write(page, report):
            console.print(f"wrote {path}", highlight=False)
    if as_json:
        print_json(page.answer)


def print_json(answer: Any) -> None:
    """One object on one line."""
    print(json.dumps(answer), flush=True)
