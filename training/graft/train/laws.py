"""The target's law of every row, made once: its likeliest columns of the draft vocabulary.

A law is head(final norm(last state)), cut to the columns of the draft vocabulary. Kept as k
columns and their masses it costs 4 k bytes a row, and epochs pay nothing for it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

NUM_CELLS = 32
_CHUNK = 1024


@dataclass(frozen=True, slots=True, eq=False)
class LawTable:
    """columns: [rows, k], int16 or int32. masses: [rows, k], float16, likeliest first."""

    columns: Tensor
    masses: Tensor

    def save(self, path: Path) -> None:
        """Writes a file that appears whole or not at all."""
        partial = path.with_name(path.name + ".tmp")
        save_file({"columns": self.columns, "masses": self.masses}, partial)
        partial.replace(path)


def load_laws(path: Path) -> LawTable:
    """What `LawTable.save` wrote."""
    stored = load_file(path)
    return LawTable(stored["columns"], stored["masses"])


@dataclass(frozen=True, slots=True, eq=False)
class LawMaker:
    """final_norm: [hidden]. head: [draft vocab, hidden], rows of the target's head."""

    final_norm: Tensor
    head: Tensor
    eps: float

    def of(self, states: Tensor) -> LawTable:
        """The laws of [rows, hidden] last states."""
        kind = torch.int16 if len(self.head) <= torch.iinfo(torch.int16).max else torch.int32
        count = min(NUM_CELLS, len(self.head) - 1)
        columns, masses = [], []
        for part in states.split(_CHUNK):
            normed = functional.rms_norm(part, part.shape[-1:], self.final_norm, self.eps)
            top = (normed @ self.head.T).softmax(-1).topk(count)
            columns.append(top.indices.to(kind))
            masses.append(top.values.half())
        return LawTable(torch.cat(columns), torch.cat(masses))

    def of_all(self, sequences: Iterable[Tensor]) -> LawTable:
        """The laws of many sequences' last states, one after another."""
        tables, waiting, count = [], [], 0
        for states in sequences:
            waiting.append(states)
            count += len(states)
            if count >= _CHUNK:
                tables.append(self.of(torch.cat(waiting)))
                waiting, count = [], 0
        if waiting:
            tables.append(self.of(torch.cat(waiting)))
        return LawTable(
            torch.cat([table.columns for table in tables]),
            torch.cat([table.masses for table in tables]),
        )
