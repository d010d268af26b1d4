"""Scripted drafters: proposers that do one thing, right or wrong, on purpose.

They sit in a real DraftServer and speak over the real wire. `baseline` says how the text truly goes
on after a prefix: it is given all committed tokens and returns the next ones, in order.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from graft.common.prefix import Prefix
from graft.common.tier import Tier
from graft.common.tree import Tree, from_parents
from graft.draft.candidate import candidate
from graft.draft.foresee import tier_of_branch, widened
from graft.draft.mirror import Mirror
from graft.draft.proposers.base import Foreseen, Proposal, ProposerInfo, Seat, Wire, chain
from graft.v1.tree_pb2 import CandidateTree

Baseline = Callable[[Sequence[int]], Sequence[int]]
Guess = Callable[[Seat], Proposal]


class Scripted:
    """A proposer made of one function of a seat."""

    def __init__(
        self,
        name: str,
        guess: Guess,
        *,
        depth: int = 4,
        vocab_size: int = 0,
        tokenizer_digest: str = "",
    ) -> None:
        self.name = name
        self.guess = guess
        self.num_batches = 0
        self.mirrors: dict[int, Mirror] = {}
        self._info = ProposerInfo(
            Tier(name, num_steps=depth, topk=4, num_draft_tokens=4 * depth + 1),
            detail="scripted, for tests",
            vocab_size=vocab_size,
            tokenizer_digest=tokenizer_digest,
            foresees=True,
        )

    def describe(self) -> ProposerInfo:
        """A tier `depth` deep with room for four nodes a level."""
        return self._info

    def open(self, mirror: Mirror) -> object:
        """Remembers the session."""
        self.mirrors[mirror.session_id] = mirror
        return None

    def propose(self, batch: Sequence[Seat]) -> Sequence[Proposal]:
        """The function's answer for each seat."""
        self.num_batches += 1
        return [self.guess(seat) for seat in batch]

    def commit(self, seat: Seat, tokens: Sequence[int]) -> None:
        """Nothing to keep."""

    def close(self, seat: Seat) -> None:
        """Forgets the session; branches end without a trace."""
        if self.mirrors.get(seat.mirror.session_id) is seat.mirror:
            del self.mirrors[seat.mirror.session_id]

    def adopt(self, seat: Seat, branch: Seat) -> bool:
        """There is nothing to take over."""
        return True

    def branch(self, seat: Seat, tokens: Sequence[int]) -> Seat | None:
        """A seat whose prefix goes on with `tokens`."""
        mirror = seat.mirror.ahead(tokens)
        return Seat(mirror, tier_of_branch(seat.tier, mirror))

    def foresee(self, seats: Sequence[Seat]) -> Sequence[Foreseen]:
        """The function's answers, for each seat and for one of a wider tier."""
        return [
            Foreseen(self._seen(seat, seat.tier), self._seen(seat, widened(seat.tier)))
            for seat in seats
        ]

    def _seen(self, seat: Seat, tier: Tier) -> Tree | None:
        guess = self.guess(Seat(seat.mirror, tier))
        return guess if isinstance(guess, Tree) else None


def replay(runs: Sequence[Sequence[int]]) -> Baseline:
    """The baseline that continues any prefix of the given texts (prompt and output together)."""

    def after(prefix: Sequence[int]) -> Sequence[int]:
        known = list(prefix)
        for run in runs:
            if list(run[: len(known)]) == known:
                return list(run[len(known) :])
        return []

    return after


def perfect(baseline: Baseline, depth: int = 4) -> Scripted:
    """Proposes exactly what comes."""
    return Scripted("perfect", lambda seat: chain(seat, _truth(baseline, seat)), depth=depth)


def always_wrong(baseline: Baseline, depth: int = 4) -> Scripted:
    """Proposes two chains of tokens that do not come."""

    def guess(seat: Seat) -> Tree | None:
        truth = list(_truth(baseline, seat)) + [0] * depth
        length = min(depth, seat.tier.num_steps, (seat.tier.num_draft_tokens - 1) // 2)
        if length < 1:
            return None
        tokens, parents = [seat.mirror.prefix.root], [-1]
        for shift in (1, 2):
            for level in range(length):
                parents.append(0 if level == 0 else len(tokens) - 1)
                tokens.append(_other(truth[level], seat, shift))
        return from_parents(tokens, parents)

    return Scripted("always_wrong", guess, depth=depth)


def first_wrong(baseline: Baseline, depth: int = 4) -> Scripted:
    """Proposes what comes, but for the first token."""

    def guess(seat: Seat) -> Tree | None:
        truth = list(_truth(baseline, seat)) or [0]
        return chain(seat, [_other(truth[0], seat), *truth[1:]])

    return Scripted("first_wrong", guess, depth=depth)


def accept_n(baseline: Baseline, n: int, depth: int = 4) -> Scripted:
    """Proposes `n` tokens that come, then ones that do not."""

    def guess(seat: Seat) -> Tree | None:
        truth = list(_truth(baseline, seat))[:depth]
        return chain(seat, truth[:n] + [_other(token, seat) for token in truth[n:]])

    return Scripted("accept_n", guess, depth=depth)


def likely(baseline: Baseline, n: int, depth: int = 4) -> Scripted:
    """As `accept_n`; in a wide tier every node has what comes and two others beside its child."""

    def guess(seat: Seat) -> Tree | None:
        truth = list(_truth(baseline, seat))[:depth]
        line = [*truth[:n], *(_other(token, seat) for token in truth[n:])]
        tokens, parents, scores, last = [seat.mirror.prefix.root], [-1], [0.0], 0
        for level, token in enumerate(line[: seat.tier.num_steps]):
            beside = [truth[level], _other(token, seat, 2), _other(token, seat, 3)]
            children = [token, *(one for one in beside if one != token)][: seat.tier.topk]
            shares = [math.log(share) for share in (0.6, 0.2, 0.1, 0.1)]
            for child, share in zip(children, shares, strict=False):
                tokens.append(child)
                parents.append(last)
                scores.append(scores[last] + share)
            last = len(tokens) - len(children)
        return from_parents(tokens, parents, scores) if len(tokens) > 1 else None

    return Scripted("likely", guess, depth=depth)


def eos_everywhere(eos: int, baseline: Baseline | None = None, depth: int = 4) -> Scripted:
    """Proposes the end-of-sequence id first at every node, and what comes beside it."""

    def guess(seat: Seat) -> Tree | None:
        truth = _truth(baseline, seat) if baseline is not None else []
        return _beside(seat, [eos], truth, depth)

    return Scripted("eos_everywhere", guess, depth=depth)


def off_schema(tokens: Sequence[int], baseline: Baseline | None = None, depth: int = 4) -> Scripted:
    """Proposes ids that a grammar forbids first at every node, and what comes beside them."""

    def guess(seat: Seat) -> Tree | None:
        truth = _truth(baseline, seat) if baseline is not None else []
        return _beside(seat, tokens, truth, depth)

    return Scripted("off_schema", guess, depth=depth)


def bad_ids(depth: int = 4) -> Scripted:
    """Sends trees whose ids are not in the vocabulary."""

    def guess(seat: Seat) -> Proposal:
        message = _chain_message(seat, [0] * depth)
        message.tokens = b"\xff" * len(message.tokens)
        return Wire((message,))

    return Scripted("bad_ids", guess, depth=depth)


def nan_scores(baseline: Baseline, depth: int = 4) -> Scripted:
    """Sends what comes, with scores that are not numbers."""

    def guess(seat: Seat) -> Proposal:
        message = _chain_message(seat, list(_truth(baseline, seat)) or [0])
        num_drafted = len(message.tokens) // _width(seat)
        message.scores = np.full(num_drafted, np.nan, "<f2").tobytes()
        return Wire((message,))

    return Scripted("nan_scores", guess, depth=depth)


def stale(baseline: Baseline, depth: int = 4) -> Scripted:
    """Sends trees that name the prefix before the last token, and what came after it."""

    def guess(seat: Seat) -> Proposal:
        tokens = seat.mirror.prefix.tokens
        former = Prefix(tokens[:-1])
        message = _chain_message(seat, [int(tokens[-1]), *_truth(baseline, seat)])
        message.prefix_length, message.prefix_digest = len(former), former.digest
        return Wire((message,))

    return Scripted("stale", guess, depth=depth)


def double(baseline: Baseline, depth: int = 4) -> Scripted:
    """Sends every tree twice."""

    def guess(seat: Seat) -> Proposal:
        message = _chain_message(seat, list(_truth(baseline, seat)) or [0])
        return Wire((message, message))

    return Scripted("double", guess, depth=depth)


def foreign(baseline: Baseline, depth: int = 4) -> Scripted:
    """Sends every tree in another session's name; in an unknown one's when there is no other."""

    def guess(seat: Seat) -> Proposal:
        mine = seat.mirror.session_id
        others = [session_id for session_id in drafter.mirrors if session_id != mine]
        message = _chain_message(seat, list(_truth(baseline, seat)) or [0])
        message.session_id = others[0] if others else mine ^ 1
        return Wire((message,))

    drafter = Scripted("foreign", guess, depth=depth)
    return drafter


def slow(inner: Scripted, delay_ms: float) -> Scripted:
    """Does what `inner` does, `delay_ms` later; `delay_ms` may be set anew."""

    class Slow(Scripted):
        delay_ms: float

        def propose(self, batch: Sequence[Seat]) -> Sequence[Proposal]:
            self.num_batches += 1
            time.sleep(self.delay_ms / 1e3)
            return inner.propose(batch)

    drafter = Slow("slow", inner.guess)
    drafter.delay_ms = delay_ms
    return drafter


class Hang(Scripted):
    """Never comes back from its first batch, until `released` is set."""

    def __init__(self) -> None:
        super().__init__("hang", self._never)
        self.released = threading.Event()

    def _never(self, seat: Seat) -> Proposal:
        self.released.wait()
        return None


def die_at(inner: Scripted, round_number: int, die: Callable[[], None]) -> Scripted:
    """Does what `inner` does; calls `die` instead of making batch `round_number`, from 1."""

    class Mortal(Scripted):
        def propose(self, batch: Sequence[Seat]) -> Sequence[Proposal]:
            self.num_batches += 1
            if self.num_batches == round_number:
                die()
                return [None] * len(batch)
            return inner.propose(batch)

    return Mortal("die_at", inner.guess)


def failing(inner: Scripted, rounds: frozenset[int]) -> Scripted:
    """Does what `inner` does; raises in the batches of `rounds`, from 1."""

    class Failing(Scripted):
        def propose(self, batch: Sequence[Seat]) -> Sequence[Proposal]:
            self.num_batches += 1
            if self.num_batches in rounds:
                raise RuntimeError(f"scripted failure in batch {self.num_batches}")
            return inner.propose(batch)

    return Failing("failing", inner.guess)


def wrong_vocab(baseline: Baseline, vocab_size: int = 7, tokenizer_digest: str = "") -> Scripted:
    """Was built for another vocabulary, and says so when it pairs."""
    return Scripted(
        "wrong_vocab",
        lambda seat: chain(seat, _truth(baseline, seat)),
        vocab_size=vocab_size,
        tokenizer_digest=tokenizer_digest,
    )


def _truth(baseline: Baseline, seat: Seat) -> Sequence[int]:
    return baseline(seat.mirror.prefix.tokens.tolist())


def _other(token: int, seat: Seat, shift: int = 1) -> int:
    return (token + shift) % seat.mirror.limits.vocab_size


def _width(seat: Seat) -> int:
    vocab_size = seat.mirror.limits.vocab_size
    return 2 if vocab_size <= 1 << 16 else 3


def _beside(seat: Seat, first: Sequence[int], truth: Sequence[int], depth: int) -> Tree | None:
    """A spine of `truth`, or of `first[0]` without one; all its nodes have `first` as children."""
    tokens, parents, spine = [seat.mirror.prefix.root], [-1], 0
    for level in range(min(depth, seat.tier.num_steps)):
        following = truth[level] if level < len(truth) else first[0]
        children = [*first, *([] if following in first else [following])]
        if len(tokens) + len(children) > seat.tier.num_draft_tokens:
            break
        for token in children:
            parents.append(spine)
            tokens.append(token)
        spine = len(tokens) - len(children) + children.index(following)
    return from_parents(tokens, parents) if len(tokens) > 1 else None


def _chain_message(seat: Seat, tokens: Sequence[int]) -> CandidateTree:
    length = max(1, min(len(tokens), seat.tier.num_steps, seat.tier.num_draft_tokens - 1))
    path = [seat.mirror.prefix.root, *tokens[:length]]
    return candidate(from_parents(path, list(range(-1, length))), seat.mirror)
