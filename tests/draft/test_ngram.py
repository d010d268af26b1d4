"""NGRAM: the field's golden trees, the tier's limits, and whose text a draft may come from."""

from __future__ import annotations

import itertools
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.common.errors import InvalidArgument
from graft.common.prefix import Prefix
from graft.common.sampling import Sampling
from graft.common.tier import Tier
from graft.common.tree import Tree, TreeLimits, check, from_parents
from graft.draft.mirror import Mirror
from graft.draft.proposers.base import Seat
from graft.draft.proposers.ngram import (
    Growth,
    MatchType,
    NgramOptions,
    NgramProposer,
    Share,
    expand_by_frequency,
    expand_by_recency,
)
from graft.draft.proposers.trie import Cursor, Trie

CORPUS = [1, 2, 3, 1, 2, 4, 1, 2, 3, 5]
CONTEXT = [9, 1, 2]
WIDE = Tier("ngram", num_steps=11, topk=8, num_draft_tokens=12)


def golden_trie() -> tuple[Trie, list[tuple[int, int]]]:
    trie = Trie(max_depth=4, capacity=1000, num_ranked=3)
    trie.insert(CORPUS)
    cursor = Cursor()
    trie.extend(cursor, CONTEXT)
    return trie, trie.matches(cursor, CONTEXT)


def same(left: Tree | None, right: Tree) -> bool:
    return left is not None and all(
        np.array_equal(getattr(left, name), getattr(right, name))
        for name in ("tokens", "parent", "next_token", "next_sibling", "depth")
    )


def mirror(tokens: list[int], *, salt: str = "", vocab_size: int = 1000) -> Mirror:
    return Mirror(
        session_id=1,
        prefix=Prefix(tokens),
        prompt_length=len(tokens),
        sampling=Sampling(),
        limits=TreeLimits(64, 32, vocab_size),
        room=1000,
        cache_salt=salt,
    )


def seated(proposer: NgramProposer, tokens: list[int], tier: Tier = WIDE, salt: str = "") -> Seat:
    session = mirror(tokens, salt=salt)
    return Seat(session, tier, proposer.open(session))


def commit(proposer: NgramProposer, seat: Seat, *tokens: int) -> None:
    prefix = seat.mirror.prefix
    seat.mirror.commit(tokens, len(prefix) + len(tokens), prefix.digest_after(tokens))
    proposer.commit(seat, tokens)


def drafts(proposer: NgramProposer, seat: Seat) -> Tree | None:
    (tree,) = proposer.propose([seat])
    return tree


@pytest.mark.parametrize("num_nodes", [6, 10])
def test_breadth_first_grows_the_golden_tree(num_nodes: int) -> None:
    trie, matches = golden_trie()
    growth = Growth(2, Tier("ngram", 8, 8, num_nodes))
    expand_by_recency(growth, trie, matches, 1, 3)
    assert [length for length, _ in matches] == [2, 1]
    assert same(growth.tree(), from_parents([2, 3, 4, 5, 1, 2], [-1, 0, 0, 1, 2, 4]))


def test_best_first_grows_the_golden_tree_with_its_probabilities() -> None:
    trie, matches = golden_trie()
    growth = Growth(2, Tier("ngram", 8, 8, 6))
    expand_by_frequency(growth, trie, matches, 3)
    tree = growth.tree()
    assert same(tree, from_parents([2, 3, 4, 1, 5, 1], [-1, 0, 0, 1, 1, 2]))
    assert tree is not None and tree.scores is not None
    # Preorder: root, 3, 3-1, 3-5, 4, 4-1.
    np.testing.assert_allclose(np.exp(tree.scores), [1, 2 / 3, 1 / 3, 1 / 3, 1 / 3, 1 / 3], 1e-6)


def test_a_text_that_repeats_itself_is_drafted_to_the_full_depth() -> None:
    proposer = NgramProposer(NgramOptions())
    line = list(range(20, 60))
    tree = drafts(proposer, seated(proposer, [*line, *line[:6]], Tier("ngram", 8, 1, 9)))
    assert tree is not None
    assert tree.tokens.tolist() == line[5:14]


def test_the_beginning_of_a_long_prompt_is_indexed_too() -> None:
    proposer = NgramProposer(NgramOptions())
    prompt = [7, 8, 9, 10, *(100 + i % 400 for i in range(3000)), 7, 8]
    tree = drafts(proposer, seated(proposer, prompt, Tier("ngram", 2, 1, 3)))
    assert tree is not None
    assert tree.tokens.tolist() == [8, 9, 10]


def test_nothing_is_proposed_where_nothing_matches() -> None:
    proposer = NgramProposer(NgramOptions())
    assert drafts(proposer, seated(proposer, list(range(50)))) is None


def test_a_match_shorter_than_min_match_is_no_match() -> None:
    prompt = [1, 2, 3, 4, 1]
    for min_match, found in ((1, True), (2, False)):
        proposer = NgramProposer(NgramOptions(min_match=min_match))
        assert (drafts(proposer, seated(proposer, prompt)) is not None) is found


def test_a_longer_match_earns_a_larger_tree() -> None:
    prompt = [*range(20, 60), 100, *range(20, 60), 200]
    for length, factor, num_nodes in ((1, 2.0, 3), (3, 2.0, 7), (9, 2.0, 12), (1, 0.0, 12)):
        proposer = NgramProposer(NgramOptions(spec_factor=factor))
        tree = drafts(proposer, seated(proposer, [*prompt, *range(20, 20 + length)]))
        assert tree is not None and tree.num_nodes == num_nodes


@pytest.mark.parametrize("match_type", list(MatchType))
@settings(deadline=None)
@given(
    text=st.lists(st.integers(0, 4), min_size=1, max_size=60),
    tier=st.builds(
        Tier, st.just("ngram"), st.integers(1, 6), st.integers(1, 4), st.integers(2, 12)
    ),
)
def test_trees_keep_to_their_tier_and_are_never_malformed(
    match_type: MatchType, text: list[int], tier: Tier
) -> None:
    proposer = NgramProposer(NgramOptions(match_type=match_type, max_trie_depth=5, max_breadth=4))
    tree = drafts(proposer, seated(proposer, text, tier))
    if tree is None:
        return
    check(tree, TreeLimits(tier.num_draft_tokens, tier.num_steps, 5))
    assert max(len(tree.children(node)) for node in range(tree.num_nodes)) <= tier.topk
    assert tree.tokens[0] == text[-1]
    assert tree.scores is not None and bool((tree.scores <= 0).all())


@pytest.mark.parametrize("match_type", list(MatchType))
@settings(deadline=None)
@given(
    text=st.lists(st.integers(0, 3), min_size=2, max_size=60),
    cuts=st.lists(st.integers(1, 59), max_size=5),
)
def test_a_session_drafts_what_a_fresh_one_with_its_text_would(
    match_type: MatchType, text: list[int], cuts: list[int]
) -> None:
    proposer = NgramProposer(NgramOptions(match_type=match_type, max_trie_depth=4, max_breadth=3))
    edges = sorted({cut for cut in cuts if cut < len(text)} | {len(text)})
    seat = seated(proposer, text[: edges[0]])
    for start, end in itertools.pairwise(edges):
        drafts(proposer, seat)
        commit(proposer, seat, *text[start:end])
    grown, fresh = drafts(proposer, seat), drafts(proposer, seated(proposer, text))
    assert (grown is None) == (fresh is None)
    assert grown is None or fresh is None or same(grown, fresh)


@pytest.mark.parametrize(
    ("share", "same_tenant", "others"),
    [(Share.OFF, False, False), (Share.TENANT, True, False), (Share.ALL, True, True)],
)
def test_text_is_shared_only_as_far_as_the_operator_says(
    share: Share, same_tenant: bool, others: bool
) -> None:
    proposer = NgramProposer(NgramOptions(share=share))
    proposer.close(seated(proposer, [1, 2, 3, 4, 5, 6], salt="a"))
    for salt, visible in (("a", same_tenant), ("b", others), ("", others)):
        # A context of its own for each, so that they do not find one another.
        tree = drafts(
            proposer, seated(proposer, [{"a": 70, "b": 80, "": 90}[salt], 1, 2, 3], salt=salt)
        )
        assert (tree is not None and int(tree.tokens[1]) == 4) is visible


def test_closing_a_session_leaves_others_as_they_were() -> None:
    proposer = NgramProposer(NgramOptions(share=Share.ALL))
    stays = seated(proposer, [1, 2, 3, 4, 1, 2])
    before = drafts(proposer, stays)
    leaves = seated(proposer, [500, 501, 502])
    proposer.close(leaves)
    after = drafts(proposer, stays)
    assert before is not None and after is not None and same(after, before)


@pytest.mark.parametrize(
    "numbers",
    [
        {"min_breadth": 0},
        {"min_breadth": 5, "max_breadth": 4},
        {"max_trie_depth": 1},
        {"capacity": 3},
        {"min_match": 18},
        {"spec_factor": -1.0},
        {"spec_factor": float("nan")},
    ],
)
def test_options_that_do_not_go_together_are_refused(numbers: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        NgramOptions(**numbers)


@pytest.mark.slow
def test_a_look_up_in_a_long_history_takes_less_than_a_millisecond() -> None:
    proposer = NgramProposer(NgramOptions())
    generator = np.random.default_rng(0)
    history = (generator.zipf(1.3, 128_000) % 900).tolist()
    seat = seated(proposer, history)
    spent = []
    for token in generator.zipf(1.3, 200) % 900:
        started = time.perf_counter()
        drafts(proposer, seat)
        spent.append(time.perf_counter() - started)
        commit(proposer, seat, int(token))
    assert sorted(spent)[len(spent) // 2] < 1e-3
