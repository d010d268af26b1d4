"""One session: its prefix, its pages, the trees it holds, and when its next round may start.

A state machine without I/O; time is passed in. Knows no other session and no tensor.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from dataclasses import dataclass
from enum import Enum

import numpy as np

from graft.common.draft_probs import Distribution
from graft.common.grammar import Grammar
from graft.common.prefix import Prefix
from graft.common.sampling import Sampling, StopRule
from graft.common.tree import IntArray, Tree
from graft.kernels.cpu.history import History
from graft.v1.tree_pb2 import TreeRefusal
from graft.v1.verify_pb2 import PlainReason
from graft.verify.ending import Cut, Ending
from graft.verify.events import TokenLogprob
from graft.verify.features import Feed
from graft.verify.grammar.matcher import SessionGrammar
from graft.verify.pages import PageTable
from graft.verify.patience import Patience
from graft.verify.shelf import PrefixName, Proposal, Room, Shelf

_REMEMBERED_PREFIXES = 64
_LATENCY_SHARE = 0.3


class Phase(Enum):
    """Where a session stands."""

    WAITING = "waiting"
    PREFILL = "prefill"
    DECODING = "decoding"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, eq=False)
class SessionRequest:
    """What a gateway asks for, checked at the door. prompt, committed: int32 token ids."""

    prompt: IntArray
    committed: IntArray
    sampling: Sampling
    stop: StopRule
    tree_deadline_s: float = 0.0
    num_top_logprobs: int = 0
    want_logprobs: bool = False
    want_prompt_logprobs: bool = False
    request_id: str = ""
    cache_salt: str = ""
    speculate: bool = False
    want_trace: bool = False
    grammar: Grammar | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """What the next round starts from: a tree, or the reason why there is none.

    decided: when the tree was there or given up. probs: as in `Proposal`.
    """

    tree: Tree | None
    plain_reason: PlainReason.ValueType
    decided: float
    draft_s: float = 0.0
    probs: tuple[Distribution, ...] = ()


class Session:
    """Mutable state of one generation; only the scheduler changes it.

    `length` tokens are committed; keys and values of `kv_length` of them are in the pages. While
    it decodes, kv_length == length - 1: the root is decided and not yet run.
    """

    def __init__(
        self,
        session_id: int,
        ticket: bytes,
        request: SessionRequest,
        ending: Ending,
        max_trees: int,
        room: Room | None = None,
    ) -> None:
        """max_trees, room: the most trees held for this session, and for all of them."""
        self.session_id = session_id
        self.ticket = ticket
        self.request = request
        self.ending = ending
        self.phase = Phase.WAITING
        self.prefix = Prefix(np.concatenate([request.prompt, request.committed]))
        self.prompt_length = len(request.prompt)
        self.table: PageTable | None = None
        self.kv_length = 0
        self.arrived = 0.0
        self.opened = False
        self.in_step = False
        self.cancelled = False
        self.streams: set[int] = set()
        self.told: set[int] = set()
        self.feed: Feed | None = None
        self.grammar: SessionGrammar | None = None
        self.shelf = Shelf(max_trees, room)
        self.tree_deadline_s = request.tree_deadline_s
        self.since = 0.0
        self.expecting = request.speculate
        self.draft_latency_s: float | None = None
        self.patience = Patience()
        self._ahead = self._behind = False
        self._wait_s = math.inf
        self.num_rounds = 0
        self.num_drafted = 0
        self.num_accepted = 0
        self.prompt_logprobs_due = request.want_prompt_logprobs
        self.prompt_logprobs: list[TokenLogprob] = []
        self._name: PrefixName = (len(self.prefix), self.prefix.digest)
        self._recent: deque[tuple[PrefixName, float]] = deque(maxlen=_REMEMBERED_PREFIXES)

    @property
    def length(self) -> int:
        """Committed tokens, prompt included."""
        return len(self.prefix)

    @property
    def generated(self) -> int:
        """Committed tokens after the prompt, replayed ones included."""
        return len(self.prefix) - self.prompt_length

    @property
    def room(self) -> int:
        """Tokens that may still be committed."""
        return self.ending.max_generated - self.generated

    @property
    def name(self) -> PrefixName:
        """(length, digest) of the committed prefix."""
        return self._name

    @property
    def has_tree(self) -> bool:
        """True when a tree for the committed prefix is held."""
        proposal = self.shelf.get(self._name)
        return proposal is not None and proposal.tree is not None

    @property
    def deadline(self) -> float:
        """When the wait for a tree ends."""
        return self.since + min(self.tree_deadline_s, self._wait_s)

    def pages(self) -> PageTable:
        """The page table; only a session with a place has one."""
        assert self.table is not None, f"session {self.session_id} has no pages"
        return self.table

    def history(self) -> History | None:
        """What penalties, bias and min_tokens look at; None when the law asks for none of it.

        Where there is a grammar its mask sees to min_tokens: what may end there, must.
        """
        sampling, ending = self.request.sampling, self.ending
        open_depth = ending.min_tokens - self.generated
        forbids = open_depth > 0 and self.grammar is None
        forbidden = tuple(sorted(ending.masked)) if forbids else ()
        if not (sampling.has_penalties or sampling.logit_bias or forbidden):
            return None
        tokens = self.prefix.tokens.tolist()
        return History(
            prompt=frozenset(tokens[: self.prompt_length]),
            generated=Counter(tokens[self.prompt_length :]),
            forbidden=forbidden,
            forbidden_depth=max(0, open_depth),
        )

    def turn(self, now: float) -> Turn | None:
        """What a round could start from now; None while a tree is worth waiting for."""
        proposal = self.shelf.get(self._name)
        if proposal is not None:
            decided = max(self.since, proposal.arrived)
            if proposal.tree is not None and proposal.tree.num_nodes > 1:
                tree = _with_root(proposal.tree, self.prefix.root)
                reason = PlainReason.PLAIN_REASON_UNSPECIFIED
                return Turn(tree, reason, decided, proposal.draft_s, proposal.probs)
            refused = proposal.refused
            reason = PlainReason.PLAIN_REASON_REFUSED if refused else PlainReason.PLAIN_REASON_EMPTY
            return Turn(None, reason, decided, proposal.draft_s)
        if not (self.request.speculate or self.streams):
            return Turn(None, PlainReason.PLAIN_REASON_OFF, self.since)
        if self._behind:
            return Turn(None, PlainReason.PLAIN_REASON_EMPTY, self.since)
        missing = (
            PlainReason.PLAIN_REASON_LATE if self.streams else PlainReason.PLAIN_REASON_NO_DRAFTER
        )
        if self._ahead:
            self.patience.missed(self.session_id, self._name)
        if not self.expecting:
            return Turn(None, missing, self.since)
        if now >= self.deadline:
            return Turn(None, missing, self.deadline)
        return None

    def tree_due(self) -> float:
        """When the awaited tree is likely to come, going by the ones before it."""
        return self.since + (self.draft_latency_s or 0.0)

    def give_up(self, turn: Turn) -> bool:
        """Notes the turn taken; True when a tree was waited for in vain.

        A drafter that missed its deadline is not waited for again until it has shown a tree in
        time: it costs one deadline, then nothing.
        """
        waited = turn.plain_reason in (
            PlainReason.PLAIN_REASON_LATE,
            PlainReason.PLAIN_REASON_NO_DRAFTER,
        )
        missed = waited and self.expecting and self._wait_s >= self.tree_deadline_s
        if missed:
            self.expecting = False
        return missed

    def offer(
        self, name: PrefixName, proposal: Proposal, now: float
    ) -> tuple[PrefixName, Proposal, TreeRefusal.ValueType] | None:
        """Takes a proposal for the prefix of `name`; returns what is dropped for it, and why."""
        if proposal.behind:
            self.expecting, self._behind = False, True
            return None
        if name == self._name and not self.in_step:
            if proposal.refused and self.has_tree:
                return None
            self._show_up(name, now - self.since)
            self.expecting = True
            return self.shelf.put(name, proposal, self._name)
        if name[0] <= self.length:
            for known, committed_at in ((self._name, self.since), *self._recent):
                if known == name:
                    self._show_up(name, now - committed_at)
            return (name, proposal, TreeRefusal.TREE_REFUSAL_STALE)
        if proposal.refused:
            return None
        self._ahead = True
        return self.shelf.put(name, proposal, self._name)

    def was_at(self, name: PrefixName) -> bool:
        """True when the session stood at this prefix, not long ago."""
        return any(known == name for known, _ in self._recent)

    def _show_up(self, name: PrefixName, latency_s: float) -> None:
        """A tree that came within its deadline, even for a prefix now passed, is worth waiting."""
        self._behind = False
        self.patience.came(self.session_id, name, latency_s)
        former = self.draft_latency_s
        self.draft_latency_s = (
            latency_s if former is None else former + _LATENCY_SHARE * (latency_s - former)
        )
        if latency_s <= self.tree_deadline_s:
            self.expecting = True

    def wait_at_most(self, tree_deadline_s: float) -> None:
        """Changes the deadline of trees; one that is given back is worth one wait again."""
        if self.tree_deadline_s != tree_deadline_s:
            self.expecting = tree_deadline_s > 0 and bool(self.streams)
        self.tree_deadline_s = tree_deadline_s

    def leave(self, stream: int) -> None:
        """A drafter is gone; with none left there is nothing to wait for."""
        self.streams.discard(stream)
        self.told.discard(stream)
        self._behind = False
        if not self.streams:
            self.expecting = False

    def commit(
        self, tokens: tuple[int, ...], accepted: int, now: float
    ) -> tuple[Cut, list[tuple[PrefixName, Proposal]]]:
        """Extends the prefix by the part of a block before the end; returns it and dead trees."""
        cut = self.ending.cut(tokens, self.generated)
        self._recent.append((self._name, self.since))
        self.prefix.extend(cut.tokens)
        if self.grammar is not None:
            self.grammar.commit(cut.tokens)
        self.kv_length = len(self.prefix) - 1
        self.num_accepted += min(accepted, len(cut.tokens))
        self.since = now
        self._wait_s = self.patience.wait_s() if self._ahead else math.inf
        self._name = (len(self.prefix), self.prefix.digest)
        return cut, self.shelf.advance(self._name)


def _with_root(tree: Tree, root: int) -> Tree:
    """The tree with the committed root in place; look-ahead trees come without knowing it."""
    if int(tree.tokens[0]) == root:
        return tree
    tokens = tree.tokens.copy()
    tokens[0] = root
    return Tree(tokens, tree.next_token, tree.next_sibling, tree.parent, tree.depth, tree.scores)
