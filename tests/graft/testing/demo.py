"""Writes a tiny target and a tiny drafter of every kind, and prints how each is started.

    make demo-checkpoints            # into demo/

The weights are random, so the text is gibberish and few guesses are right; what can be seen is
that every kind loads, drafts and leaves the text as it was.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graft.testing.adapters import write_adapter
from graft.testing.checkpoints import write_eagle, write_eagle3
from graft.testing.dflash_checkpoints import write_dflash
from graft.testing.models import write_tiny_model
from graft.testing.mtp_checkpoints import write_mtp

TARGET = "target"
# Settings that `graft up` has flags for; it takes the others as variables.
_FLAGS = ("enable_multi_layer_eagle",)


@dataclass(frozen=True, slots=True)
class Demo:
    """One drafter.

    name: says which; its checkpoint lies in a folder of that name, below the demo's.
    words: of --proposers, the served one first; {} stands for the demo's folder.
    write: makes the checkpoint, given folder and target; None where another demo's is used.
    settings: further ones of the draft service.
    """

    name: str
    words: tuple[str, ...]
    write: Callable[[Path, Path], Path] | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def proposer(self) -> str:
        """Its name in a tier."""
        return self.words[0].partition("=")[0]

    def flags(self, folder: Path) -> dict[str, Any]:
        """Settings of a draft service that serves it, checkpoints being below `folder`."""
        words = [word.format(folder) for word in self.words]
        return {"proposers": words, "model": str(folder / TARGET), **self.settings}

    def command(self, folder: Path) -> str:
        """What a shell is told."""
        flags = self.flags(folder)
        words = ["graft up --model", flags["model"], "--proposers", ",".join(flags["proposers"])]
        for setting, value in self.settings.items():
            if setting in _FLAGS:
                words.append(f"--{setting.replace('_', '-')}")
            else:
                words.insert(0, f"GRAFT_DRAFT_{setting.upper()}={value}")
        return " ".join(words)


DEMOS = (
    Demo("ngram", ("ngram",)),
    Demo(
        "standalone",
        ("standalone={}/standalone",),
        lambda f, t: write_tiny_model(f, layers=1, seed=5),
    ),
    Demo("eagle", ("eagle={}/eagle",), lambda f, t: write_eagle(f, t)),
    Demo("eagle3", ("eagle3={}/eagle3",), lambda f, t: write_eagle3(f, t)),
    Demo(
        "eagle3-speculators",
        ("eagle3={}/eagle3-speculators",),
        lambda f, t: write_eagle3(f, t, "speculators"),
    ),
    Demo("mtp", ("mtp={}/mtp",), lambda f, t: write_mtp(f, t)),
    Demo(
        "mtp-multi-layer",
        ("mtp={}/mtp-multi-layer",),
        lambda f, t: write_mtp(f, t, "mimo_v2", steps=3),
        {"enable_multi_layer_eagle": True},
    ),
    Demo("dflash", ("dflash={}/dflash",), lambda f, t: write_dflash(f, t)),
    Demo("uno", ("uno={}/uno",), lambda f, t: write_adapter(f, t)),
    Demo(
        "uno-tree",
        ("uno={}/uno",),
        settings={"num_steps": 4, "eagle_topk": 3, "num_draft_tokens": 9},
    ),
    Demo("merged", ("merged=eagle3+ngram", "eagle3={}/eagle3")),
)


def write_checkpoints(folder: Path, target: Path) -> None:
    """Every checkpoint of the demos below `folder`, for `target`."""
    for demo in DEMOS:
        if demo.write is not None:
            demo.write(folder / demo.name, target)


def write_demo(folder: Path) -> list[str]:
    """Writes target and checkpoints below `folder`; returns one command for each drafter."""
    write_checkpoints(folder, write_tiny_model(folder / TARGET, layers=6))
    return [demo.command(folder) for demo in DEMOS]


def main() -> None:
    """Writes to the folder named on the command line, demo/ by default."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "demo")
    print("\n".join(write_demo(folder)))


if __name__ == "__main__":
    main()
