"""`graft gateway`, `graft verify` and `graft draft`: one service in this process."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import typer

from graft.cli.flags import command_of
from graft.common.config import Settings
from graft.common.errors import InvalidArgument

_ABOUT = {
    "gateway": "Run the gateway: the REST and gRPC surface for clients. It loads no model.",
    "verify": "Run one verify replica: the target model and the only truth about tokens.",
    "draft": "Run one draft replica: it guesses the next tokens for verify replicas.",
}
_EXTRAS = {"gateway": "gateway", "verify": "worker", "draft": "worker"}


def command(name: str) -> typer.Typer:
    """The command of one service, with the flags of its settings class."""

    def run(settings: Settings, _config: Path | None) -> None:
        main = _imported(name, "main")
        main.run(settings)

    return command_of(settings_of(name), run, _ABOUT[name])


def settings_of(name: str) -> type[Settings]:
    """The settings class of a service."""
    for value in vars(_imported(name, "settings")).values():
        if isinstance(value, type) and issubclass(value, Settings) and value.section == name:
            return value
    raise LookupError(f"graft.{name}.settings has no settings of section {name}")


def _imported(name: str, module: str) -> ModuleType:
    try:
        return importlib.import_module(f"graft.{name}.{module}")
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("graft."):
            raise
        raise InvalidArgument(
            f"graft {name} needs the package {error.name}, which is not installed: "
            f"pip install 'graft-serve[{_EXTRAS[name]}]'"
        ) from error
