"""One try of a grammar, in a process that may be killed for it. Knows no limits itself."""

from __future__ import annotations

import random
from typing import Any, Final

import numpy as np
import torch

from graft.common.heap import working_time
from graft.kernels.reference.grammar import words_of
from graft.v1.sampling_pb2 import GrammarKind
from graft.verify.grammar.refused import SchemaRefused
from graft.verify.grammar.schema import bounded
from graft.verify.grammar.source import Source
from graft.verify.grammar.tagged import begins, bounded_tags

_STEPS: Final = 64
_LEAST_STEPS: Final = 8
_STEP_LIMIT_S: Final = 0.1
_SHOWN_CHARS: Final = 300


def try_out(source: Source, kind: int, text: str) -> str:
    """Compiles a grammar and follows it for some tokens; returns the text to compile it from.

    Raises:
        SchemaRefused: it cannot be used; the sentence is for the client.
    """
    if kind == GrammarKind.GRAMMAR_KIND_JSON_SCHEMA:
        text = bounded(text)
    starts = [""]
    if kind == GrammarKind.GRAMMAR_KIND_TAGGED_JSON:
        text = bounded_tags(text)
        starts += begins(text)
    try:
        compiled = source.compile(kind, text)
    except MemoryError:
        raise SchemaRefused("it takes too much memory to compile") from None
    except RuntimeError as error:
        raise SchemaRefused(_reason(str(error))) from None
    for start in starts:
        matcher = source.matcher(compiled)
        if start:
            matcher.accept_string(start)
        _follow(source, matcher, max(_LEAST_STEPS, _STEPS // len(starts)))
    return text


def _follow(source: Source, matcher: Any, num_steps: int) -> None:
    """Walks the grammar by tokens it allows, as a model without a plan would."""
    choice = random.Random(0)
    for step in range(num_steps):
        started = working_time()
        allowed = _allowed(source, matcher)
        if not len(allowed) and not step:
            raise SchemaRefused("it allows no text at all")
        going_on = [token for token in allowed.tolist() if token not in source.ends]
        if not going_on:
            return
        matcher.accept_token(choice.choice(going_on))
        if working_time() - started > _STEP_LIMIT_S:
            raise SchemaRefused("it takes too long to follow; make it less ambiguous")


def _allowed(source: Source, matcher: Any) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    row = torch.full((1, words_of(source.vocab_size)), -1, dtype=torch.int32)
    matcher.fill_next_token_bitmask(row, 0)
    bits = np.unpackbits(row.numpy().view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[: source.vocab_size])


def _reason(message: str) -> str:
    """What xgrammar says, without where in its own source it says so."""
    if "bad_alloc" in message:
        return "it takes too much memory to compile"
    told = message.split(".cc:", 1)[-1].partition(": ")[2] or message
    told = " ".join(told.split())
    return told if len(told) <= _SHOWN_CHARS else f"{told[:_SHOWN_CHARS]}..."
