"""The grammars of a replica: tried in the nursery, compiled off the loop, kept for the next one.

Knows texts and matchers; knows no session. Owned by one event loop.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final

from graft.common import log
from graft.common.errors import GraftError, InvalidArgument
from graft.common.grammar import Grammar
from graft.common.token_pieces import vocabulary_bytes
from graft.verify.grammar.matcher import SessionGrammar
from graft.verify.grammar.trials import Trials, Vocabulary

if TYPE_CHECKING:
    from graft.verify.grammar.source import Source

_log = log.get("grammar")

_MAX_BYTES: Final = 128 << 20
_MAX_KEPT: Final = 512
_MAX_REFUSED: Final = 512


def can_compile() -> bool:
    """True when xgrammar is installed."""
    return importlib.util.find_spec("xgrammar") is not None


class Grammars:
    """Makes matchers. Nothing is started before the first one is asked for, or `warm`."""

    def __init__(self, vocabulary: Vocabulary, limit_s: float) -> None:
        """limit_s: how long a grammar may take to compile."""
        self._vocabulary = vocabulary
        self._trials = Trials(vocabulary, limit_s)
        self._thread = ThreadPoolExecutor(1, "graft-grammar")
        self._source: Source | None = None
        self._kept: OrderedDict[bytes, Any] = OrderedDict()
        self._kept_bytes = 0
        self._refused: OrderedDict[bytes, str] = OrderedDict()
        self._compiling: dict[bytes, asyncio.Task[Any]] = {}

    async def warm(self) -> None:
        """Gets ready for the first grammar; a failure is logged and shows in what is asked."""
        try:
            await asyncio.gather(self._trials.start(), self._in_thread(self._make_source))
        except GraftError as error:
            _log.warning("grammars are not ready", error=str(error))

    async def session(self, grammar: Grammar, committed: list[int]) -> SessionGrammar:
        """A matcher that has advanced by `committed`.

        Raises:
            InvalidArgument: the grammar cannot be used, or the tokens break it.
            Overloaded: too many are being compiled.
        """
        compiled = await self._compiled(grammar)
        source = await self._in_thread(self._make_source)
        made = SessionGrammar(source.matcher(compiled), self._vocabulary.vocab_size, grammar.name)
        if committed:
            await self._in_thread(made.replay, committed)
        return made

    async def close(self) -> None:
        """Ends what was started."""
        for task in self._compiling.values():
            task.cancel()
        await self._trials.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _compiled(self, grammar: Grammar) -> Any:
        """The compiled grammar; sessions that ask for the same one at once share the work."""
        digest = grammar.digest
        if digest in self._kept:
            self._kept.move_to_end(digest)
            return self._kept[digest]
        if digest in self._refused:
            raise _refusal(grammar, self._refused[digest])
        task = self._compiling.get(digest)
        if task is None:
            task = asyncio.get_running_loop().create_task(self._compile(grammar))
            self._compiling[digest] = task
            task.add_done_callback(lambda done: self._compiled_once(digest, done))
        return await asyncio.shield(task)

    def _compiled_once(self, digest: bytes, task: asyncio.Task[Any]) -> None:
        del self._compiling[digest]
        if not task.cancelled():
            task.exception()  # it was raised to everybody who still waits

    async def _compile(self, grammar: Grammar) -> Any:
        verdict = await self._trials.ask(grammar.kind, grammar.text)
        if verdict.error:
            _log.info("grammar refused", kind=grammar.name, size=len(grammar.text))
            if verdict.final:
                self._refused[grammar.digest] = verdict.error
                while len(self._refused) > _MAX_REFUSED:
                    self._refused.popitem(last=False)
            raise _refusal(grammar, verdict.error)
        source = await self._in_thread(self._make_source)
        compiled = await self._in_thread(source.compile, grammar.kind, verdict.text)
        self._kept[grammar.digest] = compiled
        self._kept_bytes += compiled.memory_size_bytes
        while len(self._kept) > 1 and (
            self._kept_bytes > _MAX_BYTES or len(self._kept) > _MAX_KEPT
        ):
            _, dropped = self._kept.popitem(last=False)
            self._kept_bytes -= dropped.memory_size_bytes
        return compiled

    def _make_source(self) -> Source:
        """Runs on the thread alone: the library takes seconds to import."""
        if self._source is None:
            from graft.verify.grammar.source import Source

            words = self._vocabulary
            vocabulary = vocabulary_bytes(words.folder, words.vocab_size)
            self._source = Source(vocabulary, words.eos_token_ids)
        return self._source

    async def _in_thread(self, function: Any, *args: Any) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)


def _refusal(grammar: Grammar, why: str) -> InvalidArgument:
    return InvalidArgument(f"{grammar.name} cannot be used: {why}", field="grammar")
