"""Scores of tokens under the unfiltered softmax."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from graft.verify.logprobs import score_tokens


def test_a_score_is_the_log_of_the_softmax() -> None:
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]))
    scores = score_tokens(logits, np.asarray([1, 2], np.int32), 0)
    assert [score.token for score in scores] == [1, 2]
    assert [score.logprob for score in scores] == pytest.approx([math.log(0.25), math.log(0.7)])
    assert scores[0].top_tokens == ()


def test_ties_among_the_best_go_to_the_lower_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 2.0, 3.0, 2.0, 3.0]])
    (score,) = score_tokens(logits, np.asarray([0], np.int32), 4)
    assert score.top_tokens == (1, 3, 5, 2)


def test_more_alternatives_than_tokens_are_all_tokens() -> None:
    (score,) = score_tokens(torch.tensor([[1.0, 2.0]]), np.asarray([0], np.int32), 5)
    assert score.top_tokens == (1, 0)
    assert sum(math.exp(value) for value in score.top_logprobs) == pytest.approx(1.0)


def test_minus_infinity_is_a_score_too() -> None:
    logits = torch.tensor([[0.0, -math.inf]])
    (score,) = score_tokens(logits, np.asarray([1], np.int32), 1)
    assert score.logprob == -math.inf
