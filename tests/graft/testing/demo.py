"""Writes a tiny target and a tiny drafter of every kind, and prints how each is started.

    make demo-checkpoints            # into demo/

The weights are random, so the text is gibberish and few guesses are right; what can be seen is
that every kind loads, drafts and leaves the text as it was.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from graft.testing.adapters import write_adapter
from graft.testing.checkpoints import write_eagle, write_eagle3
from graft.testing.dflash_checkpoints import write_dflash
from graft.testing.models import write_tiny_model
from graft.testing.mtp_checkpoints import write_mtp

TARGET = "target"


@dataclass(frozen=True, slots=True)
class Demo:
    """One drafter. folder: below the demo's; write: makes it, given folder and target.

    flags: further words of its command.
    """

    proposer: str
    folder: str
    write: Callable[[Path, Path], Path]
    flags: tuple[str, ...] = ()


DEMOS = (
    Demo("standalone", "standalone", lambda f, t: write_tiny_model(f, layers=1, seed=5)),
    Demo("eagle", "eagle", lambda f, t: write_eagle(f, t)),
    Demo("eagle3", "eagle3", lambda f, t: write_eagle3(f, t)),
    Demo("eagle3", "eagle3-speculators", lambda f, t: write_eagle3(f, t, "speculators")),
    Demo("mtp", "mtp", lambda f, t: write_mtp(f, t)),
    Demo(
        "mtp",
        "mtp-multi-layer",
        lambda f, t: write_mtp(f, t, "mimo_v2", steps=3),
        ("--enable-multi-layer-eagle",),
    ),
    Demo("dflash", "dflash", lambda f, t: write_dflash(f, t)),
    Demo("uno", "uno", lambda f, t: write_adapter(f, t)),
)


def write_demo(folder: Path) -> list[str]:
    """Writes everything below `folder`; returns one command for each drafter."""
    target = write_tiny_model(folder / TARGET, layers=6)
    commands = []
    for demo in DEMOS:
        path = demo.write(folder / demo.folder, target)
        words = ["graft up --model", str(target), "--proposers", f"{demo.proposer}={path}"]
        commands.append(" ".join([*words, *demo.flags]))
    return commands


def main() -> None:
    """Writes to the folder named on the command line, demo/ by default."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "demo")
    print("\n".join(write_demo(folder)))


if __name__ == "__main__":
    main()
