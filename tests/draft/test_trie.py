"""The trie counts, orders, evicts and matches as a plain dictionary of windows would."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.common.errors import InvalidArgument
from graft.draft.proposers.trie import NONE, ROOT, Cursor, Trie

TEXT = st.lists(st.integers(0, 3), max_size=40)
TEXTS = st.lists(TEXT, min_size=1, max_size=5)
Path = tuple[int, ...]


def paths(trie: Trie) -> dict[Path, int]:
    """Every node: its path and its number, children most recent first."""
    found: dict[Path, int] = {}
    stack: list[tuple[int, Path]] = [(ROOT, ())]
    while stack:
        node, path = stack.pop()
        for child in reversed(trie.recent(node, len(trie))):
            stack.append((child, (*path, trie.token[child])))
        if node != ROOT:
            found[path] = node
    return found


def windows(text: list[int], depth: int) -> Counter[Path]:
    """How often every n-gram of up to `depth` tokens occurs in the text."""
    return Counter(
        tuple(text[start:end])
        for start in range(len(text))
        for end in range(start + 1, min(start + depth, len(text)) + 1)
    )


def check_consistent(trie: Trie) -> None:
    """What must hold at any time."""
    nodes = paths(trie)
    assert len(nodes) + 1 == len(trie) <= trie.capacity
    for path, node in nodes.items():
        parent = trie.parent[node]
        assert trie.child(parent, path[-1]) == node
        if parent != ROOT:
            assert trie.frequency[parent] >= trie.frequency[node]
            assert trie.youngest[parent] >= trie.youngest[node]
        children = trie.recent(node, len(trie))
        assert len({trie.token[child] for child in children}) == len(children)


@given(TEXT, st.integers(2, 6))
def test_frequencies_are_the_counts_of_n_grams(text: list[int], depth: int) -> None:
    trie = Trie(depth, 10_000, 4)
    trie.insert(text)
    counted = {path: trie.frequency[node] for path, node in paths(trie).items()}
    assert counted == dict(windows(text, depth))


@given(TEXT, st.integers(2, 6))
def test_children_come_in_the_order_they_were_last_seen(text: list[int], depth: int) -> None:
    trie = Trie(depth, 10_000, 4)
    trie.insert(text)
    last = {
        path: start
        for start in range(len(text))
        for path in (tuple(text[start:end]) for end in range(start + 1, start + depth + 1))
    }
    for path, node in [((), ROOT), *paths(trie).items()]:
        seen = [last[(*path, trie.token[child])] for child in trie.recent(node, 10)]
        assert seen == sorted(seen, reverse=True)


@given(TEXT, TEXT, st.integers(2, 6))
def test_building_a_prompt_at_once_equals_feeding_it(
    prompt: list[int], more: list[int], depth: int
) -> None:
    fed, built = Trie(depth, 10_000, 4), Trie(depth, 10_000, 4)
    one = Cursor()
    fed.extend(one, prompt)
    two = built.start(np.asarray(prompt, np.int32))
    for _ in range(2):
        left, right = paths(fed), paths(built)
        assert list(left) == list(right)
        for path, node in left.items():
            twin = right[path]
            assert fed.frequency[node] == built.frequency[twin]
            assert fed.youngest[node] == built.youngest[twin]
        assert [length for length, _ in fed.matches(one, prompt)] == [
            length for length, _ in built.matches(two, prompt)
        ]
        fed.extend(one, more)
        built.extend(two, more)
        prompt = prompt + more
    check_consistent(built)


@given(TEXTS, st.integers(2, 5), st.integers(6, 40))
def test_eviction_takes_the_oldest_leaf_and_never_an_inner_node(
    texts: list[list[int]], depth: int, capacity: int
) -> None:
    trie = Trie(depth, capacity, 4)
    for text in texts:
        cursor = Cursor()
        for token in text:
            before, evicted = paths(trie), trie.num_evicted
            trie.extend(cursor, [token])
            check_consistent(trie)
            gone = before.keys() - paths(trie).keys()
            assert len(gone) <= trie.num_evicted - evicted
            for path in gone:
                assert not any(
                    other[: len(path)] == path and other not in gone
                    for other in before
                    if other != path
                )
        trie.close(cursor)


@given(TEXTS, st.integers(2, 5), st.integers(6, 40))
def test_a_match_after_eviction_equals_one_made_from_scratch(
    texts: list[list[int]], depth: int, capacity: int
) -> None:
    trie = Trie(depth, capacity, 4)
    for text in texts:
        cursor = Cursor()
        for end, token in enumerate(text, 1):
            trie.extend(cursor, [token])
            tail = text[:end][-depth:]
            fresh = [
                (len(tail) - i, node)
                for i, node in enumerate(trie.find(tail))
                if node != NONE and trie.recent(node, 1)
            ]
            assert trie.matches(cursor, tail) == fresh
        trie.close(cursor)


@settings(max_examples=60)
@given(TEXTS, st.integers(2, 5), st.integers(6, 60), st.randoms(use_true_random=False))
def test_texts_that_grow_side_by_side_keep_the_trie_sound(
    texts: list[list[int]], depth: int, capacity: int, random: object
) -> None:
    trie = Trie(depth, capacity, 4)
    cursors = [Cursor() for _ in texts]
    places = [0] * len(texts)
    order = [i for i, text in enumerate(texts) for _ in text]
    random.shuffle(order)  # type: ignore[attr-defined]
    for i in order:
        trie.extend(cursors[i], [texts[i][places[i]]])
        places[i] += 1
        check_consistent(trie)
        tail = texts[i][: places[i]][-depth:]
        fresh = trie.find(tail)
        assert all(node in fresh for _, node in trie.matches(cursors[i], tail))
        if places[i] == len(texts[i]):
            trie.close(cursors[i])
    # Once every text is over nothing is protected: a new one can have all the room.
    trie.insert(list(range(10, 10 + 3 * capacity)))
    assert all(path[0] >= 10 for path in paths(trie))


def shared_node(capacity: int) -> tuple[Trie, Cursor]:
    """A full trie; the cursor stands on node (1), which another text has finished with since."""
    trie = Trie(3, capacity, 4)
    cursor = Cursor()
    trie.extend(cursor, [1])
    trie.insert([1])
    for token in range(10, 10 + capacity - len(trie)):
        trie.insert([token])
    assert len(trie) == capacity
    return trie, cursor


def test_a_text_whose_node_is_evicted_to_make_room_for_its_own_child_goes_without() -> None:
    trie, cursor = shared_node(4)
    trie.extend(cursor, [2])
    check_consistent(trie)
    assert (1,) not in paths(trie)
    assert (2,) in paths(trie)


def test_a_text_does_not_go_on_below_a_node_that_has_become_another() -> None:
    trie, cursor = shared_node(4)
    trie.insert([99])
    assert (1,) not in paths(trie)
    trie.extend(cursor, [2])
    check_consistent(trie)
    assert (99, 2) not in paths(trie)


def test_a_suffix_that_had_no_room_is_matched_once_another_text_has_it() -> None:
    trie, cursor = shared_node(9)
    trie.extend(cursor, [2])
    assert trie.matches(cursor, [1, 2]) == []
    trie.insert([1, 2, 3])
    assert [length for length, _ in trie.matches(cursor, [1, 2])] == [2, 1]


def test_what_was_seen_lately_outlives_what_was_not() -> None:
    trie = Trie(2, 7, 4)
    trie.insert([1, 2])
    trie.insert([3, 4])
    trie.insert([1, 2])
    trie.insert([5, 6])
    assert (1, 2) in paths(trie)
    assert (3, 4) not in paths(trie)


@given(st.lists(st.integers(0, 150), max_size=400), st.lists(st.integers(0, 150), max_size=100))
@settings(max_examples=30)
def test_frequent_children_of_wide_nodes_stay_in_order(first: list[int], then: list[int]) -> None:
    trie = Trie(2, 260, 5)
    pairs = [token for middle in first for token in (200, middle)]
    cursor = Cursor()
    trie.extend(cursor, [*range(100), *[t for m in range(100) for t in (200, m)], *pairs])
    for token in [*then, *[t for m in then for t in (200, m)]]:
        trie.extend(cursor, [token])
        node = trie.child(ROOT, 200)
        if node == NONE:
            continue
        children = trie.recent(node, len(trie))
        expected = sorted(children, key=lambda c: (-trie.frequency[c], trie.token[c]))
        assert trie.frequent(node, 5) == expected[:5]


@pytest.mark.parametrize(("depth", "capacity"), [(1, 100), (4, 4)])
def test_numbers_that_hold_no_window_are_refused(depth: int, capacity: int) -> None:
    with pytest.raises(InvalidArgument):
        Trie(depth, capacity, 4)
