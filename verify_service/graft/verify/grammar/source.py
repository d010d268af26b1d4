"""Compiles grammars for one vocabulary, in the process that calls it. Knows no limits.

Both sides use it: the child that may be killed at any moment, and the replica, for what the child
has shown to be harmless.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import xgrammar

from graft.v1.sampling_pb2 import GrammarKind
from graft.verify.grammar.tagged import structural_tag

_ANY_OBJECT = '{"type": "object"}'


class Source:
    """xgrammar's compiler for one vocabulary.

    JSON is written without free whitespace: a small model that may write spaces between values
    can go on doing so for ever.
    """

    def __init__(self, vocabulary: Sequence[bytes], eos_token_ids: Sequence[int]) -> None:
        """vocabulary: the bytes of every id; ids without bytes are never allowed."""
        self.vocab_size = len(vocabulary)
        self.ends = frozenset(eos_token_ids)
        self.info = xgrammar.TokenizerInfo(
            list(vocabulary), vocab_size=len(vocabulary), stop_token_ids=list(eos_token_ids)
        )
        self._compiler = xgrammar.GrammarCompiler(self.info, max_threads=1, cache_enabled=False)

    def compile(self, kind: int, text: str) -> Any:
        """An xgrammar.CompiledGrammar; the text is what `try_out` has made of it.

        Raises:
            RuntimeError: xgrammar cannot read it.
        """
        match kind:
            case GrammarKind.GRAMMAR_KIND_JSON_OBJECT:
                return self._compiler.compile_json_schema(_ANY_OBJECT, any_whitespace=False)
            case GrammarKind.GRAMMAR_KIND_JSON_SCHEMA:
                return self._compiler.compile_json_schema(text, any_whitespace=False)
            case GrammarKind.GRAMMAR_KIND_REGEX:
                return self._compiler.compile_regex(text)
            case GrammarKind.GRAMMAR_KIND_TAGGED_JSON:
                return self._compiler.compile_structural_tag(structural_tag(text))
            case _:
                return self._compiler.compile_grammar(text)

    def matcher(self, compiled: Any) -> Any:
        """An xgrammar.GrammarMatcher at its start."""
        return xgrammar.GrammarMatcher(compiled)
