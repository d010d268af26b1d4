"""What `graft up` shows: progress, notes, the children's log lines. Decides nothing."""

from __future__ import annotations

import json
import re
import sys
import time
from typing import Any

from rich.console import Console
from rich.status import Status
from rich.text import Text

_STYLES = {"debug": "dim", "info": "", "warning": "yellow", "error": "red", "critical": "red"}
_ENVELOPE = ("event", "level", "timestamp", "service", "part", "exception")
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


class Screen:
    """Progress and notes on stderr, the ready line on stdout; one line each off a terminal."""

    def __init__(self) -> None:
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._status: Status | None = None
        self._states: dict[str, str] = {}
        self._began = time.monotonic()

    def state(self, name: str, state: str) -> None:
        """Shows what a child is doing now."""
        if self._states.get(name) == state:
            return
        self._states[name] = state
        if not self._console.is_terminal:
            self._console.print(Text(f"{name}: {state}"))
            return
        line = ", ".join(f"{child}: {now}" for child, now in self._states.items())
        if self._status is None:
            self._status = self._console.status(Text(line))
            self._status.start()
        self._status.update(Text(line))

    def ready(self, line: str, example: str) -> None:
        """Ends the progress with the one line that says where it serves."""
        self._quiet()
        out = Console(highlight=False, soft_wrap=True)
        out.print(Text(f"{line} after {time.monotonic() - self._began:.1f} s", style="bold green"))
        out.print(Text(f"try: {example}"))
        sys.stdout.flush()

    def note(self, text: str, style: str = "") -> None:
        """One event of `graft up` itself."""
        self._console.print(Text(text, style=style))

    def log(self, name: str, line: str) -> None:
        """One line that a child wrote."""
        record = _record(line)
        if record is None:
            self._console.print(Text(f"{name} | {line}", style="dim"))
            return
        fields = " ".join(f"{key}={value}" for key, value in record.items() if key not in _ENVELOPE)
        text = f"{name} | {record['event']} {fields}".rstrip()
        self._console.print(Text(text, style=_STYLES.get(str(record.get("level")), "")))
        if record.get("exception"):
            self._console.print(Text(str(record["exception"]), style="dim"))

    def close(self) -> None:
        """Ends the progress line, if one is still shown."""
        self._quiet()

    def _quiet(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None


def plain(line: str) -> str:
    """A child's line as a sentence: the event of a log record, without colours."""
    record = _record(line)
    if record is None:
        return _COLOURS.sub("", line).strip()
    detail = str(record.get("exception") or "").strip().splitlines()
    return f"{record['event']}: {detail[-1]}" if detail else str(record["event"])


def is_error(line: str) -> bool:
    """True for the one line of a refused start, and for a log record of level error."""
    record = _record(line)
    if record is None:
        return line.startswith("error: ")
    return record.get("level") in ("error", "critical")


def _record(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "event" in record else None
