"""The rank of drafted children: the target's own choice first, when drafter and target agree."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.common.sampling import Sampling
from graft.common.tree import root_only
from graft.draft.law import Noise, RowLaw, best_children
from graft.kernels.reference.choose import choose
from graft.kernels.rows import Law, choice_rows
from graft.v1.sampling_pb2 import AcceptRule

VOCAB = 97
SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 5]),
    top_p=st.sampled_from([1.0, 0.9, 0.5]),
    min_p=st.sampled_from([0.0, 0.1]),
    seed=st.integers(0, 2**64 - 1),
)


def logits(rows: int, seed: int) -> torch.Tensor:
    random = np.random.default_rng(seed)
    return torch.from_numpy((random.standard_normal((rows, VOCAB)) * 3).astype(np.float32))


def law(sampling: Sampling, position: int, ids: torch.Tensor | None = None) -> RowLaw:
    return RowLaw(sampling, Noise(sampling.seed, VOCAB, ids), position)


@given(SAMPLINGS, st.integers(1, 5000), st.integers(0, 1000))
@settings(deadline=None, max_examples=150)
def test_the_first_child_is_what_the_target_would_choose(
    sampling: Sampling, position: int, seed: int
) -> None:
    row = logits(1, seed)
    rows = choice_rows([Law(sampling, root_only(0), position)], VOCAB)
    children = best_children(row, [law(sampling, position)], 4)
    assert int(children.index[0, 0]) == int(choose(row, rows)[0])
    assert bool((children.probs[0].diff() <= 0).all())
    assert 0 < float(children.probs[0].sum()) <= 1 + 1e-5


def test_children_that_filters_drop_have_no_chance() -> None:
    sampling = Sampling(temperature=1.0, top_k=2, seed=5)
    row = logits(1, 3)
    children = best_children(row, [law(sampling, 7)], 4)
    kept = set(torch.topk(row[0], 2).indices.tolist())
    assert set(children.index[0, :2].tolist()) == kept
    assert children.probs[0, 2:].tolist() == [0, 0]


def test_a_cut_vocabulary_gets_the_noise_of_its_own_tokens() -> None:
    """Columns stand for tokens; the noise belongs to the token, wherever its column is."""
    ids = torch.from_numpy(np.random.default_rng(1).permutation(VOCAB)[:40].copy())
    sampling = Sampling(temperature=1.0, seed=5)
    row = logits(1, 4)
    only = torch.full_like(row, float("-inf"))
    only[0, ids] = row[0, ids]
    rows = choice_rows([Law(sampling, root_only(0), 11)], VOCAB)
    children = best_children(row[:, ids].contiguous(), [law(sampling, 11, ids)], 3)
    assert int(ids[children.index[0, 0]]) == int(choose(only, rows)[0])


def test_rows_of_different_laws_do_not_mix() -> None:
    laws = [
        law(Sampling(), 5),
        law(Sampling(temperature=1.0, seed=9), 5),
        law(Sampling(temperature=0.7, top_p=0.8, seed=9), 6),
    ]
    rows = logits(3, 8)
    together = best_children(rows, laws, 3)
    for i, one in enumerate(laws):
        alone = best_children(rows[i : i + 1], [one], 3)
        assert torch.equal(alone.index[0], together.index[i])
        torch.testing.assert_close(alone.probs[0], together.probs[i])


@pytest.mark.parametrize("width", [2047, 2048, 8192])
def test_the_children_of_wide_rows_are_the_likeliest_of_all(width: int) -> None:
    rows = torch.from_numpy(np.random.default_rng(3).standard_normal((5, width)).astype(np.float32))
    rows[1, 100] = rows[1, width - 1] = 9.0
    rows[2, 5:] = float("-inf")
    plain = RowLaw(Sampling(), Noise(0, width, None), 5)
    children = best_children(rows, [plain] * 5, 6)
    probs = torch.log_softmax(rows.double(), dim=1).exp()
    best = torch.topk(probs, 6, dim=1).values.float()
    torch.testing.assert_close(children.probs, best)
    torch.testing.assert_close(probs.gather(1, children.index).float(), best)


def test_neighbours_that_share_a_law_get_its_noise_and_others_do_not() -> None:
    shared, other = law(Sampling(temperature=1.0, seed=9), 5), law(Sampling(), 5)
    rows, laws = logits(5, 8), [shared, shared, other, shared, other]
    together = best_children(rows, laws, 3)
    for i, one in enumerate(laws):
        alone = best_children(rows[i : i + 1], [one], 3)
        assert torch.equal(alone.index[0], together.index[i])


@pytest.mark.parametrize(
    "rule", [AcceptRule.ACCEPT_RULE_TARGET_ONLY, AcceptRule.ACCEPT_RULE_REJECTION]
)
def test_rules_without_shared_noise_see_none(rule: AcceptRule.ValueType) -> None:
    sampling = Sampling(temperature=1.0, seed=9)
    row = logits(1, 8)
    plain = best_children(row, [law(Sampling(), 5)], 3)
    other = best_children(row, [law(dataclasses.replace(sampling, rule=rule), 5)], 3)
    assert torch.equal(plain.index, other.index)


def test_noise_of_decided_positions_is_forgotten() -> None:
    noise = Noise(3, VOCAB, None)
    kept = noise.at(10)
    noise.at(9)
    noise.forget(10)
    assert noise.at(10) is kept
    assert len(noise._at) == 1
