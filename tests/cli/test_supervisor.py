"""Real child processes, small ones: started, watched, started again, and ended in order."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from graft.cli.screen import Screen
from graft.cli.supervisor import ChildFailed, ChildSpec, Supervisor, last_error

_DEADLINE_S = 30.0

SERVES = """
import os, signal, sys
mark = sys.argv[1]
def leave(*_):
    os.remove(mark)
    with open(os.path.dirname(mark) + "/ended", "a") as ended:
        ended.write(os.path.basename(mark) + "\\n")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
open(mark, "w").write(str(os.getpid()))
while True:
    signal.pause()
"""

PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", sys.argv[1]])
time.sleep(60)
"""

CHILD = """
import os, time
from graft.cli.child import end_with_parent
end_with_parent(os.getppid())
print("running", flush=True)
time.sleep(60)
"""


class Heard(Screen):
    """A screen that keeps what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []
        self.lines: list[str] = []
        self.changed = asyncio.Event()

    def note(self, text: str, style: str = "") -> None:
        self.notes.append(text)
        self.changed.set()

    def log(self, name: str, line: str) -> None:
        self.lines.append(line)
        self.changed.set()

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(_DEADLINE_S):
            while not true():
                self.changed.clear()
                await self.changed.wait()


def serving(folder: Path, name: str, *, essential: bool = True) -> ChildSpec:
    """A child that serves as long as its mark lies in `folder`."""
    mark = folder / name
    return ChildSpec(
        name=name,
        command=(sys.executable, "-c", SERVES, str(mark)),
        environment={},
        address="127.0.0.1:7",
        trouble=lambda: None if alive(mark) else "not there",
        essential=essential,
    )


def failing(name: str, code: int, says: str, *, essential: bool = True) -> ChildSpec:
    """A child that writes a line and ends."""
    script = f"import sys; print({says!r}, file=sys.stderr); sys.exit({code})"
    command = (sys.executable, "-c", script)
    return ChildSpec(name, command, {}, "127.0.0.1:7", lambda: "not there", essential)


def alive(mark: Path) -> bool:
    try:
        os.kill(int(mark.read_text()), 0)
    except (OSError, ValueError):
        return False
    return True


@asynccontextmanager
async def supervised(*specs: ChildSpec) -> AsyncIterator[tuple[Heard, asyncio.Task[None]]]:
    """A running supervisor, ready; ended by SIGTERM to this process when the block ends."""
    screen, ready = Heard(), asyncio.Event()
    supervisor = Supervisor(specs, screen, drain_s=5.0)
    running = asyncio.create_task(supervisor.run(ready.set))
    try:
        async with asyncio.timeout(_DEADLINE_S):
            await ready.wait()
        yield screen, running
    finally:
        if not running.done():
            os.kill(os.getpid(), signal.SIGTERM)
        await asyncio.wait([running], timeout=_DEADLINE_S)


async def test_children_end_last_first_and_the_run_ends_well(tmp_path: Path) -> None:
    names = ("one", "two", "three")
    async with supervised(*(serving(tmp_path, name) for name in names)) as (_, running):
        pass
    await running
    assert (tmp_path / "ended").read_text().split() == ["three", "two", "one"]


async def test_a_second_signal_ends_what_is_still_draining(tmp_path: Path) -> None:
    drains = "import signal; signal.signal(signal.SIGTERM, lambda *_: None)\n" + SERVES.replace(
        "signal.signal(signal.SIGTERM, leave)", ""
    )
    mark = tmp_path / "one"
    spec = replace(serving(tmp_path, "one"), command=(sys.executable, "-c", drains, str(mark)))
    async with supervised(spec) as (screen, running):
        os.kill(os.getpid(), signal.SIGINT)
        await screen.until(lambda: any("again to end now" in note for note in screen.notes))
        os.kill(os.getpid(), signal.SIGINT)
        await running
    assert screen.notes[-1] == "one was ended at once"


async def test_a_killed_child_is_started_again_and_said_so(tmp_path: Path) -> None:
    async with supervised(serving(tmp_path, "one"), serving(tmp_path, "two")) as (screen, running):
        first = int((tmp_path / "two").read_text())
        os.kill(first, signal.SIGKILL)
        await screen.until(lambda: any("two is back" in note for note in screen.notes))
        assert int((tmp_path / "two").read_text()) != first
        assert "(signal SIGKILL); starting it again on 127.0.0.1:7" in screen.notes[0]
    await running


async def test_a_child_that_refuses_its_settings_ends_all_with_its_last_error(
    tmp_path: Path,
) -> None:
    specs = [serving(tmp_path, "one"), failing("two", 2, "error: no such model")]
    with pytest.raises(ChildFailed, match=r"two: it refused to start .*: no such model"):
        await Supervisor(specs, Heard(), drain_s=5.0).run(lambda: None)
    assert not alive(tmp_path / "one")


async def test_a_child_that_keeps_dying_is_given_up(tmp_path: Path) -> None:
    specs = [failing("one", 1, "out of luck")]
    with pytest.raises(ChildFailed, match=r"one: it died 5 times in a row .*: out of luck"):
        await Supervisor(specs, Heard(), drain_s=5.0).run(lambda: None)


async def test_a_child_that_is_not_essential_is_never_given_up_while_the_rest_works(
    tmp_path: Path,
) -> None:
    (tmp_path / "once").touch()
    script = (
        f"import os, sys, time; once = {str(tmp_path / 'once')!r}\n"
        "if not os.path.exists(once): sys.exit('broken')\n"
        "os.remove(once); time.sleep(0.5); sys.exit('broken')\n"
    )
    began = [False]

    def trouble() -> str | None:
        began[0] = began[0] or not (tmp_path / "once").exists()
        return None if began[0] and not (tmp_path / "again").exists() else "not there"

    spec = ChildSpec("two", (sys.executable, "-c", script), {}, "127.0.0.1:7", trouble, False)
    async with supervised(serving(tmp_path, "one"), spec) as (screen, running):
        (tmp_path / "again").touch()
        await screen.until(lambda: any("serving without it" in note for note in screen.notes))
        assert not running.done()
        assert alive(tmp_path / "one")
    await running


async def test_what_children_write_is_shown(tmp_path: Path) -> None:
    screen = Heard()
    with pytest.raises(ChildFailed):
        await Supervisor([failing("one", 2, "hello")], screen, drain_s=5.0).run(lambda: None)
    assert screen.lines == ["hello"]


async def test_a_child_ends_when_its_parent_is_killed() -> None:
    parent = await asyncio.create_subprocess_exec(
        sys.executable, "-c", PARENT, CHILD, stdout=asyncio.subprocess.PIPE
    )
    assert parent.stdout is not None
    async with asyncio.timeout(_DEADLINE_S):
        assert await parent.stdout.readline() == b"running\n"
        parent.kill()
        # The child holds the other end of the pipe: it is closed when the child is gone.
        assert await parent.stdout.read() == b""
        await parent.wait()


def test_the_last_error_is_the_line_that_says_why() -> None:
    record = '{"event": "cannot load", "level": "error", "service": "verify"}'
    assert last_error(["error: no such file", "bye"]) == "no such file"
    assert last_error([record, '{"event": "stopped", "level": "info"}']) == "cannot load"
    assert last_error(["Traceback", "ValueError: x"]) == "ValueError: x"
    assert last_error([]) == "it wrote nothing"
