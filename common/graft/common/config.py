"""Settings: flag > GRAFT_* variable > YAML file > default, read once at start and frozen.

A field may name variables of other programs, such as OTEL_*; they stand in for its default.
"""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from graft.common.errors import InvalidArgument


class Settings(BaseSettings):
    """Base of each service's settings. `section` names its part of the file and its prefix."""

    section: ClassVar[str] = ""
    model_config = SettingsConfigDict(frozen=True, extra="forbid", case_sensitive=False)

    @classmethod
    def prefix(cls) -> str:
        """The prefix of the service's variables, for example ``GRAFT_VERIFY_``."""
        return f"GRAFT_{cls.section.upper()}_"

    @classmethod
    def listed(cls) -> dict[str, FieldInfo]:
        """All fields, as they are shown: a class's own before those of its bases."""
        found: dict[str, FieldInfo] = {}
        for part in cls.__mro__:
            own = inspect.get_annotations(part)
            found |= {name: cls.model_fields[name] for name in own if name in cls.model_fields}
        return found

    @classmethod
    def load(cls, file: Path | None = None, flags: Mapping[str, Any] | None = None) -> Self:
        """Reads file, variables and flags; flags that are None were not given.

        Raises:
            InvalidArgument: an unknown key, with a suggestion, or a value out of its range.
        """
        values: dict[str, Any] = {}
        values.update(cls._from_foreign_variables(os.environ))
        values.update(cls._from_file(file))
        values.update(cls._from_environment(os.environ))
        values.update({k: v for k, v in (flags or {}).items() if v is not None})
        for key in values:
            if key not in cls.model_fields:
                raise InvalidArgument(_unknown(key, cls), field=key)
        try:
            return cls(**values)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"]) or cls.section
            raise InvalidArgument(
                f"{cls.section}.{name}: {first['msg']} (got {first.get('input')!r})", field=name
            ) from None

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only the values `load` has merged; pydantic's own environment source stays out."""
        return (init_settings,)

    @classmethod
    def _from_environment(cls, environment: Mapping[str, str]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in environment.items():
            if name.startswith(cls.prefix()):
                key = name.removeprefix(cls.prefix()).lower()
                if key not in cls.model_fields:
                    raise InvalidArgument(_unknown(key, cls, shown=name), field=name)
                found[key] = _parsed(cls, key, value)
        return found

    @classmethod
    def _from_foreign_variables(cls, environment: Mapping[str, str]) -> dict[str, Any]:
        """Values of variables that other programs share with us, named by a field's `variables`."""
        found: dict[str, Any] = {}
        for key, field in cls.model_fields.items():
            extra = field.json_schema_extra
            names = extra.get("variables") if isinstance(extra, dict) else None
            for name in names if isinstance(names, list) else ():
                if environment.get(str(name)):
                    found.setdefault(key, environment[str(name)])
        return found

    @classmethod
    def _from_file(cls, file: Path | None) -> dict[str, Any]:
        if file is None:
            return {}
        try:
            content = yaml.safe_load(file.read_text()) or {}
        except (OSError, yaml.YAMLError) as error:
            raise InvalidArgument(f"cannot read {file}: {error}", field="config") from None
        if not isinstance(content, dict):
            raise InvalidArgument(f"{file} must hold sections such as gateway:", field="config")
        section = content.get(cls.section) or {}
        if not isinstance(section, dict):
            raise InvalidArgument(f"{file}: {cls.section} must be a section", field=cls.section)
        return section


def _parsed(cls: type[Settings], key: str, value: str) -> Any:
    """Lists are written with commas in the environment; scalars are parsed by pydantic."""
    annotation = str(cls.model_fields[key].annotation)
    if annotation.startswith(("list", "tuple")):
        return [part.strip() for part in value.split(",") if part.strip()]
    return value


def _unknown(key: str, cls: type[Settings], shown: str | None = None) -> str:
    close = difflib.get_close_matches(key, cls.model_fields, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    return f"unknown setting {shown or key} of {cls.section}{hint}"
