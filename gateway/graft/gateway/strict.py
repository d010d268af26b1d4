"""What holds the calls of a text to their schemas where functions ask for it and none is forced.

Knows the marks of a family that stand around a call; a call between them is one JSON object.
"""

from __future__ import annotations

import json
from typing import Any

from graft.common.errors import InvalidArgument
from graft.common.grammar import Grammar
from graft.gateway.forced import ANYTHING
from graft.gateway.functions import FunctionDefinition, FunctionUse
from graft.gateway.speech.calls import CallFormat
from graft.gateway.structured import Structure
from graft.v1.sampling_pb2 import GrammarKind

KIND = GrammarKind.GRAMMAR_KIND_TAGGED_JSON


def structure_of_strict_calls(use: FunctionUse, form: CallFormat) -> Structure | None:
    """The grammar of a text whose calls name a function, and keep to its schema where it is strict.

    None where a call is forced, which has a grammar of its own, or no function is strict.

    Raises:
        InvalidArgument: the functions' schemas are too long, or nested too deeply.
    """
    if use.forced or not any(function.strict for function in use.functions):
        return None
    tags = [_tag(function, form) for function in use.functions]
    try:
        text = json.dumps({"trigger": form.opens, "tags": tags}, ensure_ascii=False)
        return Structure(Grammar(KIND, text), "tools")
    except InvalidArgument as error:
        error.field = "tools"
        raise
    except RecursionError:
        raise InvalidArgument("a schema of tools is nested too deeply", field="tools") from None


def _tag(function: FunctionDefinition, form: CallFormat) -> dict[str, Any]:
    """The call of a function, written as the preamble and the templates show it."""
    schema = function.parameters if function.strict else None
    return {
        "begin": f'{form.opens}\n{{"name": {json.dumps(function.name)}, "arguments": ',
        "schema": schema or ANYTHING,
        "end": f"}}\n{form.closes}",
    }
