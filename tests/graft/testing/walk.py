"""The parameter walk: every request field with its values, and few requests with all pairs.

Knows bodies and answers; starts nothing. A value is a fragment of a body, since some fields need
another one beside them.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

Fragment = Mapping[str, Any]
Fields = Mapping[str, Sequence[Fragment]]

TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}},
}
STRICT_TOOL = {"type": "function", "function": {"name": "g", "strict": True}}
GRAMMARS: Sequence[Fragment] = (
    {"response_format": {"type": "json_object"}},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"enum": ["one", "two", "three"]}},
        }
    },
    {"regex": "[a-f]{3,8}"},
    {"ebnf": 'root ::= "yes" | "no" | "no" root'},
    {"structured_outputs": {"choice": ["perhaps", "never"]}},
)
# What a text that is held to a grammar leaves no room for.
HELD: Fragment = {"ignore_eos": False}
NO_CALLS: Fragment = {"tool_choice": "none"}
COMMON: Fields = {
    "max_tokens": ({"max_tokens": 9}, {"max_tokens": 1}),
    "max_completion_tokens": ({"max_completion_tokens": 7},),
    "temperature": ({"temperature": 0}, {"temperature": 1.4}),
    "top_p": ({"top_p": 0.7},),
    "top_k": ({"top_k": 5}, {"top_k": -1}),
    "min_p": ({"min_p": 0.05},),
    "seed": ({"seed": 7}, {"seed": -3}),
    "stop": ({"stop": ["e", "qq", " ", "th"]}, {"stop": "a"}),
    "stop_token_ids": ({"stop_token_ids": [*range(97, 107)]},),
    "include_stop_str_in_output": ({"include_stop_str_in_output": True},),
    "ignore_eos": ({"ignore_eos": True},),
    "min_tokens": ({"min_tokens": 5, "max_tokens": 9, "max_completion_tokens": 9},),
    "presence_penalty": ({"presence_penalty": 1.5},),
    "frequency_penalty": ({"frequency_penalty": -1.0},),
    "repetition_penalty": ({"repetition_penalty": 1.4},),
    "logit_bias": ({"logit_bias": {"101": 4, "65": -100, "258": 3.5}},),
    "n": ({"n": 2},),
    "stream": (
        {"stream": True},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {"continuous_usage_stats": True}},
    ),
    "user": ({"user": "somebody"},),
    "accept_rule": (
        {"accept_rule": "coupled"},
        {"accept_rule": "target_only", "temperature": 0, "threshold_single": 1.0},
        {"accept_rule": "rejection", "temperature": 0, "threshold_acc": 1.0},
        {"accept_rule": "block", "temperature": 0},
    ),
    "skip_special_tokens": ({"skip_special_tokens": False},),
    "cache_salt": ({"cache_salt": "salt"},),
    "speculation_trace": ({"speculation_trace": True},),
    "prediction": ({"prediction": {"type": "content", "content": "Once upon a time."}},),
    "model": ({"model": "tiny"},),
    "grammar": ({"response_format": {"type": "text"}}, *({**one, **HELD} for one in GRAMMARS)),
}
CHAT: Fields = {
    **COMMON,
    "grammar": (
        {"response_format": {"type": "text"}},
        *({**one, **HELD, **NO_CALLS} for one in GRAMMARS),
    ),
    "logprobs": ({"logprobs": True}, {"logprobs": True, "top_logprobs": 3}),
    "messages": (
        {"messages": [{"role": "developer", "content": "Be."}, {"role": "user", "content": "Go."}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Say é😀."}]}]},
    ),
    "chat_template_kwargs": ({"chat_template_kwargs": {"mood": 1}},),
    "tools": (
        {"tools": [TOOL], "parallel_tool_calls": False},
        {"tools": [TOOL], "tool_choice": "none"},
        {"tools": [STRICT_TOOL], **HELD},
    ),
}
TEXT: Fields = {
    **COMMON,
    "logprobs": ({"logprobs": 0}, {"logprobs": 3}),
    "prompt": ({"prompt": [72, 101, 108]}, {"prompt": ["One", "Two, two, two"]}),
    "echo": ({"echo": True},),
}
REFUSED: Sequence[Fragment] = (
    {"temperature": -1},
    {"top_p": 0},
    {"top_k": -2},
    {"min_p": 2},
    {"seed": 1.5},
    {"stop": ["a", "b", "c", "d", "e"]},
    {"stop_token_ids": [999]},
    {"min_tokens": 600},
    {"presence_penalty": 3},
    {"frequency_penalty": -3},
    {"repetition_penalty": 0},
    {"logit_bias": {"x": 1}},
    {"n": 0},
    {"stream_options": {"include_usage": True}},
    {"accept_rule": "luck"},
    {"threshold_single": 0.5},
    {"max_tokens": -1},
    {"max_completion_tokens": 5000},
    {"response_format": {"type": "poem"}},
    {"regex": "("},
    {"ebnf": "root ::= missing"},
)
FORCED: Sequence[Fragment] = (
    {"tools": [TOOL], "tool_choice": "required"},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}},
    {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
)


def fit(one: Fragment, other: Fragment) -> bool:
    """True when two fragments say nothing against each other."""
    return all(other.get(key, value) == value for key, value in one.items())


def alone(fields: Fields) -> list[dict[str, Any]]:
    """Each value of each field by itself."""
    return [dict(value) for values in fields.values() for value in values]


def pairs(fields: Fields) -> list[dict[str, Any]]:
    """Each pair of values of two fields by itself."""
    return [
        {**one, **other}
        for first, second in itertools.combinations(fields.values(), 2)
        for one, other in itertools.product(first, second)
        if fit(one, other)
    ]


def covering(fields: Fields, seed: int = 0) -> list[dict[str, Any]]:
    """Few bodies that hold every pair of values that fit together; also those of a field left out.

    Greedy: each body begins with a pair that is missing, and takes for every other field, in random
    order, the value that brings most missing pairs.
    """
    rng = random.Random(seed)
    values: dict[str, list[Fragment]] = {name: [{}, *some] for name, some in fields.items()}
    missing = {
        frozenset(((a, i), (b, j)))
        for a, b in itertools.combinations(values, 2)
        for i, one in enumerate(values[a])
        for j, other in enumerate(values[b])
        if fit(one, other)
    }
    bodies = []
    while missing:
        start = rng.choice(sorted(map(sorted, missing)))
        chosen = dict(start)
        body = {k: v for name, at in chosen.items() for k, v in values[name][at].items()}
        rest = [name for name in values if name not in chosen]
        rng.shuffle(rest)
        for name in rest:
            best = max(
                (at for at, value in enumerate(values[name]) if fit(value, body)),
                key=lambda at: sum(
                    frozenset(((name, at), pair)) in missing for pair in chosen.items()
                ),
            )
            chosen[name] = best
            body.update(values[name][best])
        missing -= {frozenset(pair) for pair in itertools.combinations(chosen.items(), 2)}
        bodies.append(body)
    return bodies


@dataclass(frozen=True, slots=True)
class Outcome:
    """What of an answer must not depend on speculation; `drafted` and `accepted` may."""

    status: int
    error: str = ""
    choices: tuple[Any, ...] = ()
    usage: Any = None
    logprobs: tuple[float, ...] = ()
    drafted: int = 0
    accepted: int = 0

    def same_as(self, other: Outcome) -> bool:
        """True when the two say the same, log-probabilities to 1e-4."""
        mine = (self.status, self.error, self.choices, self.usage)
        return mine == (other.status, other.error, other.choices, other.usage) and all(
            abs(a - b) <= 1e-4 for a, b in zip(self.logprobs, other.logprobs, strict=True)
        )

    @property
    def token_ids(self) -> list[list[int]]:
        """Ids of each choice."""
        return [choice.get("token_ids", []) for choice in self.choices]


def outcome(response: httpx.Response) -> Outcome:
    """Reads an answer, streamed or not."""
    if response.status_code != 200:
        return Outcome(response.status_code, json.dumps(response.json()["error"]))
    if response.headers["content-type"].startswith("text/event-stream"):
        body = _joined(response.text)
    else:
        body = response.json()
    numbers: list[float] = []
    choices = [_without_numbers(choice, numbers) for choice in body["choices"]]
    record = (body.get("metrics") or {}).get("speculative_decoding", {})
    usage = body.get("usage")
    if usage is not None:
        usage = {key: value for key, value in usage.items() if key != "prompt_tokens_details"}
    return Outcome(
        200,
        choices=tuple(choices),
        usage=usage,
        logprobs=tuple(numbers),
        drafted=record.get("num_draft_tokens", 0),
        accepted=record.get("num_accepted_draft_tokens", 0),
    )


_NOT_COMPARED = ("token_origins", "speculation_trace", "id")


def _without_numbers(value: Any, numbers: list[float]) -> Any:
    """The value without its log-probabilities, which go to `numbers`, in order."""
    if isinstance(value, dict):
        return {
            key: _without_numbers(part, numbers)
            for key, part in sorted(value.items())
            if key not in _NOT_COMPARED
        }
    if isinstance(value, list):
        return [_without_numbers(part, numbers) for part in value]
    if isinstance(value, float):
        numbers.append(value)
        return None
    return value


def _joined(text: str) -> dict[str, Any]:
    """A stream as one body: texts, ids and log-probabilities of each choice put together."""
    events = [block.removeprefix("data: ") for block in text.split("\n\n")[:-1]]
    events = [event for event in events if not event.startswith(":")]
    assert events.pop() == "[DONE]", text[-400:]
    whole: dict[str, Any] = {"choices": {}}
    for chunk in map(json.loads, events):
        for key in ("usage", "metrics"):
            if chunk.get(key):
                whole[key] = chunk[key]
        for part in chunk["choices"]:
            choice = whole["choices"].setdefault(part["index"], {"index": part["index"]})
            _add(choice, {key: value for key, value in part.items() if key != "index"})
    whole["choices"] = [whole["choices"][index] for index in sorted(whole["choices"])]
    return whole


def _add(whole: dict[str, Any], part: Mapping[str, Any]) -> None:
    for key, value in part.items():
        if value is None:
            whole.setdefault(key, None)
        elif isinstance(value, dict):
            inner = whole.get(key) or {}
            _add(inner, value)
            whole[key] = inner
        elif isinstance(value, str | list) and whole.get(key) and key != "role":
            whole[key] = whole[key] + value
        else:
            whole[key] = value
