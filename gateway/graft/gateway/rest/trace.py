"""The `speculation_trace` of a choice: its rounds with their trees, as JSON. Knows no route."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from graft.gateway.record import tier_body
from graft.gateway.rounds import SeenRound
from graft.gateway.text import shown
from graft.gateway.tokenizer import Tokenizer
from graft.v1 import verify_pb2
from graft.v1.verify_pb2 import PlainReason


def rounds_body(rounds: Iterable[SeenRound], tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """One object a round, in order."""
    return [_round(one, tokenizer) for one in rounds]


def _round(seen: SeenRound, tokenizer: Tokenizer) -> dict[str, Any]:
    commit, timing = seen.commit, seen.commit.timing
    reason = None
    if commit.plain_reason != PlainReason.PLAIN_REASON_UNSPECIFIED:
        reason = PlainReason.Name(commit.plain_reason).removeprefix("PLAIN_REASON_").lower()
    return {
        "round": seen.number,
        "at_ms": round(seen.millis, 3),
        "tier": None if seen.tier.off else tier_body(seen.tier),
        "plain_reason": reason,
        "tokens": list(commit.tokens),
        "texts": _texts(commit.tokens, tokenizer),
        "num_accepted": commit.num_accepted,
        "num_drafted": commit.num_drafted,
        "timing_us": {
            "draft": timing.draft_micros,
            "tree_wait": timing.tree_wait_micros,
            "queue": timing.queue_micros,
            "forward": timing.forward_micros,
            "choice": timing.choice_micros,
        },
        "batch_rows": timing.batch_row_count,
        "tree": None if commit.trace is None else _tree(commit.trace, tokenizer),
    }


def _tree(trace: verify_pb2.RoundTrace, tokenizer: Tokenizer) -> dict[str, Any]:
    """Columns, one entry a node in preorder; the root has no parent and no probability."""
    choices = list(trace.choices)
    scores = [_probability(value) for value in trace.choice_logprobs]
    return {
        "tokens": list(trace.tokens),
        "texts": _texts(trace.tokens, tokenizer),
        "parents": [-1, *trace.parents],
        "probabilities": [None, *(_probability(value) for value in trace.logprobs)],
        "accepted": list(trace.accepted_nodes),
        "choices": choices,
        "choice_texts": _texts(choices, tokenizer),
        "choice_probabilities": scores,
        "bonus_probability": _probability(trace.bonus_logprob),
    }


def _texts(tokens: Sequence[int], tokenizer: Tokenizer) -> list[str]:
    return [shown(tokenizer.own_bytes(token)) for token in tokens]


def _probability(logprob: float) -> float:
    """Five digits are enough to look at; what is not a number counts as nothing."""
    return 0.0 if math.isnan(logprob) else float(f"{math.exp(min(logprob, 0.0)):.5g}")
