"""The same scheduler, target and proposer in one process and one thread: a round without a split.

What `graft bench rounds` compares the services with. Knows no socket.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from graft.bench.rounds import Passage, Round
from graft.common.errors import Unsupported
from graft.common.prefix import Prefix
from graft.common.sampling import Sampling, StopRule
from graft.common.tree import Tree, TreeLimits, trim
from graft.draft.mirror import Mirror
from graft.draft.proposers.base import Proposer, Seat
from graft.draft.server import make_proposers
from graft.draft.settings import DraftSettings
from graft.v1.verify_pb2 import PlainReason
from graft.verify.ending import Ending
from graft.verify.events import Committed, Failed
from graft.verify.loading import Loaded, load
from graft.verify.runner import Runner
from graft.verify.scheduler import Scheduler, SchedulerLimits
from graft.verify.session import Session, SessionRequest
from graft.verify.settings import VerifySettings
from graft.verify.shelf import Proposal

_STREAM = 1


class OneProcess:
    """A loaded target and a proposer that works from tokens alone."""

    def __init__(self, loaded: Loaded, settings: VerifySettings, proposer: Proposer) -> None:
        self._loaded = loaded
        self._proposer = proposer
        self._tier = proposer.describe().default_tier
        self._limits = TreeLimits(settings.max_nodes, settings.max_depth, loaded.target.vocab_size)
        self._runner = Runner(loaded.target.decoder, loaded.ops, loaded.kv)
        self._scheduler = SchedulerLimits(
            settings.max_running,
            settings.max_waiting,
            settings.max_step_rows,
            settings.chunk_tokens,
        )

    def passage(
        self, prompt: Sequence[int], max_tokens: int, sampling: Sampling, *, speculate: bool
    ) -> Passage:
        """Runs one session to its end, in an empty KV pool."""
        target, stop = self._loaded.target, StopRule(max_tokens)
        scheduler = Scheduler(self._scheduler, self._loaded.new_pool())
        request = SessionRequest(
            prompt=np.asarray(prompt, np.int32),
            committed=np.zeros(0, np.int32),
            sampling=sampling,
            stop=stop,
        )
        room = target.context_length - len(prompt)
        ending = Ending.of(stop, frozenset(target.eos_token_ids), room)
        session = Session(1, b"", request, ending, max_trees=1)
        scheduler.open(session, time.monotonic())
        if speculate:
            scheduler.join(_STREAM, 1, b"")
        drafting = _Drafting(self, Prefix(prompt), ending.max_generated) if speculate else None
        tokens: list[int] = []
        rounds: list[Round] = []
        began, draft_s = time.perf_counter(), 0.0
        while scheduler.num_sessions:
            if drafting is not None and tokens:
                drafted = time.perf_counter()
                tree = drafting.propose(sampling)
                draft_s = time.perf_counter() - drafted
                proposal = Proposal(tree, stream=_STREAM, draft_s=draft_s)
                scheduler.offer(1, session.name, proposal, time.monotonic())
            step = scheduler.plan(time.monotonic()).step
            assert step is not None, "a session alone is always ready"
            outcomes, timing = self._runner.run(step)
            scheduler.complete(step, outcomes, timing, time.monotonic())
            for event in scheduler.take_events():
                if isinstance(event, Failed):
                    raise event.error
                if not isinstance(event, Committed):
                    continue
                tokens += event.tokens
                if drafting is not None:
                    drafting.commit(event.tokens)
                now = time.perf_counter()
                if event.plain_reason != PlainReason.PLAIN_REASON_PREFILL:
                    rounds.append(
                        Round(
                            now - began,
                            len(event.tokens),
                            event.timing.num_rows,
                            draft=draft_s,
                            forward=event.timing.forward_s,
                            choice=event.timing.choice_s,
                        )
                    )
                began, draft_s = now, 0.0
        if drafting is not None:
            drafting.close()
        return Passage(tuple(tokens), tuple(rounds))


def load_one(model: str, precision: str, threads: int, config: Path | None) -> OneProcess:
    """Target and first proposer with the settings of the services that read the same file.

    Raises:
        Unsupported: the proposer works from hidden states, which only the services hand over.
    """
    flags = {"model": model, "precision": precision, "threads": threads, "log_level": "warning"}
    settings = VerifySettings.load(config, flags)
    proposer = make_proposers(DraftSettings.load(config, {"model": model}))[0]
    if proposer.describe().needs is not None:
        raise Unsupported(f"proposer {proposer.name} needs the target's hidden states")
    torch.set_num_threads(threads)
    return OneProcess(load(settings, lambda _what, _share: None), settings, proposer)


class _Drafting:
    """The proposer's side of one session."""

    def __init__(self, owner: OneProcess, prefix: Prefix, room: int) -> None:
        self._owner = owner
        self._prefix = prefix
        self._prompt_length = len(prefix)
        self._room = room
        self._seat: Seat | None = None

    def propose(self, sampling: Sampling) -> Tree | None:
        owner = self._owner
        if self._seat is None:
            mirror = Mirror(
                1, self._prefix, self._prompt_length, sampling, owner._limits, self._room
            )
            tier = owner._tier.within(owner._limits.max_nodes, owner._limits.max_depth)
            self._seat = Seat(mirror, tier, owner._proposer.open(mirror))
        seat = self._seat
        steps = min(owner._tier.num_steps, owner._limits.max_depth, max(0, seat.mirror.room - 1))
        seat.tier = replace(seat.tier, num_steps=steps)
        if seat.tier.off:
            return None
        made = owner._proposer.propose([seat])[0]
        if not isinstance(made, Tree):
            return None
        return trim(made, seat.tier.num_draft_tokens, seat.tier.num_steps)

    def commit(self, tokens: Sequence[int]) -> None:
        if self._seat is None:
            self._prefix.extend(tokens)
            self._room -= len(tokens)
            return
        mirror = self._seat.mirror
        digest = mirror.prefix.digest_after(tokens)
        mirror.commit(tokens, len(mirror.prefix) + len(tokens), digest)
        self._owner._proposer.commit(self._seat, tokens)

    def close(self) -> None:
        if self._seat is not None:
            self._owner._proposer.close(self._seat)
