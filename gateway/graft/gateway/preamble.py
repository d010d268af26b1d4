"""Functions for models whose chat template knows none: told and called in plain text.

The functions go to the front of the system message, calls and their results into the messages'
text, in the marks of the `hermes` format. docs/tools.md shows the whole.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from graft.gateway.speech.calls import CallFormat

_ABOUT = (
    "You can call functions to help the user. These are the functions, one JSON object a line:\n"
    "<tools>\n{tools}\n</tools>\n"
    "To call one, answer with its name and its arguments as JSON, like this:\n{example}"
)


def preamble(tools: Sequence[Mapping[str, Any]], form: CallFormat) -> str:
    """What the model is told of its functions."""
    lines = "\n".join(_json(tool["function"]) for tool in tools)
    example = written_call("name_of_the_function", {"name_of_an_argument": "value"}, form)
    return _ABOUT.format(tools=lines, example=example)


def written_call(name: str, arguments: Any, form: CallFormat) -> str:
    """A call as a model of that family writes it."""
    key = "parameters" if form.name == "llama3_json" else "arguments"
    call = _json({"name": name, key: arguments})
    if form.name == "mistral":
        return f"{form.opens}[{call}]"
    return f"{form.opens}\n{call}\n{form.closes}" if form.opens else call


def in_plain_words(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    form: CallFormat,
) -> list[dict[str, Any]]:
    """The conversation for a template that knows no tools: the preamble first, calls as text,
    results as messages of the user."""
    said = [_in_text(message, form) for message in messages]
    if not tools:
        return said
    about = preamble(tools, form)
    if said and said[0]["role"] == "system":
        first = said[0]
        content = f"{about}\n\n{first['content']}" if first["content"] else about
        return [{**first, "content": content}, *said[1:]]
    return [{"role": "system", "content": about}, *said]


def _in_text(message: Mapping[str, Any], form: CallFormat) -> dict[str, Any]:
    rest = {key: value for key, value in message.items() if key not in ("tool_calls", "role")}
    if message["role"] in ("tool", "function"):
        content = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {**rest, "role": "user", "content": content}
    calls = [
        written_call(call["function"]["name"], call["function"]["arguments"], form)
        for call in message.get("tool_calls") or ()
    ]
    content = "\n".join([*([message["content"]] if message["content"] else []), *calls])
    return {**rest, "role": message["role"], "content": content}


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
