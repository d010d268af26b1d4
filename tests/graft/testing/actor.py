"""A scripted model that does as it is told: calls the function it may, fills the schema it must.

It reads the prompt of the tiny model's template as bytes, and answers in the same. What a small
model cannot do for a client's test suite is done here; everything around the model is real.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from graft.testing.models import IM_END, SPECIALS
from graft.testing.scripted_verify import Script
from graft.v1 import verify_pb2
from graft.v1.sampling_pb2 import GrammarKind

_START, _END = "<|im_start|>", "<|im_end|>"
_QUOTED = re.compile(r"'([^']+)'")
_NUMBER = re.compile(r"\d+")
KINDS = [
    GrammarKind.GRAMMAR_KIND_JSON_OBJECT,
    GrammarKind.GRAMMAR_KIND_JSON_SCHEMA,
    GrammarKind.GRAMMAR_KIND_REGEX,
    GrammarKind.GRAMMAR_KIND_EBNF,
]


def actor() -> Script:
    """The script, with room for long prompts. It speaks in rounds of one to four tokens."""
    described = {"context_length": 32768, "grammar_kinds": KINDS}
    return Script([], widths=(3, 1, 4, 2), reply=reply, describe=described)


def reply(opening: verify_pb2.OpenSession) -> list[int]:
    """The answer to a session's prompt, as tokens."""
    prompt = _text(opening.prompt_tokens)
    return [*answer(prompt, opening).encode(), IM_END]


def answer(prompt: str, opening: verify_pb2.OpenSession) -> str:
    """What to say: an instance of the schema, else a call, else a sentence."""
    turns = [turn.split("\n", 1) for turn in prompt.replace(_END + "\n", "").split(_START)[1:]]
    asked = next((text for role, text in reversed(turns[:-1]) if role == "user"), "")
    if opening.HasField("grammar"):
        if opening.grammar.kind == GrammarKind.GRAMMAR_KIND_JSON_SCHEMA:
            schema = json.loads(opening.grammar.text)
            return json.dumps(instance(schema, schema, asked), ensure_ascii=False)
        return json.dumps({key: "Why not?" for key in _QUOTED.findall(asked)})
    tools = _tools(prompt)
    if tools and not asked.startswith("<tool_response>"):
        tool = next((one for one in tools if one["name"] in asked), tools[0])
        schema = tool.get("parameters", {"type": "object"})
        call = {"name": tool["name"], "arguments": instance(schema, schema, asked)}
        return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
    return "Hello! I have read what you said, and I am glad to be of help. 😀"


def instance(schema: Mapping[str, Any], root: Mapping[str, Any], asked: str) -> Any:
    """A value that a schema allows; texts and numbers are those of the question, if it has any."""
    if "$ref" in schema:
        found: Any = root
        for step in schema["$ref"].removeprefix("#").split("/")[1:]:
            found = found[step]
        return instance(found, root, asked)
    if "const" in schema:
        return schema["const"]
    if "enum" in schema:
        return schema["enum"][0]
    for key in ("anyOf", "oneOf"):
        if key in schema:
            return instance(schema[key][0], root, asked)
    match schema.get("type", "object" if "properties" in schema else "string"):
        case "object":
            properties = schema.get("properties", {})
            return {key: instance(part, root, asked) for key, part in properties.items()}
        case "array":
            return [instance(schema.get("items", {"type": "null"}), root, asked)]
        case "integer" | "number":
            return int((_NUMBER.findall(asked) or ["3"])[0])
        case "boolean":
            return True
        case "null":
            return None
    return (_QUOTED.findall(asked) or ["Something"])[0]


def _tools(prompt: str) -> list[dict[str, Any]]:
    """The functions that the gateway's preamble tells of."""
    found = re.search(r"<tools>\n(.*?)\n</tools>", prompt, re.DOTALL)
    return [json.loads(line) for line in found.group(1).split("\n")] if found else []


def _text(tokens: Any) -> str:
    """The text of byte tokens and specials."""
    raw = b""
    for token in tokens:
        raw += bytes([token]) if token < 256 else SPECIALS[token - 256].encode()
    return raw.decode()
