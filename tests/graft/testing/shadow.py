"""A target without a model, for the verify service's state machines.

Its text is a function of the prefix alone. Instead of keys and values every slot of its KV pool
holds the digest of the prefix that ends there, so that any mix-up of pages, slots or sessions
raises at the first row that would have read it. Knows steps and pages; knows no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from graft.common.prefix import Prefix
from graft.common.sampling import Sampling, StopRule
from graft.common.tree import Tree, from_parents
from graft.verify.ending import Ending
from graft.verify.pages import PagePool
from graft.verify.scheduler import Plan, Scheduler, SchedulerLimits
from graft.verify.session import Session, SessionRequest
from graft.verify.step import Chunk, Outcome, Recall, Step, StepTiming, Work

VOCAB = 50


def next_token(tokens: Sequence[int]) -> int:
    """What the shadow target writes after `tokens`."""
    return Prefix(tokens).digest % VOCAB


def text_after(tokens: Sequence[int], count: int) -> list[int]:
    """The next `count` tokens."""
    text = list(tokens)
    for _ in range(count):
        text.append(next_token(text))
    return text[len(tokens) :]


class ShadowTarget:
    """Runs steps, checking what every row would read."""

    def __init__(self) -> None:
        self._kv: dict[int, int] = {}

    def run(self, step: Step) -> list[Outcome]:
        """Outcomes in the order of the step's works."""
        return [self._run(work) for work in step.works]

    def _run(self, work: Work) -> Outcome:
        session = work.session
        tokens = session.prefix.tokens.tolist()
        self._check(session, tokens)
        if isinstance(work, Recall):
            assert work.stop <= session.kv_length, "a recall would read keys that are not there"
            assert not {*work.pages} & {*session.pages().pages}, "a recall would write a session's"
            for slot in work.write_slots.tolist():
                self._kv[slot] = -1
            return Outcome()
        if isinstance(work, Chunk):
            slots = session.pages().slots(work.start, work.stop).tolist()
            for position, slot in zip(range(work.start, work.stop), slots, strict=True):
                self._kv[slot] = Prefix(tokens[: position + 1]).digest
            return Outcome((next_token(tokens),)) if work.last else Outcome()
        return self._run_tree(work.tree, session, tokens)

    def _run_tree(self, tree: Tree, session: Session, tokens: list[int]) -> Outcome:
        start = session.kv_length
        slots = session.pages().slots(start, start + tree.num_nodes).tolist()
        for node, slot in enumerate(slots):
            path = [int(tree.tokens[i]) for i in tree.ancestors(node)]
            self._kv[slot] = Prefix([*tokens[:-1], *path]).digest
        nodes = [0]
        text = list(tokens)
        while True:
            text.append(next_token(text))
            wanted = [c for c in tree.children(nodes[-1]) if int(tree.tokens[c]) == text[-1]]
            if not wanted:
                break
            nodes.append(wanted[0])
        for place, node in enumerate(nodes):
            self._kv[slots[place]] = self._kv[slots[node]]
        return Outcome(tuple(text[len(tokens) :]), len(nodes) - 1)

    def _check(self, session: Session, tokens: list[int]) -> None:
        slots = session.pages().slots(0, session.kv_length).tolist()
        for position, slot in enumerate(slots):
            assert self._kv.get(slot) == Prefix(tokens[: position + 1]).digest, (
                f"position {position} of session {session.session_id} holds another prefix's KV"
            )


def new_session(
    session_id: int,
    prompt: Sequence[int],
    *,
    max_tokens: int = 8,
    committed: Sequence[int] = (),
    deadline_s: float = 0.05,
    speculate: bool = False,
    salt: str = "",
    eos: frozenset[int] = frozenset(),
    context: int = 1 << 20,
    max_trees: int = 4,
) -> Session:
    """A session as the door would make it; its ticket is its id in four bytes."""
    stop = StopRule(max_tokens)
    request = SessionRequest(
        prompt=np.asarray(prompt, np.int32),
        committed=np.asarray(committed, np.int32),
        sampling=Sampling(),
        stop=stop,
        tree_deadline_s=deadline_s,
        speculate=speculate,
        cache_salt=salt,
    )
    ending = Ending.of(stop, eos, context - len(prompt))
    return Session(session_id, session_id.to_bytes(4, "big"), request, ending, max_trees)


def new_scheduler(
    *,
    num_pages: int = 64,
    page_tokens: int = 4,
    max_running: int = 4,
    max_waiting: int = 8,
    max_step_rows: int = 64,
    chunk_tokens: int = 8,
) -> Scheduler:
    """A scheduler over a pool of its own."""
    limits = SchedulerLimits(max_running, max_waiting, max_step_rows, chunk_tokens)
    return Scheduler(limits, PagePool(num_pages, page_tokens))


def run_step(scheduler: Scheduler, target: ShadowTarget, now: float) -> Plan:
    """Plans one step and runs it if something is ready, checking every invariant."""
    plan = scheduler.plan(now)
    if plan.step is not None:
        outcomes = target.run(plan.step)
        scheduler.complete(plan.step, outcomes, StepTiming(now, 0.001, 0.001), now + 0.002)
        scheduler.check()
    return plan


def right_tree(tokens: Sequence[int], depth: int) -> Tree:
    """The chain that the shadow target will accept whole."""
    return from_parents([tokens[-1], *text_after(tokens, depth)], range(-1, depth))
