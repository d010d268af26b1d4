"""The JSON objects inside OpenAI bodies: usage, logprobs, metrics. Knows no route."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from graft.gateway.job import PromptLogprob, Tally
from graft.gateway.text import Emitted, Logprob, shown
from graft.gateway.tokenizer import Tokenizer

_LEAST_LOGPROB = -9999.0


def usage(tally: Tally) -> dict[str, Any]:
    """What a request has cost; the prompt counts once, however many choices it has."""
    return {
        "prompt_tokens": tally.num_prompt,
        "completion_tokens": tally.num_completion,
        "total_tokens": tally.num_prompt + tally.num_completion,
        "prompt_tokens_details": {"cached_tokens": tally.num_cached},
        "completion_tokens_details": {
            "reasoning_tokens": tally.num_reasoning,
            **_predicted(tally),
        },
    }


def _predicted(tally: Tally) -> dict[str, int]:
    """How much of a prediction came true; nothing for requests without one."""
    if not tally.num_predicted:
        return {}
    accepted = tally.num_predicted_accepted
    return {
        "accepted_prediction_tokens": accepted,
        "rejected_prediction_tokens": tally.num_predicted - accepted,
    }


def metrics(tally: Tally) -> dict[str, Any]:
    """What speculation did for a request."""
    return {"speculative_decoding": tally.record.as_body()}


def token_lists(tokens: Sequence[Emitted]) -> dict[str, Any]:
    """Ids, texts and origins of tokens, for those who asked with return_token_ids."""
    return {
        "token_ids": [one.token for one in tokens],
        "token_texts": [one.text for one in tokens],
        "token_origins": [one.origin.value for one in tokens],
    }


def chat_logprobs(tokens: Iterable[Emitted], tokenizer: Tokenizer) -> dict[str, Any]:
    """`logprobs` of a chat choice: one entry a token; their strings join to the text."""
    content = []
    for one in tokens:
        logprob = one.logprob or Logprob(_LEAST_LOGPROB)
        content.append(
            {
                "token": one.text,
                "logprob": _finite(logprob.logprob),
                "bytes": list(tokenizer.own_bytes(one.token)),
                "top_logprobs": [
                    {
                        "token": shown(tokenizer.own_bytes(token)),
                        "logprob": _finite(value),
                        "bytes": list(tokenizer.own_bytes(token)),
                    }
                    for token, value in logprob.top
                ],
            }
        )
    return {"content": content, "refusal": None}


class TextLogprobs:
    """`logprobs` of a completion choice, in pieces; offsets go on from piece to piece."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._offset = 0

    def prompt(self, tokens: Iterable[PromptLogprob], texts: Iterable[str]) -> dict[str, Any]:
        """The prompt's part, with echo; the first token has no log-probability."""
        body = _empty()
        for one, text in zip(tokens, texts, strict=True):
            self._add(body, text, one.logprob)
        return body

    def generated(self, tokens: Iterable[Emitted]) -> dict[str, Any]:
        """The part of generated tokens."""
        body = _empty()
        for one in tokens:
            self._add(body, one.text, one.logprob)
        return body

    def _add(self, body: dict[str, Any], text: str, logprob: Logprob | None) -> None:
        body["tokens"].append(text)
        body["text_offset"].append(self._offset)
        self._offset += len(text)
        body["token_logprobs"].append(None if logprob is None else _finite(logprob.logprob))
        body["top_logprobs"].append(None if logprob is None else self._top(text, logprob))

    def _top(self, text: str, logprob: Logprob) -> dict[str, float]:
        """The most likely tokens by their strings, and the token itself."""
        top: dict[str, float] = {}
        for token, value in logprob.top:
            top.setdefault(shown(self._tokenizer.own_bytes(token)), _finite(value))
        top.setdefault(text, _finite(logprob.logprob))
        return top


def joined(parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Pieces of completion logprobs as one."""
    body = _empty()
    for part in parts:
        for key, values in part.items():
            body[key] += values
    return body


def _empty() -> dict[str, Any]:
    return {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}


def _finite(value: float) -> float:
    """JSON has no infinity; a token that cannot be chosen has the least log-probability."""
    return value if math.isfinite(value) else _LEAST_LOGPROB
