"""A mirror takes a commit that chains to it, and nothing else."""

from __future__ import annotations

import pytest

from graft.common.prefix import Prefix
from graft.common.sampling import Sampling
from graft.common.tree import TreeLimits
from graft.draft.mirror import ChainBroken, Mirror


def mirror(tokens: list[int], prompt_length: int = 2, vocab_size: int = 100) -> Mirror:
    return Mirror(1, Prefix(tokens), prompt_length, Sampling(), TreeLimits(8, 8, vocab_size), 10)


def test_a_commit_that_chains_extends_the_prefix_and_uses_up_room() -> None:
    session = mirror([1, 2, 3])
    session.commit((4, 5), 5, Prefix([1, 2, 3, 4, 5]).digest)
    assert session.prefix.tokens.tolist() == [1, 2, 3, 4, 5]
    assert session.prefix.root == 5
    assert session.room == 8


@pytest.mark.parametrize(
    ("tokens", "length", "digest_of"),
    [
        ((), 3, [1, 2, 3]),
        ((4,), 5, [1, 2, 3, 4]),
        ((4,), 3, [1, 2, 3, 4]),
        ((4,), 4, [1, 2, 3, 5]),
        ((4,), 4, [1, 2, 3]),
        ((100,), 4, [1, 2, 3, 100]),
    ],
)
def test_a_commit_that_does_not_chain_leaves_the_mirror_as_it_was(
    tokens: tuple[int, ...], length: int, digest_of: list[int]
) -> None:
    session = mirror([1, 2, 3])
    digest = session.prefix.digest
    with pytest.raises(ChainBroken):
        session.commit(tokens, length, Prefix(digest_of).digest)
    assert session.prefix.tokens.tolist() == [1, 2, 3]
    assert session.prefix.digest == digest
    assert session.room == 10


def test_a_prefix_that_cannot_be_one_is_refused() -> None:
    for tokens, prompt_length in (([], 0), ([1, 2], 3), ([1, 2], 0), ([1, 100], 2), ([-1], 1)):
        with pytest.raises(ChainBroken):
            mirror(tokens, prompt_length)
