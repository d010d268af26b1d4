"""Each scripted drafter does over the wire what its name says."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest

from graft.common.prefix import Prefix
from graft.common.tier import Tier
from graft.common.tree import Tree, TreeLimits, TreeRefused
from graft.common.tree_codec import decode
from graft.testing import scripted
from graft.testing.drafting import drafting
from graft.testing.scripted import Scripted
from graft.v1.tree_pb2 import CandidateTree, TreeRefusal

TEXT = list(range(10, 40))
PROMPT = TEXT[:5]
BASELINE = scripted.replay([TEXT])
LIMITS = TreeLimits(16, 8, 320)


def read(message: CandidateTree) -> Tree:
    return decode(PROMPT[-1], message.shape, message.tokens, message.scores, LIMITS)


def accepted(tree: Tree, truth: list[int]) -> int:
    """Drafted tokens a target that says `truth` would accept."""
    node, count = 0, 0
    for token in truth:
        following = [child for child in tree.children(node) if tree.tokens[child] == token]
        if not following:
            break
        node, count = following[0], count + 1
    return count


async def first_trees(drafter: Scripted, num_trees: int = 1) -> list[CandidateTree]:
    async with drafting([drafter]) as it:
        rounds, _ = await it.joined(5, PROMPT, Tier(drafter.name, 4, 4, 16))
        return [await rounds.next("trees") for _ in range(num_trees)]


@pytest.mark.parametrize(
    ("make", "num_accepted"),
    [
        (lambda: scripted.perfect(BASELINE), 4),
        (lambda: scripted.always_wrong(BASELINE), 0),
        (lambda: scripted.first_wrong(BASELINE), 0),
        (lambda: scripted.accept_n(BASELINE, 0), 0),
        (lambda: scripted.accept_n(BASELINE, 2), 2),
        (lambda: scripted.accept_n(BASELINE, 4), 4),
        (lambda: scripted.eos_everywhere(2, BASELINE), 4),
        (lambda: scripted.eos_everywhere(2), 0),
        (lambda: scripted.off_schema([2, 3], BASELINE), 4),
        (lambda: scripted.slow(scripted.perfect(BASELINE), 1), 4),
        (lambda: scripted.die_at(scripted.perfect(BASELINE), 2, lambda: None), 4),
    ],
)
async def test_well_formed_ones_are_accepted_as_far_as_they_should(
    make: Callable[[], Scripted], num_accepted: int
) -> None:
    (message,) = await first_trees(make())
    assert accepted(read(message), TEXT[5:]) == num_accepted


async def test_eos_stands_first_at_every_node_of_the_spine() -> None:
    (message,) = await first_trees(scripted.eos_everywhere(2, BASELINE))
    tree = read(message)
    inner = [node for node in range(tree.num_nodes) if tree.children(node)]
    assert len(inner) == 4
    assert all(tree.tokens[tree.children(node)[0]] == 2 for node in inner)


@pytest.mark.parametrize(
    ("make", "refusal"),
    [
        (scripted.bad_ids, TreeRefusal.TREE_REFUSAL_TOKEN_RANGE),
        (lambda: scripted.nan_scores(BASELINE), TreeRefusal.TREE_REFUSAL_BAD_SCORES),
    ],
)
async def test_malformed_ones_reach_the_wire_and_are_refused_there(
    make: Callable[[], Scripted], refusal: TreeRefusal.ValueType
) -> None:
    (message,) = await first_trees(make())
    with pytest.raises(TreeRefused) as refused:
        read(message)
    assert refused.value.refusal == refusal


async def test_stale_names_the_prefix_before_the_last_token() -> None:
    (message,) = await first_trees(scripted.stale(BASELINE))
    former = Prefix(PROMPT[:-1])
    assert (message.prefix_length, message.prefix_digest) == (4, former.digest)
    assert read(message).tokens.tolist()[1:] == TEXT[4:8]


async def test_double_sends_the_same_tree_twice() -> None:
    first, second = await first_trees(scripted.double(BASELINE), 2)
    assert first == second
    assert accepted(read(first), TEXT[5:]) == 4


async def test_foreign_speaks_in_the_name_of_another_session() -> None:
    drafter = scripted.foreign(BASELINE)
    async with drafting([drafter]) as it:
        rounds, _ = await it.joined(5, PROMPT, Tier("foreign", 2, 1, 3))
        assert (await rounds.next("trees")).session_id == 4
        await it.gateway.attend(it.replica.address, 6, Tier("foreign", 2, 1, 3))
        await rounds.next("joins")
        session = rounds.prefix(6, PROMPT)
        assert (await rounds.next("trees")).session_id == 5
        session.commit(15)


async def test_hang_says_nothing_until_it_is_released_and_does_not_stop_the_service() -> None:
    drafter = scripted.Hang()
    async with drafting([drafter]) as it:
        rounds, _ = await it.joined(5, PROMPT, Tier("hang", 2, 1, 3))
        assert (await it.gateway.next("status")).session_count >= 0
        assert rounds.pending() == []
        drafter.released.set()
        assert (await rounds.next("empties")).prefix_length == 5


async def test_die_at_dies_in_the_round_it_was_told() -> None:
    died = threading.Event()
    drafter = scripted.die_at(scripted.perfect(BASELINE), 2, died.set)
    async with drafting([drafter]) as it:
        rounds, session = await it.joined(5, PROMPT, Tier("die_at", 2, 1, 3))
        await rounds.next("trees")
        assert not died.is_set()
        session.commit(15)
        await rounds.next("empties")
        assert died.is_set()


async def test_wrong_vocab_says_so_in_its_hello() -> None:
    async with drafting([scripted.wrong_vocab(BASELINE, 7)]) as it:
        await it.gateway.attend(it.replica.address, 5, Tier("wrong_vocab", 2, 1, 3))
        rounds = await it.replica.verify.stream()
        assert rounds.hello.vocab_size == 7
        assert "7 tokens" in (await it.gateway.next("refused")).detail
