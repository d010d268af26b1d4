"""`graft up`: the three services on this machine, as supervised child processes."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import typer

from graft.cli.flags import command_of
from graft.cli.models import is_here
from graft.cli.plan import Plan, UpSettings, make_plan
from graft.cli.screen import Screen
from graft.cli.supervisor import Supervisor

_ABOUT = (
    "Serve on this machine: starts verify, draft and gateway as child processes, starts them "
    "again when they die, and ends them in order on Ctrl-C."
)


def command(_name: str) -> typer.Typer:
    """The command, with the flags of UpSettings."""
    return command_of(UpSettings, run, _ABOUT)


def run(settings: UpSettings, config: Path | None) -> None:
    """Checks everything first, then serves until SIGINT or SIGTERM."""
    plan = make_plan(settings, config)
    fetch(plan.model)
    screen = Screen()
    if plan.drafter:
        screen.note(
            f"drafts with {plan.drafter}, which comes with Graft for this model;"
            " --no-trained-drafter takes ngram"
        )
    supervisor = Supervisor(plan.children, screen, drain_s=plan.drain_s)
    asyncio.run(supervisor.run(lambda: screen.ready(*ready_lines(plan, settings))))


def fetch(model: str) -> None:
    """Prepares a model that is not here yet, in a process of its own that gives its memory back."""
    if is_here(model):
        return
    done = subprocess.run(
        [sys.executable, "-m", "graft.cli.main", "models", "fetch", model],
        stdout=subprocess.DEVNULL,
        check=False,
    )
    if done.returncode:
        sys.exit(done.returncode)


def ready_lines(plan: Plan, settings: UpSettings) -> tuple[str, str]:
    """The line that says where it serves, and a curl command to try."""
    how = settings.speculation or "auto"
    if not settings.draft:
        how = "off"
    body = {
        "model": plan.served_name,
        "stream": True,
        "messages": [{"role": "user", "content": "Say hello in five words."}],
    }
    example = (
        f"curl -N {plan.url}/v1/chat/completions -H 'content-type: application/json' "
        f"-d '{json.dumps(body)}'"
    )
    return f"ready on {plan.url} serving {plan.served_name}, speculation {how},", example
