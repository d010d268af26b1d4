"""`graft flags`: prints what the flags of other servers are called here. Knows only the map."""

from __future__ import annotations

from typing import Annotated

import typer

from graft.cli.flag_map import ROWS, Origin, Row, Verdict
from graft.common.errors import InvalidArgument

_HEAD = """\
# Flags of other servers

What the speculative flags of SGLang and vLLM are called in Graft. This page is generated:
`graft flags --markdown > docs/flag-map.md` writes it, and `graft flags WORD` looks flags up.

- **honoured**: a setting of Graft does the same. `draft.num_steps` is `--num-steps` of
  `graft draft`, `GRAFT_DRAFT_NUM_STEPS`, or `draft: {num_steps: 5}` in the file of `--config`.
  `graft up` reads the variables and the file for all its services, and takes the flags that
  `graft up --help` lists.
- **refused**: Graft does not do this, and has no setting for it.
- **inactive**: nothing is lost without it: Graft always does this, does it in another way, or has
  nothing that it could switch.

The services know their own names only. Any other flag, `GRAFT_DRAFT_*` variable or key of the
section `draft` is an error at start, and so with verify and gateway. Variables of other servers
are not read.
"""


def command(_name: str) -> typer.Typer:
    """The command."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

    @app.command(help="Say what the speculative flags of SGLang and vLLM are called here.")
    def flags(
        word: Annotated[str, typer.Argument(help="Part of a flag or setting; all if absent.")] = "",
        markdown: Annotated[
            bool, typer.Option("--markdown", help="Write all of docs/flag-map.md.")
        ] = False,
    ) -> None:
        if markdown:
            print(page(), end="")
            return
        for row in find(word):
            print(f"{row.name}\n    {row.answer}")

    return app


def find(word: str) -> list[Row]:
    """The rows whose flag or setting holds `word`; hyphens and underscores are one.

    Raises:
        InvalidArgument: there is none.
    """
    wanted = _plain(word.split("=")[0])
    found = [row for row in ROWS if wanted in _plain(f"{row.name} {row.setting}")]
    if not found:
        raise InvalidArgument(f"no flag or setting in the list holds {word!r}", field="word")
    return found


def page() -> str:
    """All of docs/flag-map.md."""
    parts = [_HEAD]
    for origin in Origin:
        lines = [f"## {origin.value}", "", "| there | here |", "|---|---|"]
        lines += [f"| `{row.name}` | {_cell(row)} |" for row in ROWS if row.origin is origin]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _cell(row: Row) -> str:
    """The answer, with the setting in code type."""
    if row.verdict is not Verdict.HONOURED:
        return row.answer
    return row.answer.replace(row.setting, f"`{row.setting}`", 1)


def _plain(text: str) -> str:
    return text.casefold().replace("-", "_").strip("_ ")
