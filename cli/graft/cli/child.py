"""A child of `graft up`: runs the given graft command and ends when its parent does."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """`python -m graft.cli.child PARENT_PID NICE COMMAND ...`"""
    parent, niceness, *arguments = sys.argv[1:]
    end_with_parent(int(parent))
    if int(niceness):
        os.nice(int(niceness))
    from graft.cli.main import main as graft

    graft(arguments)


def child_command(niceness: int, words: Sequence[str]) -> tuple[str, ...]:
    """The command that runs `graft WORDS` as a child of this process."""
    parent = str(os.getpid())
    return (sys.executable, "-m", "graft.cli.child", parent, str(niceness), *words)


def end_with_parent(parent: int) -> None:
    """Asks the kernel for SIGTERM when the parent ends, where the kernel knows how."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(0)


if __name__ == "__main__":
    main()
