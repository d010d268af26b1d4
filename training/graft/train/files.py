"""Files of a run that are whole or absent: written beside their name, then renamed.

Knows JSON and paths; knows no meaning of what is written.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def write_whole(path: Path, content: bytes) -> None:
    """Readers see the old file or the new one, also after a kill."""
    beside = path.with_name(path.name + ".tmp")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def json_bytes(value: Any) -> bytes:
    """One object, indented, equal for equal values."""
    return (json.dumps(value, indent=1, ensure_ascii=False, sort_keys=True) + "\n").encode()


def lines_bytes(rows: Iterable[Any]) -> bytes:
    """JSON lines, equal for equal rows."""
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows).encode()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON-lines file; empty lines are skipped."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def digest_of(value: Any) -> str:
    """Hex digest of a JSON value."""
    return hashlib.sha256(json_bytes(value)).hexdigest()


def number_of(*names: object) -> int:
    """64 bits that depend on nothing but the names."""
    line = "\0".join(map(str, names)).encode()
    return int.from_bytes(hashlib.blake2b(line, digest_size=8).digest(), "little")
