"""A replica whose acceptance is drawn, for benchmarks: right on average, loud, not for clients."""

from __future__ import annotations

from pathlib import Path

import grpc.aio
import pytest

from graft.common.errors import InvalidArgument, Unsupported
from graft.common.server import error_from_call
from graft.common.tree import chain, from_parents
from graft.testing.verify_client import Say, Seat, VerifyBench, running_verify, settings_of
from graft.v1 import verify_pb2
from graft.v1.verify_pb2 import FinishReason

FIXED = 100
DESCRIBE = verify_pb2.VerifyServiceDescribeRequest()


async def five_deep(seat: Seat) -> Say | None:
    return Say(trees=[seat.propose(chain([seat.tokens[-1], 1, 2, 3, 4, 5]))])


async def drafted(bench: VerifyBench, max_tokens: int) -> list[verify_pb2.TokensCommitted]:
    """The rounds of one session with a drafter, the prefill's commit left out."""
    drafter = bench.drafter(five_deep)
    generation = await bench.generate([5, 6, 7], max_tokens, drafter=drafter)
    assert generation.finished is not None
    assert generation.finished.reason == FinishReason.FINISH_REASON_LENGTH
    assert len(generation.tokens) == max_tokens
    await drafter.die()
    return [c for c in generation.commits if c.node_count == 5]


@pytest.mark.parametrize("method", ["match-expected", "multinomial"])
async def test_rounds_have_the_wanted_length_on_average(tiny_model: Path, method: str) -> None:
    async with running_verify(
        tiny_model,
        simulate_accept_length=3.5,
        simulate_method=method,
        simulate_allow_clients=True,
    ) as bench:
        rounds = await drafted(bench, 400)
        assert bench.idle_pages()
    lengths = [len(commit.tokens) for commit in rounds]
    assert sum(lengths) / len(lengths) == pytest.approx(3.5, abs=0.25)
    assert set(lengths) == ({3, 4} if method == "match-expected" else set(range(1, 7)))
    assert all(set(commit.tokens) == {FIXED} for commit in rounds)
    assert all(commit.accepted_count == len(commit.tokens) - 1 for commit in rounds)


async def test_real_draft_tokens_are_the_drafts_and_then_the_target_s(tiny_model: Path) -> None:
    async with running_verify(
        tiny_model,
        simulate_accept_length=4.0,
        simulate_token_mode="real-draft-token",
        simulate_allow_clients=True,
    ) as bench:
        rounds = await drafted(bench, 40)
    assert rounds
    assert all(list(commit.tokens[:-1]) == [1, 2, 3] for commit in rounds)


async def test_a_round_is_no_longer_than_the_first_path(tiny_model: Path) -> None:
    async def bush(seat: Seat) -> Say | None:
        return Say(trees=[seat.propose(from_parents([seat.tokens[-1], 1, 2], [-1, 0, 0]))])

    async with running_verify(
        tiny_model, simulate_accept_length=9.0, simulate_allow_clients=True
    ) as bench:
        drafter = bench.drafter(bush)
        generation = await bench.generate([5, 6, 7], 21, drafter=drafter)
        await drafter.die()
    lengths = [len(commit.tokens) for commit in generation.commits if commit.node_count]
    assert set(lengths) == {2}


async def test_clients_are_refused_unless_asked_for(tiny_model: Path) -> None:
    async with running_verify(tiny_model, simulate_accept_length=2.0) as bench:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await bench.generate([5, 6, 7], 4)
        about = await bench.stub.Describe(DESCRIBE)
    error = error_from_call(caught.value)
    assert isinstance(error, Unsupported)
    assert "simulates an accept length of 2" in str(error)
    assert "simulate_allow_clients" in str(error)
    assert not about.simulated.clients_allowed


async def test_it_shows_in_the_description_the_metrics_the_log_and_the_session(
    tiny_model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with running_verify(
        tiny_model, simulate_accept_length=2.5, simulate_allow_clients=True
    ) as bench:
        about = await bench.stub.Describe(DESCRIBE)
        assert about.simulated.accept_length == 2.5
        assert about.simulated.method == "match-expected"
        assert about.simulated.token_mode == "fixed"
        assert bench.metric("graft_simulated_accept_length") == 2.5
        generation = await bench.generate([5, 6, 7], 4)
    assert generation.opened is not None and generation.opened.simulated
    said = capsys.readouterr()
    lines = [line for line in (said.out + said.err).splitlines() if "is simulated" in line]
    assert len(lines) == 1 and "warning" in lines[0]


async def test_a_replica_that_decides_says_nothing_of_it(tiny_model: Path) -> None:
    async with running_verify(tiny_model) as bench:
        about = await bench.stub.Describe(DESCRIBE)
        generation = await bench.generate([5, 6, 7], 2)
        assert bench.metric("graft_simulated_accept_length") == 0
    assert not about.HasField("simulated")
    assert generation.opened is not None and not generation.opened.simulated


def test_a_length_without_the_bonus_is_refused(tiny_model: Path) -> None:
    with pytest.raises(InvalidArgument, match="at least 1"):
        settings_of(tiny_model, simulate_accept_length=0.5).check_limits()


def test_thresholds_without_their_rule_are_refused(tiny_model: Path) -> None:
    with pytest.raises(InvalidArgument, match="no meaning under the coupled rule"):
        settings_of(tiny_model, threshold_acc=0.9).check_limits()
