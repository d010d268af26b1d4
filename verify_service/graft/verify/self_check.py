"""Before a replica serves: a few tokens with and without trees must be the same text.

A broken kernel, a wrong weight layout or a KV mix-up shows here, not in a user's answer. It also
touches all weights once, so that the first request does not pay for it.
"""

from __future__ import annotations

import numpy as np

from graft.common import log
from graft.common.errors import GraftError
from graft.common.sampling import Sampling, StopRule
from graft.common.tree import from_parents
from graft.verify.ending import Ending
from graft.verify.events import Committed, Failed
from graft.verify.loading import Loaded
from graft.verify.runner import Runner
from graft.verify.scheduler import Scheduler, SchedulerLimits
from graft.verify.session import Session, SessionRequest
from graft.verify.shelf import Proposal

_log = log.get("self-check")
_NUM_TOKENS = 8
_DEPTH = 3
_STREAM = 1
_LIMITS = SchedulerLimits(max_running=1, max_waiting=1, max_step_rows=64, chunk_tokens=64)


def check_target(loaded: Loaded) -> None:
    """Writes a short text twice; what it leaves in the KV pool belongs to nobody.

    Where the ops do not promise that a row's bits are the same in every batch, a near tie may
    tip, so there a difference is only logged.

    Raises:
        NumericFailure: the logits are not numbers.
        GraftError: the texts differ although they must not.
    """
    prompt = [token % loaded.target.vocab_size for token in range(7, 7 + 5)]
    count = min(_NUM_TOKENS, loaded.target.context_length - len(prompt))
    if count < 1:
        return
    plain = _text(loaded, prompt, count, ())
    drafted = _text(loaded, prompt, count, plain)
    if plain == drafted:
        return
    if loaded.ops.batch_invariant:
        raise GraftError(
            f"the self-check wrote {plain} without trees and {drafted} with them: "
            "this replica would not serve the target's own text"
        )
    _log.warning("texts differ", plain=plain, drafted=drafted)


def _text(loaded: Loaded, prompt: list[int], count: int, truth: tuple[int, ...]) -> tuple[int, ...]:
    """`count` tokens after the prompt; `truth` is drafted behind wrong siblings where given."""
    runner = Runner(loaded.target.decoder, loaded.ops, loaded.kv)
    scheduler = Scheduler(_LIMITS, loaded.new_pool())
    request = SessionRequest(
        prompt=np.asarray(prompt, np.int32),
        committed=np.zeros(0, np.int32),
        sampling=Sampling(),
        stop=StopRule(count),
    )
    ending = Ending.of(request.stop, frozenset(), count)
    session = Session(1, b"", request, ending, max_trees=1)
    scheduler.open(session, 0.0)
    scheduler.join(_STREAM, 1, b"")
    text: tuple[int, ...] = ()
    while scheduler.num_sessions:
        if text and truth:
            _offer(scheduler, session, truth[len(text) : len(text) + _DEPTH])
        step = scheduler.plan(0.0).step
        assert step is not None, "a session alone is always ready"
        outcomes, timing = runner.run(step)
        scheduler.complete(step, outcomes, timing, 0.0)
        for event in scheduler.take_events():
            if isinstance(event, Committed):
                text += event.tokens
            elif isinstance(event, Failed):
                raise event.error
    return text


def _offer(scheduler: Scheduler, session: Session, truth: tuple[int, ...]) -> None:
    tokens, parents, parent = [session.prefix.root], [-1], 0
    for token in truth:
        tokens += [0 if token else 1, token]
        parents += [parent, parent]
        parent = len(tokens) - 1
    proposal = Proposal(from_parents(tokens, parents), stream=_STREAM)
    scheduler.offer(session.session_id, session.name, proposal, 0.0)
