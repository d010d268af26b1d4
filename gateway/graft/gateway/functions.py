"""Functions a model may call, as clients describe them, and calls as they come back in messages.

Knows the fields and their limits; knows no template and no parser.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, JsonValue

from graft.common.errors import InvalidArgument, Unsupported

MAX_FUNCTIONS = 128
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", frozen=True)


class FunctionDefinition(_Part):
    """One function: its name, what it is for, and a JSON schema of its arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class FunctionTool(_Part):
    """A tool of the only type there is."""

    type: str = "function"
    function: FunctionDefinition


class NamedFunction(_Part):
    """The function of a tool_choice."""

    name: str


class NamedTool(_Part):
    """A tool_choice that names one function."""

    type: str = "function"
    function: NamedFunction


class CalledFunction(_Part):
    """The function of a call in an assistant's message; arguments are JSON in a string."""

    name: str
    arguments: str | dict[str, JsonValue] = ""


class CalledTool(_Part):
    """A call in an assistant's message."""

    id: str | None = None
    type: str = "function"
    function: CalledFunction

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates expect it: arguments as an object, where they are one."""
        arguments: Any = self.function.arguments
        if isinstance(arguments, str):
            arguments = _object(arguments)
        body: dict[str, Any] = {
            "type": "function",
            "function": {"name": self.function.name, "arguments": arguments},
        }
        return body if self.id is None else {"id": self.id, **body}


ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass(frozen=True, slots=True)
class FunctionUse:
    """Which functions a model may call, and whether it must. `named` is the one it must call."""

    functions: tuple[FunctionDefinition, ...] = ()
    required: bool = False
    named: str = ""
    parallel: bool = True

    @property
    def forced(self) -> tuple[FunctionDefinition, ...]:
        """The functions of which one must be called; none when the model may choose not to."""
        if self.named:
            return tuple(one for one in self.functions if one.name == self.named)
        return self.functions if self.required else ()

    @property
    def names(self) -> frozenset[str]:
        """The names of the functions."""
        return frozenset(one.name for one in self.functions)

    def for_template(self) -> list[dict[str, Any]] | None:
        """The tools as chat templates expect them, or None where there are none."""
        if not self.functions:
            return None
        return [
            {"type": "function", "function": one.model_dump(exclude_none=True, exclude={"strict"})}
            for one in self.functions
        ]


def function_use(
    tools: Sequence[FunctionTool], choice: ToolChoice | None, parallel: bool
) -> FunctionUse:
    """What `tools`, `tool_choice` and `parallel_tool_calls` say together.

    Raises:
        InvalidArgument, Unsupported: they do not fit, or ask for tools of another type.
    """
    if len(tools) > MAX_FUNCTIONS:
        raise InvalidArgument(
            f"tools holds {len(tools)} functions, limit is {MAX_FUNCTIONS}", field="tools"
        )
    names: set[str] = set()
    for place, tool in enumerate(tools):
        field = f"tools[{place}]"
        if tool.type != "function":
            raise Unsupported(
                f'{field}: only tools of type "function" are offered, got {tool.type[:40]!r}',
                field="tools",
            )
        name = tool.function.name
        if not _NAME.fullmatch(name):
            raise InvalidArgument(
                f"{field} is called {name[:40]!r}, expected 1 to 128 letters, digits and _-.:/",
                field="tools",
            )
        if name in names:
            raise InvalidArgument(f"two tools are called {name!r}", field="tools")
        names.add(name)
    functions = tuple(tool.function for tool in tools)
    if choice is None or choice == "none" or choice == "auto":
        return FunctionUse(() if choice == "none" else functions, parallel=parallel)
    if not functions:
        raise InvalidArgument(
            "tool_choice asks for a call, but there are no tools", field="tool_choice"
        )
    if isinstance(choice, str):
        return FunctionUse(functions, required=True, parallel=parallel)
    if choice.type != "function":
        raise Unsupported(
            f'tool_choice: only the type "function" is offered, got {choice.type[:40]!r}',
            field="tool_choice",
        )
    if choice.function.name not in names:
        raise InvalidArgument(
            f"tool_choice names {choice.function.name[:40]!r}, which is none of the tools",
            field="tool_choice",
        )
    return FunctionUse(functions, named=choice.function.name, parallel=parallel)


def loose_functions(tools: Sequence[FunctionTool], choice: ToolChoice | None) -> list[str]:
    """The fields of functions that ask to be followed strictly, where no call has to be made."""
    if choice not in (None, "auto"):
        return []
    return [
        f"tools[{place}].function.strict"
        for place, tool in enumerate(tools)
        if tool.function.strict
    ]


def _object(text: str) -> Any:
    """The object that a string of JSON is; the string itself where it is something else."""
    if not text.strip():
        return {}
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
