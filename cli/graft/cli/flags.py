"""Turns the fields of a settings class into command-line flags. Knows no service."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union

import typer
from pydantic.fields import FieldInfo

from graft.common.config import Settings

S = TypeVar("S", bound=Settings)

_METAVARS = {int: "INTEGER", float: "NUMBER", str: "TEXT", Path: "PATH", bool: ""}
_EPILOG = (
    "A flag that is not given is looked for in {prefix}<NAME>, then in section "
    "'{section}' of the file named by --config."
)


def command_of(settings: type[S], run: Callable[[S, Path | None], None], about: str) -> typer.Typer:
    """A one-command app whose flags are the fields of `settings`.

    `run` gets the loaded settings and the path given with --config.
    """

    def called(config: str | None = None, **flags: Any) -> None:
        file = Path(config) if config else None
        run(settings.load(file, given(settings, flags)), file)

    options = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=_option(name, field)
        )
        for name, field in settings.listed().items()
    ]
    file_option = Annotated[
        str | None, typer.Option("--config", metavar="FILE", help="YAML file of settings.")
    ]
    options.append(
        inspect.Parameter(
            "config", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=file_option
        )
    )
    called.__signature__ = inspect.Signature(options)  # type: ignore[attr-defined]
    called.__annotations__ = {option.name: option.annotation for option in options}
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    epilog = _EPILOG.format(prefix=settings.prefix(), section=settings.section)
    app.command(help=about, epilog=epilog)(called)
    return app


def given(settings: type[Settings], flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags that were given; the words of a list may be repeated or joined by commas."""
    values: dict[str, Any] = {}
    for name, value in flags.items():
        if value is None or value == []:
            continue
        if is_list(settings.model_fields[name]):
            value = [part.strip() for word in value for part in word.split(",") if part.strip()]
        values[name] = value
    return values


def arguments_of(values: Mapping[str, Any]) -> list[str]:
    """The words that give `values` on the command line of the same settings class."""
    words: list[str] = []
    for name, value in values.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list | tuple):
            words.append(f"--{flag}={','.join(str(part) for part in value)}")
        else:
            words.append(f"--{flag}={value}")
    return words


def is_list(field: FieldInfo) -> bool:
    """True for a field that holds several values."""
    return typing.get_origin(_bare(field.annotation)) in (list, tuple, set, frozenset)


def _option(name: str, field: FieldInfo) -> Any:
    flag = name.replace("_", "-")
    bare = _bare(field.annotation)
    text = _help(field)
    if bare is bool:
        return Annotated[bool | None, typer.Option(f"--{flag}/--no-{flag}", help=text)]
    if is_list(field):
        return Annotated[
            list[str] | None, typer.Option(f"--{flag}", metavar="TEXT[,TEXT...]", help=text)
        ]
    return Annotated[str | None, typer.Option(f"--{flag}", metavar=_metavar(bare), help=text)]


def _metavar(bare: Any) -> str:
    if typing.get_origin(bare) is Literal:
        return "|".join(str(choice) for choice in typing.get_args(bare))
    if isinstance(bare, type) and issubclass(bare, int) and bare is not int:
        return "TEXT"
    return _METAVARS.get(bare, "TEXT")


def _help(field: FieldInfo) -> str:
    text = field.description or ""
    default = field.get_default(call_default_factory=True)
    if default is None or default == "" or isinstance(default, type(...)):
        return text
    if isinstance(default, list | tuple):
        if not default:
            return text
        default = ",".join(str(part) for part in default)
    if isinstance(default, bool):
        default = "on" if default else "off"
    return f"{text} [default: {default}]".strip()


def _bare(annotation: Any) -> Any:
    """The annotation without `| None` and without Annotated."""
    if typing.get_origin(annotation) is Annotated:
        return _bare(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (Union, types.UnionType):
        rest = [part for part in typing.get_args(annotation) if part is not type(None)]
        return _bare(rest[0]) if len(rest) == 1 else annotation
    return annotation
