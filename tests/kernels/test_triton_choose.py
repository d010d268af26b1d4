"""The Triton choice against the reference, in Triton's interpreter."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from graft.common.noise import uniforms
from graft.kernels.gpu import choose as gpu
from graft.kernels.gpu import support as gpu_support
from graft.kernels.ops import ChoiceRows
from graft.kernels.reference import choose as reference

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

SMALL_BLOCK = 64


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks and segments even at a small vocabulary."""
    monkeypatch.setattr(gpu, "BLOCK", SMALL_BLOCK)
    monkeypatch.setattr(gpu_support, "BLOCK", SMALL_BLOCK)
    monkeypatch.setattr(gpu_support, "LISTED", 16)


def laws(num_rows: int, **columns: list[float]) -> ChoiceRows:
    def column(name: str, missing: float, dtype: torch.dtype) -> torch.Tensor:
        return torch.tensor(columns.get(name, [missing] * num_rows), dtype=dtype)

    return ChoiceRows(
        temperature=column("temperature", 1.0, torch.float32),
        top_k=column("top_k", 0, torch.int32),
        top_p=column("top_p", 1.0, torch.float32),
        min_p=column("min_p", 0.0, torch.float32),
        seed=column("seed", 7, torch.int64),
        position=torch.arange(num_rows, dtype=torch.int32),
    )


def random_rows(rng: np.random.Generator, num_rows: int, vocab: int) -> ChoiceRows:
    def pick(values: list[float]) -> list[float]:
        return [float(value) for value in rng.choice(values, num_rows)]

    rows = laws(
        num_rows,
        temperature=pick([0.0, 1e-5, 0.05, 0.7, 1.0, 3.0, 1e38]),
        top_k=[int(v) for v in rng.choice([0, 1, 2, 5, vocab - 1, vocab, vocab + 9], num_rows)],
        top_p=pick([0.0, 0.01, 0.5, 0.9, 0.999, 1.0]),
        min_p=pick([0.0, 0.0, 0.02, 0.5, 1.0]),
        seed=[int(v) for v in rng.integers(-(2**63), 2**63 - 1, num_rows)],
    )
    counts = np.minimum(rng.integers(0, 4, num_rows), vocab)
    entries = int(counts.sum())
    ptr = np.concatenate([[0], np.cumsum(counts)])
    tokens = [rng.choice(vocab, count, replace=False) for count in counts]
    words = rng.integers(-(2**31), 2**31, (num_rows, -(-vocab // 32)))
    return ChoiceRows(
        **{name: getattr(rows, name) for name in ("temperature", "top_k", "top_p", "min_p")},
        seed=rows.seed,
        position=torch.from_numpy(rng.integers(0, 1 << 20, num_rows).astype(np.int32)),
        adjust_ptr=torch.from_numpy(ptr.astype(np.int32)),
        adjust_tokens=torch.from_numpy(np.concatenate(tokens).astype(np.int32)),
        adjust_ratio=torch.from_numpy(rng.uniform(0.5, 2.0, entries).astype(np.float32)),
        adjust_shift=torch.from_numpy(
            rng.choice([0.0, -3.0, 2.5, np.inf], entries).astype(np.float32)
        ),
        bitmask=torch.from_numpy(words.astype(np.int32)) if rng.random() < 0.5 else None,
    )


def random_logits(rng: np.random.Generator, num_rows: int, vocab: int) -> torch.Tensor:
    logits = (rng.normal(0, rng.choice([0.1, 3.0]), (num_rows, vocab))).astype(np.float32)
    for row in range(num_rows):
        kind = rng.integers(0, 8)
        if kind == 0:
            logits[row] = -np.inf
        elif kind == 1:
            logits[row, rng.integers(0, vocab)] = rng.choice([np.nan, np.inf])
        elif kind == 2:
            logits[row] = np.round(logits[row])  # many ties
        elif kind == 3:
            logits[row, rng.integers(0, vocab, vocab // 2)] = -np.inf
        elif kind == 4:
            logits[row, [0, vocab - 1]] += 20  # both ends of the vocabulary
        elif kind == 5:
            logits[row] = rng.choice([0.0, -0.0, 1e-39, -1e-39, 3e38, -3e38], vocab)
    return torch.from_numpy(logits)


def test_uniforms_in_registers_have_the_bits_of_the_common_noise() -> None:
    logits = torch.zeros(1, 200)
    rows = laws(1, seed=[-(2**63) + 12345])
    chosen = gpu.choose(logits, rows)
    noise = uniforms(2**63 + 12345, 0, 200)
    assert int(chosen[0]) == int(np.argmax(noise))


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 6), st.integers(1, 300))
def test_choices_equal_the_reference_bit_for_bit(seed: int, num_rows: int, vocab: int) -> None:
    rng = np.random.default_rng(seed)
    logits = random_logits(rng, num_rows, vocab)
    rows = random_rows(rng, num_rows, vocab)
    expected = reference.choose(logits.clone(), rows)
    assert torch.equal(gpu.choose(logits.clone(), rows), expected)


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 300))
def test_probabilities_equal_the_reference_bit_for_bit(
    seed: int, num_rows: int, vocab: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = random_logits(rng, num_rows, vocab)
    rows = random_rows(rng, num_rows, vocab)
    expected = reference.target_probs(logits.clone(), rows)
    assert torch.equal(gpu.target_probs(logits.clone(), rows), expected)


def test_logits_are_put_back_bit_for_bit() -> None:
    rng = np.random.default_rng(3)
    logits = random_logits(rng, 4, 100)
    logits[0, :3] = float("nan")
    before = logits.clone().view(torch.int32)
    gpu.choose(logits, random_rows(rng, 4, 100))
    assert torch.equal(logits.view(torch.int32), before)


def test_segments_do_not_change_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(4)
    logits = torch.from_numpy(rng.normal(size=(3, 500)).astype(np.float32))
    rows = laws(3, temperature=[0.0, 1.0, 0.5])
    expected = reference.choose(logits, rows)
    for programs in (1, 6, 3000):
        monkeypatch.setattr(gpu, "PROGRAMS", programs)
        assert torch.equal(gpu.choose(logits, rows), expected)


def test_equal_scores_give_the_lowest_token() -> None:
    assert gpu.choose(torch.zeros(1, 300), laws(1, temperature=[0.0])).tolist() == [0]


def test_a_row_of_another_device_layout_is_refused() -> None:
    logits = torch.zeros(300, 2).t()
    with pytest.raises(ValueError, match="logits is not contiguous"):
        gpu.choose(logits, laws(2))


def test_no_rows_give_no_choices() -> None:
    assert gpu.choose(torch.zeros(0, 10), laws(0)).shape == (0,)
