"""Accept rules on the wire: who names one, which is in force, and what a tree must say for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
import pytest_asyncio

from graft.common.draft_probs import certain, encode_probs
from graft.common.errors import InvalidArgument, Unsupported
from graft.common.server import error_from_call
from graft.common.tree import chain
from graft.testing.verify_client import Generation, Say, Seat, VerifyBench, running_verify
from graft.v1 import verify_pb2
from graft.v1.sampling_pb2 import AcceptRule, Sampling
from graft.v1.tree_pb2 import CandidateTree, TreeRefusal
from graft.v1.verify_pb2 import PlainReason

COUPLED, TARGET_ONLY, REJECTION, BLOCK = (
    AcceptRule.ACCEPT_RULE_COUPLED,
    AcceptRule.ACCEPT_RULE_TARGET_ONLY,
    AcceptRule.ACCEPT_RULE_REJECTION,
    AcceptRule.ACCEPT_RULE_BLOCK,
)
PROMPT = [5, 6, 7]
VOCAB = 320


@pytest_asyncio.fixture
async def bench(tiny_model: Path) -> AsyncIterator[VerifyBench]:
    async with running_verify(tiny_model) as running:
        yield running


def proposal(seat: Seat) -> CandidateTree:
    return seat.propose(chain([seat.tokens[-1], 1, 2]))


async def drafted(bench: VerifyBench, sampling: Sampling, **says: object) -> Generation:
    """A session of 12 tokens whose every tree says this of its probabilities."""

    async def script(seat: Seat) -> Say | None:
        tree = proposal(seat)
        tree.MergeFrom(CandidateTree(**says))  # type: ignore[arg-type]
        return Say(trees=[tree])

    drafter = bench.drafter(script)
    generation = await bench.generate(PROMPT, 12, drafter=drafter, sampling=sampling)
    await drafter.die()
    assert len(generation.tokens) == 12
    return generation


@pytest.mark.parametrize("rule", [REJECTION, BLOCK])
async def test_a_tree_without_probabilities_is_refused_by_name_and_the_round_runs_plainly(
    bench: VerifyBench, rule: AcceptRule.ValueType
) -> None:
    generation = await drafted(bench, Sampling(temperature=0.7, seed=1, rule=rule))
    assert all(commit.node_count == 0 for commit in generation.commits)
    reasons = {commit.plain_reason for commit in generation.commits[1:]}
    assert PlainReason.PLAIN_REASON_REFUSED in reasons
    assert bench.metric("graft_rejected_trees_total", reason="no_probs") > 5


@pytest.mark.parametrize("rule", [REJECTION, BLOCK])
async def test_one_hot_trees_and_drawn_ones_are_verified(
    bench: VerifyBench, rule: AcceptRule.ValueType
) -> None:
    sampling = Sampling(temperature=0.7, seed=1, rule=rule)
    probs = encode_probs([certain(1), certain(2)], VOCAB)
    texts = []
    for generation in (
        await drafted(bench, sampling, one_hot=True),
        await drafted(bench, sampling, probs=probs),
    ):
        assert sum(commit.node_count for commit in generation.commits) > 10
        texts.append(generation.tokens)
    assert texts[0] == texts[1]
    assert bench.metric("graft_rejected_trees_total", reason="no_probs") == 0
    name = AcceptRule.Name(rule).removeprefix("ACCEPT_RULE_").lower()
    assert bench.metric("graft_rule_rounds_total", rule=name) >= 8


async def test_probabilities_that_are_none_are_refused_by_name(bench: VerifyBench) -> None:
    sampling = Sampling(temperature=0.7, seed=1, rule=REJECTION)
    wrong = encode_probs([certain(1), certain(9)], VOCAB)
    await drafted(bench, sampling, probs=wrong)
    both = encode_probs([certain(1), certain(2)], VOCAB)
    await drafted(bench, sampling, probs=both, one_hot=True)
    assert bench.metric("graft_rejected_trees_total", reason="bad_probs") > 10
    assert TreeRefusal.Name(12) == "TREE_REFUSAL_BAD_PROBS"


async def test_greedy_sessions_need_no_probabilities(bench: VerifyBench) -> None:
    plain = await bench.generate(PROMPT, 12)
    generation = await drafted(bench, Sampling(rule=REJECTION))
    assert generation.tokens == plain.tokens
    assert sum(commit.node_count for commit in generation.commits) > 10


async def test_a_session_says_which_rule_is_in_force(tiny_model: Path) -> None:
    async with running_verify(tiny_model, accept_rule="target_only", threshold_single=0.5) as bench:
        unnamed = (await bench.generate(PROMPT, 2)).opened
        named = (await bench.generate(PROMPT, 2, sampling=Sampling(rule=BLOCK))).opened
        about = await bench.stub.Describe(verify_pb2.VerifyServiceDescribeRequest())
        assert bench.metric("graft_rule_rounds_total", rule="target_only_lossy") == 2
    assert unnamed is not None and named is not None
    assert (unnamed.rule, unnamed.threshold_single, unnamed.threshold_acc) == (TARGET_ONLY, 0.5, 1)
    assert (named.rule, named.threshold_single, named.threshold_acc) == (BLOCK, 1, 1)
    assert list(about.accept_rules) == [COUPLED, TARGET_ONLY, REJECTION, BLOCK]


@pytest.mark.parametrize(
    ("sampling", "kind", "says"),
    [
        (Sampling(threshold_acc=0.5), InvalidArgument, "no meaning under the coupled rule"),
        (
            Sampling(rule=REJECTION, threshold_single=0.5),
            InvalidArgument,
            "no meaning under the rejection rule",
        ),
        (Sampling(rule=77), Unsupported, "rule 77 is not offered"),  # type: ignore[arg-type]
    ],
)
async def test_what_cannot_be_honoured_is_refused_with_a_sentence(
    bench: VerifyBench, sampling: Sampling, kind: type[Exception], says: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await bench.generate(PROMPT, 2, sampling=sampling)
    error = error_from_call(caught.value)
    assert isinstance(error, kind)
    assert says in str(error)


@pytest.mark.parametrize("rule", [TARGET_ONLY, REJECTION, BLOCK])
async def test_log_probabilities_are_the_target_s_under_every_rule(
    bench: VerifyBench, rule: AcceptRule.ValueType
) -> None:
    async def script(seat: Seat) -> Say | None:
        tree = proposal(seat)
        tree.one_hot = True
        return Say(trees=[tree])

    drafter = bench.drafter(script)
    sampling = Sampling(temperature=0.9, seed=3, rule=rule)
    scored = {"sampling": sampling, "want_logprobs": True, "top_logprobs": 2}
    generation = await bench.generate(PROMPT, 10, drafter=drafter, **scored)
    await drafter.die()
    replayed = await bench.generate(
        [*PROMPT, *generation.tokens], 1, want_logprobs=True, want_prompt_logprobs=True
    )
    told = [entry for commit in generation.commits for entry in commit.logprobs]
    known = replayed.commits[0].prompt_logprobs[len(PROMPT) - 1 :]
    assert [entry.token for entry in told] == generation.tokens
    assert [e.logprob for e in told] == pytest.approx([e.logprob for e in known], abs=1e-5)


@pytest.mark.parametrize("rule", [TARGET_ONLY, REJECTION, BLOCK])
async def test_penalties_and_bias_are_honoured_under_every_rule(
    bench: VerifyBench, rule: AcceptRule.ValueType
) -> None:
    async def script(seat: Seat) -> Say | None:
        tree = proposal(seat)
        tree.one_hot = True
        return Say(trees=[tree])

    drafter = bench.drafter(script)
    # Each token makes itself less likely: a path that forgot its own nodes would repeat them.
    law = {"frequency_penalty": 2.0, "presence_penalty": 2.0, "logit_bias": {1: 20.0, 2: 17.0}}
    cold = Sampling(temperature=0.001, seed=4, rule=rule, **law)  # type: ignore[arg-type]
    generation = await bench.generate(PROMPT, 12, drafter=drafter, sampling=cold)
    await drafter.die()
    greedy = await bench.generate(PROMPT, 12, sampling=Sampling(**law))  # type: ignore[arg-type]
    assert generation.tokens == greedy.tokens
    assert sum(commit.accepted_count for commit in generation.commits) > 0
    assert {1, 2} < set(generation.tokens)
