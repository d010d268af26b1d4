"""Errors in the words of the client protos: REST's names of fields become those of gRPC."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from graft.common.errors import GraftError

_FIXED = {
    "max_completion_tokens": "max_tokens",
    "include_stop_str_in_output": "include_stop",
    "skip_special_tokens": "keep_special_tokens",
    "speculation_trace": "trace_rounds",
    "prompt": "prompts",
}
_FUNCTION = re.compile(r"^(messages\[\d+\]\.tool_calls\[\d+\]|tools\[\d+\])\.function\b")


@contextmanager
def in_our_words(request: Any) -> Iterator[None]:
    """Errors that leave name the fields of the request, which is a Chat or Complete of any kind."""
    try:
        yield
    except GraftError as error:
        rename(error, request)
        raise


def rename(error: GraftError, request: Any) -> None:
    """Gives an error the field's name over gRPC, in place; its sentence, too."""
    field = error.field
    if not field:
        return
    names = _names(request)
    longest = max((name for name in names if _under(field, name)), key=len, default=None)
    if longest is None:
        ours = _FUNCTION.sub(r"\1", field).replace("].reasoning_content", "].reasoning")
        theirs = field
    else:
        theirs, ours = longest, names[longest]
    error.field = ours + field.removeprefix(theirs)
    if ours != theirs:
        start = (
            r"(?<![\w.])" if "_" in theirs else "^"
        )  # a word of the language may be none of ours
        word = rf"{start}{re.escape(theirs)}(?!\w)"
        error.args = (re.sub(word, lambda _: ours, str(error), count=1),)


def _names(request: Any) -> Mapping[str, str]:
    """REST's names of fields, and what stands for them in this request."""
    options = request.options
    grammar = options.WhichOneof("grammar") or "json_schema"
    names = {
        **_FIXED,
        "response_format.json_schema.schema": grammar,
        "response_format": grammar,
        "speculation": options.WhichOneof("speculation") or "speculation_mode",
    }
    if not request.DESCRIPTOR.name.startswith("Chat"):
        return {**names, "logprobs": "top_logprobs"}
    choice = request.WhichOneof("choice") or "tool_choice"
    return {**names, "tool_choice.function.name": choice, "tool_choice": choice}


def _under(field: str, name: str) -> bool:
    return field == name or field.startswith((f"{name}.", f"{name}["))
