"""The n-gram trie: every window of the indexed text, with frequency, recency and leaf eviction.

Knows token ids; knows no session, no tree and no RPC. Belongs to one thread.

A node is a number into parallel arrays, so that a long prompt costs tens of bytes a node; node 0 is
the root and, as a child, stands for none. A text is fed through a `Cursor`, one token at a time:
each token lengthens the windows that began at the last `max_depth` positions. The nodes that hold
those windows are at the same time the matches of the text's own suffixes, so that indexing and
matching are one step of at most `max_depth` visits.

Recency: windows are numbered in the order they begin, and a node remembers the youngest window
through it. An ancestor is therefore never older than its descendants, and the oldest finished
window always ends in a leaf: eviction takes that leaf, in amortised constant time, and goes on to
its parent when no younger window passes through it. Inner nodes are never taken. A retired node
gets a new version, by which a cursor that still points to it sees that it is gone.

Source:
    SGLang's NGRAM corpus (reference section 8.2). There the last `max_depth` tokens are inserted
    anew at every step, which inflates frequencies; here each window is counted once.
"""

from __future__ import annotations

from array import array
from bisect import insort
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import islice

from graft.common.errors import InvalidArgument
from graft.common.tree import IntArray
from graft.draft.proposers.bulk import BRANCH_SHIFT, build

ROOT = 0
NONE = 0

_NEVER = -1
_SHIFT = BRANCH_SHIFT
_LOW = (1 << _SHIFT) - 1
_WIDE = 64


class Cursor:
    """Where one text stands: for each suffix, longest first, its node and the window that made it.

    `windows` holds -1 for a suffix that is not indexed, because the trie had no room for it.
    `versions` tell whether a node still is what it was.
    """

    __slots__ = ("nodes", "versions", "windows")

    def __init__(self) -> None:
        self.nodes: list[int] = []
        self.versions: list[int] = []
        self.windows: list[int] = []


class Trie:
    """Windows of up to `max_depth` tokens under one root, at most `capacity` nodes, root included.

    `num_ranked` is how many of a node's most frequent children `frequent` may be asked for.

    Raises:
        InvalidArgument: a depth below 2 or a capacity without room for one window.
    """

    def __init__(self, max_depth: int, capacity: int, num_ranked: int) -> None:
        if max_depth < 2:
            raise InvalidArgument(
                f"max_trie_depth is {max_depth}, expected at least 2", field="ngram_max_trie_depth"
            )
        if capacity <= max_depth:
            raise InvalidArgument(
                f"capacity is {capacity}, expected more than max_trie_depth ({max_depth})",
                field="ngram_capacity",
            )
        self.max_depth = max_depth
        self.capacity = capacity
        self.num_evicted = 0
        self._num_ranked = num_ranked
        self.token = array("i", [-1])
        self.parent = array("i", [-1])
        self.frequency = array("i", [0])
        self.youngest = array("q", [_NEVER])
        self._version = array("i", [0])
        self._fan = array("i", [0])
        self._first = array("i", [NONE])
        self._older = array("i", [NONE])
        self._newer = array("i", [NONE])
        self._branches: dict[int, int] = {}
        self._free: list[int] = []
        self._next_window = 0
        self._finished: deque[int] = deque()
        self._held: dict[int, int] = {}
        self._ranked: dict[int, list[tuple[int, int, int]]] = {}

    def __len__(self) -> int:
        """Number of nodes, root included."""
        return len(self.token) - len(self._free)

    def insert(self, tokens: Sequence[int]) -> None:
        """Indexes a whole text: windows of `max_depth` tokens, shorter ones at its end."""
        cursor = Cursor()
        self.extend(cursor, tokens)
        self.close(cursor)

    def start(self, tokens: IntArray) -> Cursor:
        """Indexes the beginning of a text as `extend` of a new cursor does, sooner when empty."""
        cursor = Cursor()
        if len(self) > 1 or len(tokens) * self.max_depth >= self.capacity:
            self.extend(cursor, tokens.tolist())
            return cursor
        built = build(tokens, self.max_depth, self._next_window)
        for name, column in built.columns.items():
            getattr(self, name).frombytes(column.tobytes())
        self._first[ROOT], self._fan[ROOT] = built.root_first, built.root_fan
        self._branches.update(zip(built.branch_keys, built.branch_nodes, strict=True))
        self._finished.extend(built.finished)
        self._next_window += len(tokens)
        cursor.nodes = built.last_nodes
        cursor.versions = [0] * len(cursor.nodes)
        cursor.windows = list(range(self._next_window - len(cursor.nodes), self._next_window))
        return cursor

    def extend(self, cursor: Cursor, tokens: Iterable[int]) -> None:
        """Indexes the next tokens of the cursor's text and moves the cursor onto them, in place."""
        nodes, versions, windows = cursor.nodes, cursor.versions, cursor.windows
        max_depth, version = self.max_depth, self._version
        for token in tokens:
            if len(nodes) == max_depth:
                self._finish(nodes[0], windows[0])
                del nodes[0], versions[0], windows[0]
            nodes.append(ROOT)
            versions.append(0)
            windows.append(self._next_window)
            self._next_window += 1
            for i, node in enumerate(nodes):
                window = windows[i]
                if window < 0:
                    continue
                child = NONE
                if version[node] == versions[i]:
                    child = self._visit(node, token, window)
                if child == NONE:
                    self._finish(node, window)
                    windows[i] = -1
                nodes[i], versions[i] = child, version[child]

    def close(self, cursor: Cursor) -> None:
        """Ends the cursor's text, in place; all its windows are finished."""
        for node, window in zip(cursor.nodes, cursor.windows, strict=True):
            self._finish(node, window)
        cursor.nodes, cursor.versions, cursor.windows = [], [], []

    def matches(self, cursor: Cursor, tail: Sequence[int]) -> list[tuple[int, int]]:
        """(length, node) of every suffix of the cursor's text that was followed by something.

        Longest first. `tail` is the end of the same text, at least its last `max_depth` tokens; the
        match is made from it anew when the cursor has lost a node.
        """
        nodes = cursor.nodes
        if any(window < 0 for window in cursor.windows) or any(
            self._version[node] != known for node, known in zip(nodes, cursor.versions, strict=True)
        ):
            nodes = self.find(tail)
        return self._followed(nodes)

    def matches_of(self, tail: Sequence[int]) -> list[tuple[int, int]]:
        """As `matches`, for a text that is not indexed, by its last `max_depth` tokens."""
        return self._followed(self.find(tail))

    def _followed(self, nodes: Sequence[int]) -> list[tuple[int, int]]:
        length = len(nodes)
        return [(length - i, node) for i, node in enumerate(nodes) if self._first[node] and node]

    def find(self, tail: Sequence[int]) -> list[int]:
        """The node of each suffix of `tail`, longest first, NONE where there is none."""
        nodes = []
        for start in range(max(0, len(tail) - self.max_depth), len(tail)):
            node = ROOT
            for token in tail[start:]:
                node = self.child(node, token)
                if node == NONE:
                    break
            nodes.append(node)
        return nodes

    def child(self, node: int, token: int) -> int:
        """The child of `node` that holds `token`, or NONE."""
        first = self._first[node]
        if first == NONE or self.token[first] == token:
            return first
        if self._fan[node] == 1:
            return NONE
        return self._branches.get(node << _SHIFT | token, NONE)

    def recent(self, node: int, count: int) -> list[int]:
        """Up to `count` children of `node`, the last visited first."""
        return list(islice(self._children(node), count))

    def frequent(self, node: int, count: int) -> list[int]:
        """Up to `count` children of `node`, the most frequent first, then the lower token.

        The order of a node with many children is kept up to date from the first question on.
        """
        if self._fan[node] <= _WIDE:
            return [child for _, _, child in sorted(map(self._rank, self._children(node)))[:count]]
        ranked = self._ranked.get(node)
        if ranked is None:
            ranked = sorted(map(self._rank, self._children(node)))[: self._num_ranked]
            self._ranked[node] = ranked
        return [child for _, _, child in ranked[:count]]

    def _children(self, node: int) -> Iterable[int]:
        child = self._first[node]
        while child != NONE:
            yield child
            child = self._older[child]

    def _rank(self, node: int) -> tuple[int, int, int]:
        return -self.frequency[node], self.token[node], node

    def _visit(self, node: int, token: int, window: int) -> int:
        """Counts one more `token` after `node`; the child, or NONE when there is no room for it."""
        first = self._first[node]
        child = first if first != NONE and self.token[first] == token else self.child(node, token)
        if child == NONE:
            child = self._create(node, token)
            if child == NONE:
                return NONE
        elif child != first:
            self._unlink(child)
            self._link(child)
        self.frequency[child] += 1
        if self.youngest[child] < window:
            self.youngest[child] = window
        if node in self._ranked:
            self._promote(node, child)
        return child

    def _promote(self, node: int, child: int) -> None:
        """Puts a child that was just counted into its place among the most frequent, in place."""
        ranked = self._ranked[node]
        before = (1 - self.frequency[child], self.token[child], child)
        if before in ranked:
            ranked.remove(before)
        insort(ranked, self._rank(child))
        del ranked[self._num_ranked :]

    def _create(self, parent: int, token: int) -> int:
        if self._free:
            node = self._free.pop()
        elif len(self.token) < self.capacity:
            node = len(self.token)
            for column in (self.token, self.parent, self.frequency, self._version, self._fan):
                column.append(0)
            for column in (self._first, self._older, self._newer):
                column.append(NONE)
            self.youngest.append(_NEVER)
        else:
            known = self._version[parent]
            node = self._evict()
            if node == NONE:
                return NONE
            if self._version[parent] != known:
                self._free.append(node)
                return NONE
        self.token[node] = token
        self.parent[node] = parent
        only = self._first[parent]
        if self._fan[parent] == 1:
            self._branches[parent << _SHIFT | self.token[only]] = only
        if self._fan[parent] >= 1:
            self._branches[parent << _SHIFT | token] = node
        self._fan[parent] += 1
        self._link(node)
        return node

    def _link(self, node: int) -> None:
        """Makes `node` the most recent child of its parent."""
        parent = self.parent[node]
        first = self._first[parent]
        self._older[node], self._newer[node] = first, NONE
        if first != NONE:
            self._newer[first] = node
        self._first[parent] = node

    def _unlink(self, node: int) -> None:
        older, newer = self._older[node], self._newer[node]
        if older != NONE:
            self._newer[older] = newer
        if newer != NONE:
            self._older[newer] = older
        else:
            self._first[self.parent[node]] = older

    def _finish(self, node: int, window: int) -> None:
        """Queues the last node of a window for eviction, in the order windows end."""
        if window < 0 or node == ROOT or self.youngest[node] != window:
            return
        self._finished.append(window << _SHIFT | node)
        if len(self._finished) > 2 * len(self.token) + 64:
            self._finished = deque(entry for entry in self._finished if self._stands(entry))

    def _stands(self, entry: int) -> bool:
        return self.youngest[entry & _LOW] == entry >> _SHIFT

    def _evict(self) -> int:
        """Retires the leaf at the end of the oldest finished window; NONE when there is none."""
        finished = self._finished
        while finished:
            entry = finished.popleft()
            if not self._stands(entry):
                continue
            node, window = entry & _LOW, entry >> _SHIFT
            if self._fan[node]:
                # An older window of another text still grows below; its end brings this one back.
                self._held[node] = entry
                continue
            parent = self.parent[node]
            self._retire(node)
            if self.youngest[parent] == window:
                finished.appendleft(window << _SHIFT | parent)
            elif not self._fan[parent] and parent in self._held:
                finished.appendleft(self._held.pop(parent))
            return node
        return NONE

    def _retire(self, node: int) -> None:
        parent = self.parent[node]
        self._unlink(node)
        if self._fan[parent] >= 2:
            del self._branches[parent << _SHIFT | self.token[node]]
        self._fan[parent] -= 1
        if self._fan[parent] == 1:
            only = self._first[parent]
            del self._branches[parent << _SHIFT | self.token[only]]
        if any(child == node for _, _, child in self._ranked.get(parent, ())):
            del self._ranked[parent]
        self._held.pop(node, None)
        self._version[node] += 1
        self.frequency[node] = 0
        self.youngest[node] = _NEVER
        self.num_evicted += 1
