"""Writes a page as JSON, CSV and one HTML file that needs nothing else. Knows no measurement."""

from __future__ import annotations

import csv
import json
from html import escape
from pathlib import Path

from graft.bench.report.page import Cell, Page, Table
from graft.bench.report.svg import draw
from graft.common.errors import InvalidArgument

_STYLE = """
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;
color:#0f172a;background:#fff}h1{font-size:1.5rem}h2{font-size:1.1rem;margin-top:2rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
td,th{padding:.25rem .75rem;border-bottom:1px solid #cbd5e1;text-align:right}
td:first-child,th:first-child{text-align:left}dl{display:grid;grid-template-columns:auto 1fr;
gap:.1rem 1rem}dt{color:#64748b}dd{margin:0}svg{width:100%;max-width:40rem;font:12px system-ui}
svg text{fill:#334155}svg .rule{stroke:#e2e8f0}
@media(prefers-color-scheme:dark){body{color:#e2e8f0;background:#0f172a}
td,th{border-color:#334155}svg text{fill:#cbd5e1}svg .rule{stroke:#1e293b}}
"""


def write(page: Page, folder: Path) -> list[Path]:
    """Writes NAME.json, NAME.csv (NAME-2.csv and so on for further tables) and NAME.html.

    Raises:
        InvalidArgument: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        written = [folder / f"{page.name}.json"]
        written[0].write_text(
            json.dumps({**page.answer, "facts": dict(page.facts)}, indent=2) + "\n"
        )
        for number, table in enumerate(page.tables, 1):
            suffix = "" if number == 1 else f"-{number}"
            written.append(folder / f"{page.name}{suffix}.csv")
            _write_csv(table, written[-1])
        written.append(folder / f"{page.name}.html")
        written[-1].write_text(html_of(page), encoding="utf-8")
    except OSError as error:
        raise InvalidArgument(f"cannot write reports to {folder}: {error.strerror}") from None
    return written


def html_of(page: Page) -> str:
    """The whole page; it loads nothing from anywhere."""
    parts = [f"<h1>{escape(page.title)}</h1>", _facts(page)]
    parts += [f"<p>{escape(note)}</p>" for note in page.notes]
    for plot in page.plots:
        parts.append(f"<h2>{escape(plot.title)}</h2>{draw(plot)}")
    parts += [_table(table) for table in page.tables]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(page.title)}</title><style>{_STYLE}</style></head>"
        f"<body>{''.join(parts)}</body></html>\n"
    )


def _facts(page: Page) -> str:
    rows = (f"<dt>{escape(name)}</dt><dd>{escape(fact)}</dd>" for name, fact in page.facts.items())
    return f"<dl>{''.join(rows)}</dl>"


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = (
        f"<tr>{''.join(f'<td>{escape(shown(cell))}</td>' for cell in row)}</tr>"
        for row in table.rows
    )
    return (
        f"<h2>{escape(table.title)}</h2><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{''.join(rows)}</tbody></table>"
    )


def shown(cell: Cell) -> str:
    """A cell as people read it; nothing is a dash."""
    if cell is None:
        return "-"
    return f"{cell:.4g}" if isinstance(cell, float) else str(cell)


def _write_csv(table: Table, path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(table.columns)
        writer.writerows(table.rows)
