"""The `graft` command. Knows the names of the commands; each one is imported only when it runs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="graft",
    help="Speculative decoding served by three small services.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

_COMMANDS = {
    "up": "Serve on this machine: starts and supervises verify, draft and gateway.",
    "gateway": "Run the gateway alone.",
    "verify": "Run one verify replica alone.",
    "draft": "Run one draft replica alone.",
    "chat": "Chat with a running gateway in the terminal.",
    "complete": "Complete one prompt at a running gateway.",
    "inspect": "Show the tree of each round of an answer.",
    "bench": "Measure: texts, load, rounds, peers and the cost of a forward.",
    "sim": "Compare tier policies over simulated workloads, on a virtual clock.",
    "train": "Train a drafter for a target on the target's own answers.",
    "models": "List, fetch and check models on this machine.",
    "flags": "Say what the speculative flags of SGLang and vLLM are called here.",
    "doctor": "Say what this machine has and what is missing.",
    "health": "Exit 0 when a service is serving, 1 when it is not.",
}
_MODULES = {"gateway": "service", "verify": "service", "draft": "service", "flags": "flag_table"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command; an error of Graft is one line on stderr and exit code 2."""
    from graft.common.errors import GraftError

    try:
        app(args=None if arguments is None else list(arguments), prog_name="graft")
    except GraftError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        from importlib.metadata import version as version_of

        print(f"graft {version_of('graft-serve')}")
        raise typer.Exit


def _register(name: str, about: str) -> None:
    """Adds a command that hands all its words to `graft.cli.<module>.command(name)`."""

    def run(context: typer.Context) -> Any:
        module = importlib.import_module(f"graft.cli.{_MODULES.get(name, name)}")
        command = typer.main.get_command(module.command(name))
        return command(list(context.args), prog_name=f"graft {name}")

    app.command(
        name,
        help=about,
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True},
    )(run)


for _name, _about in _COMMANDS.items():
    _register(_name, _about)


if __name__ == "__main__":
    main()
