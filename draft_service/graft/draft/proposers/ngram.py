"""NGRAM: guesses that the text goes on as it, or a neighbour it may see, went on before.

Knows tries and trees; knows no model, no wire and no other session's text unless told to share.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from graft.common.errors import InvalidArgument
from graft.common.tier import Tier
from graft.common.tree import Tree, from_parents
from graft.draft.foresee import tier_of_branch, widened
from graft.draft.mirror import Mirror
from graft.draft.proposers.base import Foreseen, ProposerInfo, Seat
from graft.draft.proposers.trie import Cursor, Trie

_MAX_SHARED_TRIES = 64


class MatchType(Enum):
    """How a match is expanded: breadth first by recency, or best first by frequency."""

    BFS = "BFS"
    PROB = "PROB"


class Share(Enum):
    """Whose text a session's drafts may come from: its own, its tenant's (equal cache salts), all.

    Shared text shows only in speed: never in a token, but in how fast tokens come.
    """

    OFF = "off"
    TENANT = "tenant"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class NgramOptions:
    """The field's knobs (`ngram_*`), and three of ours: min_match, spec_factor and share.

    min_breadth, max_breadth: children taken after the longest and after the shortest match (BFS);
        PROB ranks by the `max_breadth` most frequent children of a node.
    max_trie_depth: tokens of a window, so the longest match is one less.
    capacity: nodes of a trie, root included; the least recently seen windows make room.
    min_match: tokens the longest match must have, or nothing is proposed; the field takes 1.
    spec_factor: drafted nodes for each token of the longest match; 0 sets no such limit, which is
        the field's algorithm. Short matches are poor guesses, and a row of a tree is not free on a
        CPU: with 2 a 12-node tree keeps nine tenths of its accept length for a third of its nodes
        on mixed chat, and long matches still get every node.
    share: whose text is used.

    Raises:
        InvalidArgument: a number is out of its range.
    """

    min_breadth: int = 1
    max_breadth: int = 10
    match_type: MatchType = MatchType.BFS
    max_trie_depth: int = 18
    capacity: int = 10_000_000
    min_match: int = 1
    spec_factor: float = 2.0
    share: Share = Share.OFF
    num_draft_tokens: int = 12

    def __post_init__(self) -> None:
        if not 0 < self.min_breadth <= self.max_breadth:
            raise InvalidArgument(
                f"ngram breadths are {self.min_breadth} to {self.max_breadth}, "
                "expected 0 < min <= max",
                field="ngram_min_bfs_breadth",
            )
        if not 0 < self.min_match < self.max_trie_depth:
            raise InvalidArgument(
                f"ngram_min_match is {self.min_match}, expected 1 to ngram_max_trie_depth - 1",
                field="ngram_min_match",
            )
        if not 0 <= self.spec_factor < math.inf:
            raise InvalidArgument(
                f"ngram_spec_factor is {self.spec_factor}, expected 0 or more",
                field="ngram_spec_factor",
            )
        # Checks depth and capacity.
        Trie(self.max_trie_depth, self.capacity, self.max_breadth)

    def num_nodes(self, match_length: int, most: int) -> int:
        """Nodes of a tree, root included, whose longest match has `match_length` tokens."""
        if self.spec_factor == 0:
            return most
        return min(most, 1 + math.ceil(self.spec_factor * match_length))


@dataclass(slots=True)
class _State:
    """cursor is None for a branch: its text is matched against the trie and not indexed."""

    trie: Trie
    cursor: Cursor | None


class NgramProposer:
    """Drafts from matches of the session's suffix in its own prompt and output."""

    name = "ngram"

    def __init__(self, options: NgramOptions) -> None:
        self._options = options
        self._shared: OrderedDict[str, Trie] = OrderedDict()

    def describe(self) -> ProposerInfo:
        """A tier as wide as the breadth and as deep as the nodes allow."""
        options = self._options
        return ProposerInfo(
            Tier(
                self.name,
                num_steps=options.num_draft_tokens - 1,
                topk=options.max_breadth,
                num_draft_tokens=options.num_draft_tokens,
            ),
            detail=f"n-gram look-up, {options.match_type.value}, windows of "
            f"{options.max_trie_depth} tokens, shared: {options.share.value}",
            foresees=True,
        )

    def open(self, mirror: Mirror) -> object:
        """Indexes the whole prefix."""
        trie = self._trie(mirror.cache_salt)
        return _State(trie, trie.start(mirror.prefix.tokens))

    def propose(self, batch: Sequence[Seat]) -> Sequence[Tree | None]:
        """One tree a seat; None where no suffix has been seen before."""
        return [self._tree(seat, seat.tier) for seat in batch]

    def branch(self, seat: Seat, tokens: Sequence[int]) -> Seat | None:
        """The likely text over the same trie; it is matched, not indexed."""
        mirror = seat.mirror.ahead(tokens)
        return Seat(mirror, tier_of_branch(seat.tier, mirror), _State(_state(seat).trie, None))

    def adopt(self, seat: Seat, branch: Seat) -> bool:
        """What was matched is the same text."""
        return True

    def foresee(self, seats: Sequence[Seat]) -> Sequence[Foreseen]:
        """The tree of each seat, and one with more of what was seen before."""
        return [
            Foreseen(None, None)
            if seat.tier.off
            else Foreseen(self._tree(seat, seat.tier), self._tree(seat, widened(seat.tier)))
            for seat in seats
        ]

    def commit(self, seat: Seat, tokens: Sequence[int]) -> None:
        """Indexes the new tokens."""
        state = _state(seat)
        assert state.cursor is not None, "tokens are committed to a branch"
        state.trie.extend(state.cursor, tokens)

    def close(self, seat: Seat) -> None:
        """Leaves the text to a shared trie; a trie of the session's own goes with it."""
        state = _state(seat)
        if state.cursor is not None:
            state.trie.close(state.cursor)

    def match_length(self, seat: Seat) -> int:
        """Tokens of the longest match that a tree would start from; 0 for none."""
        matches = self._matches(seat)
        return matches[0][0] if matches else 0

    def _matches(self, seat: Seat) -> list[tuple[int, int]]:
        options, state = self._options, _state(seat)
        tail = seat.mirror.prefix.tokens[-options.max_trie_depth :].tolist()
        found = (
            state.trie.matches_of(tail)
            if state.cursor is None
            else state.trie.matches(state.cursor, tail)
        )
        return [match for match in found if match[0] >= options.min_match]

    def _tree(self, seat: Seat, tier: Tier) -> Tree | None:
        """tier: the seat's own, or a wider one."""
        options, state, prefix = self._options, _state(seat), seat.mirror.prefix
        matches = self._matches(seat)
        if not matches:
            return None
        own = seat.tier.num_draft_tokens
        num_nodes = options.num_nodes(matches[0][0], own) + tier.num_draft_tokens - own
        growth = Growth(prefix.root, replace(tier, num_draft_tokens=num_nodes))
        if options.match_type is MatchType.BFS:
            expand_by_recency(growth, state.trie, matches, options.min_breadth, options.max_breadth)
        else:
            expand_by_frequency(growth, state.trie, matches, options.max_breadth)
        return growth.tree()

    def _trie(self, cache_salt: str) -> Trie:
        options = self._options
        if options.share is Share.OFF:
            return self._new_trie()
        key = cache_salt if options.share is Share.TENANT else ""
        if key not in self._shared:
            self._shared[key] = self._new_trie()
        self._shared.move_to_end(key)
        if len(self._shared) > _MAX_SHARED_TRIES:
            self._shared.popitem(last=False)
        return self._shared[key]

    def _new_trie(self) -> Trie:
        options = self._options
        return Trie(options.max_trie_depth, options.capacity, options.max_breadth)


class Growth:
    """A tree that grows by paths; equal paths are one, and the tier's limits hold throughout."""

    def __init__(self, root: int, tier: Tier) -> None:
        self._tier = tier
        self._tokens = [root]
        self._parents = [-1]
        self._depths = [0]
        self._scores = [0.0]
        self._children: list[dict[int, int]] = [{}]

    @property
    def full(self) -> bool:
        """True when the tree has all the nodes it may have."""
        return len(self._tokens) >= self._tier.num_draft_tokens

    def add(self, parent: int, token: int, share: float) -> int | None:
        """The child of `parent` that holds `token`, made now if need be; None when it may not be.

        `share` is the part of the parent's continuations that this token is, above 0 and at most 1.
        """
        known = self._children[parent].get(token)
        if known is not None:
            return known
        if (
            self.full
            or self._depths[parent] >= self._tier.num_steps
            or len(self._children[parent]) >= self._tier.topk
        ):
            return None
        node = len(self._tokens)
        self._children[parent][token] = node
        self._tokens.append(token)
        self._parents.append(parent)
        self._depths.append(self._depths[parent] + 1)
        self._scores.append(self._scores[parent] + math.log(share))
        self._children.append({})
        return node

    def tree(self) -> Tree | None:
        """The tree in preorder, siblings in the order they came; None for a root alone."""
        if len(self._tokens) == 1:
            return None
        return from_parents(self._tokens, self._parents, self._scores)


def expand_by_recency(
    growth: Growth,
    trie: Trie,
    matches: Sequence[tuple[int, int]],
    min_breadth: int,
    max_breadth: int,
) -> None:
    """Grows, in place, the latest continuations of each match, longest match first.

    A longer match starts narrower, and every level below narrows further: the breadth falls from
    `max_breadth` to `min_breadth` over the depth of the trie.

    Source:
        SGLang's NGRAM, BFS mode (reference section 8.4); siblings keep the order they came in.
    """
    levels = max(1, trie.max_depth - 1)
    scale = (max_breadth - min_breadth) / levels
    for length, anchor in matches:
        waiting = deque([(0, (levels - length) * scale + min_breadth, anchor)])
        while waiting:
            if growth.full:
                return
            parent, breadth, place = waiting.popleft()
            # The end of the text itself is counted at the anchor and was followed by nothing yet.
            seen = trie.frequency[place] - (place == anchor)
            for child in trie.recent(place, max(1, int(breadth))):
                share = trie.frequency[child] / max(seen, trie.frequency[child])
                node = growth.add(parent, trie.token[child], share)
                if node is not None:
                    waiting.append((node, breadth - scale, child))


def expand_by_frequency(
    growth: Growth, trie: Trie, matches: Sequence[tuple[int, int]], max_breadth: int
) -> None:
    """Grows, in place, the most probable continuations of each match, longest match first.

    A child's probability is its frequency among the `max_breadth` most frequent children, times
    its parent's; every match starts with 1. Equal probabilities go first come, first served.

    Source:
        SGLang's NGRAM, PROB mode (reference section 8.4).
    """
    heap: list[tuple[float, int, int, int, float]] = []
    arrived = 0

    def push(parent: int, place: int, probability: float) -> None:
        nonlocal arrived
        children = trie.frequent(place, max_breadth)
        total = sum(trie.frequency[child] for child in children)
        for child in children:
            share = trie.frequency[child] / total
            heapq.heappush(heap, (-probability * share, arrived, parent, child, share))
            arrived += 1

    for _, anchor in matches:
        push(0, anchor, 1.0)
        while heap:
            if growth.full:
                return
            negative, _, parent, child, share = heapq.heappop(heap)
            node = growth.add(parent, trie.token[child], share)
            if node is not None:
                push(node, child, -negative)


def _state(seat: Seat) -> _State:
    assert isinstance(seat.state, _State)
    return seat.state
