"""What a training run is told once and never changes: the target, the budgets, the seeds.

Knows no file of a run; the parts of the pipeline read what they need from here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TrainSettings:
    """The answers to the flags of `graft train`."""

    target: str
    out: Path
    proposer: str = "eagle3"
    seed: int = 0
    threads: int = 1
