"""`graft models card`: a trained drafter with its card, ready to be published or shipped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from graft.common.errors import InvalidArgument
from graft.common.model_files import EMBEDDED


def run_card(
    run: Annotated[Path, typer.Argument(help="Folder of a drafter that `graft train` made.")],
    out: Annotated[
        Path, typer.Argument(help="Folder for checkpoint and card, TARGET/PROPOSER by custom.")
    ],
    results: Annotated[
        Path | None, typer.Option(help="What `graft bench acceptance --json` printed last.")
    ] = None,
    model: Annotated[str, typer.Option(help="The target it was trained for.")] = EMBEDDED,
    note: Annotated[list[str] | None, typer.Option(help="A paragraph for the end.")] = None,
) -> None:
    """Copy a trained drafter and write its card: data, training, loss curves, results.

    Beside OUT goes target.json, which says whose drafters they are.
    """
    from graft.bench.card import Card, read_run, write_card
    from graft.draft.checkpoints.check import kind_of
    from graft.draft.shipped import TARGET_FILE, identity_of

    proposer = kind_of(str(run)).value
    found: dict[str, Any] = {} if results is None else _results(results, proposer)
    identity = identity_of(model)
    card = Card(proposer, identity["names"][0], read_run(run), found, note or ())
    for path in write_card(card, out):
        print(f"wrote {path}")
    target = out.resolve().parent / TARGET_FILE
    target.write_text(json.dumps(identity, indent=2) + "\n", encoding="utf-8")
    print(f"wrote {target}")


def _results(path: Path, proposer: str) -> dict[str, Any]:
    """The drafter's part of the last line that is an object."""
    try:
        lines = path.read_text(encoding="utf-8").strip()
        whole = json.loads(lines if lines.startswith("{\n") else lines.splitlines()[-1])
        found: dict[str, Any] = whole[proposer]
    except (OSError, ValueError, IndexError, KeyError, TypeError):
        raise InvalidArgument(
            f"{path} holds no results of {proposer}, expected what"
            " graft bench acceptance --json prints",
            field="results",
        ) from None
    if "absent" in found:
        raise InvalidArgument(
            f"{path}: {proposer} was left out: {found['absent']}", field="results"
        )
    return found
