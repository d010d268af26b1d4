"""What a proposer is. Write one class with these five methods and the draft service serves it.

    class Echo:
        name = "echo"

        def describe(self) -> ProposerInfo:
            return ProposerInfo(Tier("echo", num_steps=4, num_draft_tokens=5), detail="repeats")

        def open(self, mirror: Mirror) -> object:
            return None

        def propose(self, batch: Sequence[Seat]) -> Sequence[Tree | None]:
            return [chain(seat, [seat.mirror.prefix.root] * seat.tier.num_steps) for seat in batch]

        def commit(self, seat: Seat, tokens: Sequence[int]) -> None: ...

        def close(self, seat: Seat) -> None: ...

Thread rules: the engine calls every method but `describe` from its one thread, never two at a time,
so a proposer needs no locks and may keep state that sessions share. It must not touch the event
loop, gRPC or another thread's objects. A method may take as long as it likes: that delays drafts,
and costs speed, never text. It may also raise: the batch then proposes nothing, the sessions'
states are opened anew, and the service goes on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from graft.common.draft_probs import Distribution
from graft.common.tier import Tier
from graft.common.tree import HARD_MAX_NODES, Tree, from_parents
from graft.draft.features import FeatureNeed
from graft.draft.mirror import Mirror
from graft.v1.tree_pb2 import CandidateTree


@dataclass(frozen=True, slots=True)
class ProposerInfo:
    """What peers are told about a proposer.

    default_tier: used when a request names only the proposer.
    max_nodes, max_depth: the most it proposes; nodes count the root.
    detail: a sentence for people.
    vocab_size, tokenizer_digest: what it was built for; 0 and "" when it takes the target's.
    needs: hidden states of the target that it works from; None works from tokens alone. `propose`
        is then called only for seats whose `mirror.features` hold the row of every committed token
        but the root, from their `start` on: after a commit of n tokens those of n positions more,
        the former root's first.
    foresees: it is a `Foreseer`, so a tier's look-ahead is honoured.
    sources: names of the proposers it is made of.
    """

    default_tier: Tier
    max_nodes: int = HARD_MAX_NODES
    max_depth: int = HARD_MAX_NODES - 1
    detail: str = ""
    vocab_size: int = 0
    tokenizer_digest: str = ""
    needs: FeatureNeed | None = None
    foresees: bool = False
    sources: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class Seat:
    """One session at one proposer.

    tier: in force for the next tree, already cut to the limits of both peers and to the session's
        room; `num_steps`, `topk` and `num_draft_tokens` bound depth, children and nodes.
    state: what `open` returned.
    """

    mirror: Mirror
    tier: Tier
    state: object = field(default=None)


@dataclass(frozen=True, slots=True)
class Wire:
    """A proposal already in wire form; it is sent exactly as it is, unchecked and uncounted.

    For tools and tests that need to say something a well-behaved draft service never says.
    """

    messages: tuple[CandidateTree, ...]


@dataclass(frozen=True, slots=True)
class Sampled:
    """A chain whose tokens were drawn by chance, for accept rules that compare probabilities.

    probs: one distribution a drafted node, each the one that its token was drawn from with
        `draft_probs.draw_uniform(seed, prefix length, step)`. Verify draws again and replaces a
        token that is another, so a chain that was drawn in any other way ends early.
    """

    tree: Tree
    probs: tuple[Distribution, ...]


Proposal = Tree | Sampled | Wire | None
"""A plain tree says that nothing was drawn: each token was the proposer's guess for certain."""


class Proposer(Protocol):
    """Guesses how sessions go on."""

    @property
    def name(self) -> str:
        """Its name in a tier."""
        ...

    def describe(self) -> ProposerInfo:
        """What peers are told. Called before the engine starts, and always the same."""
        ...

    def open(self, mirror: Mirror) -> object:
        """State for a session that has joined, or that has to be rebuilt; its prefix is known."""
        ...

    def propose(self, batch: Sequence[Seat]) -> Sequence[Proposal]:
        """One proposal a seat, in order: a tree whose root is the prefix's, or None for nothing."""
        ...

    def commit(self, seat: Seat, tokens: Sequence[int]) -> None:
        """Told after `tokens` were added to the seat's mirror; before the next `propose`."""
        ...

    def close(self, seat: Seat) -> None:
        """Told when the session is over, or before its state is opened anew."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Foreseen:
    """What a proposer sees from a prefix.

    tree: the proposal, within the seat's tier; None for nothing.
    wide: the same guesses, one level deeper and with more alternatives, from which likely outcomes
        of a round over `tree` are read; None sees nothing.
    """

    tree: Tree | None
    wide: Tree | None


@runtime_checkable
class Foreseer(Proposer, Protocol):
    """A proposer that can work from prefixes that are not committed yet, for look-ahead."""

    def branch(self, seat: Seat, tokens: Sequence[int]) -> Seat | None:
        """A seat of its own for the prefix that `tokens` would make; None when there is no room.

        `seat` may be a branch itself, and is left exactly as it is. `close` ends a branch.
        """
        ...

    def foresee(self, seats: Sequence[Seat]) -> Sequence[Foreseen]:
        """What is seen from each seat, in order: branches, once each, or sessions' own seats, in
        place of `propose`."""
        ...

    def adopt(self, seat: Seat, branch: Seat) -> bool:
        """The branch's prefix has been committed. True when its state is the seat's own now, as if
        it had been seen from there; the branch is closed in any case. Comes before `commit`."""
        ...


@runtime_checkable
class Follower(Proposer, Protocol):
    """A proposer that needs long to read what came before, and can do so piece by piece.

    While a seat is behind, it is not asked for proposals, and verify does not wait for them.
    """

    def behind(self, seat: Seat) -> int:
        """Tokens of its prefix that the seat lacks; 0 where a proposal may wait for them."""
        ...

    def follow(self, seats: Sequence[Seat]) -> None:
        """Reads a piece of what the seats lack; one that cannot be read stays as it is."""
        ...


def chain(seat: Seat, tokens: Sequence[int]) -> Tree | None:
    """A tree without branches under the seat's root, cut to its tier; None when nothing is left."""
    length = min(len(tokens), seat.tier.num_steps, seat.tier.num_draft_tokens - 1)
    if length <= 0:
        return None
    path = [seat.mirror.prefix.root, *tokens[:length]]
    return from_parents(path, list(range(-1, length)))
