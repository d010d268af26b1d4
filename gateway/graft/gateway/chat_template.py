"""Renders a conversation with the model's own template, in a sandbox with limits."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import meta
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from graft.common.errors import InvalidArgument

MAX_TEMPLATE_CHARS = 256 * 1024
MAX_RENDERED_CHARS = 8 << 20

DEFAULT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


_RESERVED = frozenset({"messages", "add_generation_prompt"})
_TOOLS = "tools"


class ChatTemplate:
    """A compiled template.

    Raises:
        InvalidArgument: the template does not compile, or is too long.
    """

    def __init__(self, source: str | None, *, bos_token: str = "", eos_token: str = "") -> None:
        source = DEFAULT_TEMPLATE if source is None else source
        if len(source) > MAX_TEMPLATE_CHARS:
            raise InvalidArgument(
                f"chat template has {len(source)} characters, limit is {MAX_TEMPLATE_CHARS}",
                field="chat_template",
            )
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals.update(raise_exception=_raise, strftime_now=_strftime_now)
        self.source = source
        try:
            names = meta.find_undeclared_variables(environment.parse(source))
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise InvalidArgument(
                f"chat template does not compile: {error}", field="chat_template"
            ) from None
        self.knows_tools = _TOOLS in names
        self._specials = {"bos_token": bos_token, "eos_token": eos_token}

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        extra: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt text that asks the assistant to go on. `tools` win over those of `extra`.

        Raises:
            InvalidArgument: the template refuses the conversation, or renders too much.
        """
        names = {_TOOLS: None, **(extra or {}), **self._specials}
        if tools:
            names[_TOOLS] = list(tools)
        if taken := _RESERVED.intersection(extra or {}):
            raise InvalidArgument(
                f"chat_template_kwargs may not set {min(taken)}", field="chat_template_kwargs"
            )
        parts: list[str] = []
        size = 0
        try:
            rendered = self._template.generate(
                {**names, "messages": list(messages), "add_generation_prompt": True}
            )
            for part in rendered:
                size += len(part)
                if size > MAX_RENDERED_CHARS:
                    raise InvalidArgument(
                        f"the conversation renders to more than {MAX_RENDERED_CHARS} characters",
                        field="messages",
                    )
                parts.append(part)
        except InvalidArgument:
            raise
        except Exception as error:  # a template may raise whatever its expressions raise
            raise InvalidArgument(
                f"the model's chat template refuses these messages: {error}", field="messages"
            ) from None
        return "".join(parts)


def _raise(message: str) -> str:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
