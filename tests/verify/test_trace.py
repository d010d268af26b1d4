"""The trace of a round: what the target made of each node, checked by hand."""

from __future__ import annotations

import math

import pytest
import torch

from graft.common.sampling import Sampling
from graft.common.tree import from_parents
from graft.kernels.cpu.torch_ops import TorchOps
from graft.kernels.rows import Law
from graft.kernels.rules import Decision
from graft.v1.sampling_pb2 import AcceptRule
from graft.verify.trace import traced

TREE = from_parents([7, 1, 2, 3], [-1, 0, 1, 0])


def _logits() -> torch.Tensor:
    """After the root token 1 has half of the mass, after node 1 token 0 has all but nothing."""
    logits = torch.full((4, 4), -torch.inf)
    logits[0] = torch.tensor([0.125, 0.5, 0.125, 0.25]).log()
    logits[1] = torch.tensor([0.9, 0.04, 0.03, 0.03]).log()
    logits[2:] = 0.0
    return logits


def test_a_trace_gives_each_node_its_probability_after_its_parent() -> None:
    law = Law(Sampling(temperature=0.0), TREE, prefix_length=5)
    trace = traced(law, Decision((0, 1), 0), _logits(), TorchOps())
    assert trace.tokens == (7, 1, 2, 3)
    assert trace.parents == (0, 1, 0)
    assert trace.path == (1,)
    assert [math.exp(value) for value in trace.logprobs] == pytest.approx([0.5, 0.03, 0.25])
    assert trace.choices[:2] == (1, 0)
    assert math.exp(trace.choice_logprobs[0]) == pytest.approx(0.5)
    assert math.exp(trace.bonus_logprob) == pytest.approx(0.9)


def test_a_rule_that_flips_coins_has_no_choice_at_every_node() -> None:
    sampling = Sampling(temperature=1.0, rule=AcceptRule.ACCEPT_RULE_TARGET_ONLY)
    trace = traced(Law(sampling, TREE, 5), Decision((0, 3), 2), _logits(), TorchOps())
    assert trace.choices == () and trace.choice_logprobs == ()
    assert trace.path == (3,)
    assert math.exp(trace.bonus_logprob) == pytest.approx(0.25)


def test_a_node_beside_the_path_may_have_nothing_to_choose() -> None:
    logits = _logits()
    logits[3] = torch.nan
    law = Law(Sampling(temperature=0.0), TREE, prefix_length=5)
    trace = traced(law, Decision((0, 1), 0), logits, TorchOps())
    assert trace.choice_logprobs[3] == -math.inf
