"""Every scripted drafter against a real verify replica: the text stays, only speed changes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from graft.common.channel import open_channel
from graft.common.sampling import Sampling, sampling_to_proto
from graft.common.tier import Tier, tier_to_proto
from graft.draft.proposers.base import Proposer
from graft.draft.server import DraftServer
from graft.draft.settings import DraftSettings
from graft.testing import scripted
from graft.testing.drafting import FakeGateway
from graft.testing.models import write_tiny_model
from graft.v1.draft_pb2 import AttendSession
from graft.v1.draft_pb2_grpc import DraftServiceStub
from graft.v1.sampling_pb2 import StopRule
from graft.v1.verify_pb2 import GenerateRequest, GenerateResponse, OpenSession, SessionFinished
from graft.v1.verify_pb2_grpc import VerifyServiceStub
from graft.verify.server import VerifyServer
from graft.verify.settings import VerifySettings

PROMPT = [40, 41, 42, 43, 44, 40, 41, 42]
NUM_TOKENS = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tiny_model(tmp_path_factory.mktemp("models"))


@dataclass(slots=True)
class Run:
    """What one session brought."""

    tokens: list[int] = field(default_factory=list)
    finished: SessionFinished = field(default_factory=SessionFinished)
    refused: Any = None


@dataclass(slots=True)
class Pair:
    """A verify replica, and a way to run a session on it with some drafter attending."""

    address: str
    stub: Any

    async def run(
        self,
        gateway: FakeGateway | None,
        tier: Tier,
        sampling: Sampling,
        prompt: Sequence[int] = PROMPT,
        deadline_s: float = 2.0,
    ) -> Run:
        """Generates once; `gateway` asks its draft service to attend."""
        call = self.stub.Generate()
        await call.write(
            GenerateRequest(
                open=OpenSession(
                    prompt_tokens=prompt,
                    sampling=sampling_to_proto(sampling),
                    stop=StopRule(max_tokens=NUM_TOKENS, ignore_eos=True),
                    tree_deadline_micros=int(deadline_s * 1e6),
                    speculate=gateway is not None,
                )
            )
        )
        result = Run()
        async with asyncio.timeout(60):
            while isinstance(message := await call.read(), GenerateResponse):
                if message.HasField("opened") and gateway is not None:
                    await gateway.send(
                        attend=AttendSession(
                            session_id=message.opened.session_id,
                            ticket=message.opened.ticket,
                            verify_address=self.address,
                            tier=tier_to_proto(tier),
                        )
                    )
                result.tokens += message.committed.tokens
                if message.HasField("finished"):
                    result.finished = message.finished
        return result


@asynccontextmanager
async def verifying(model: Path) -> AsyncIterator[Pair]:
    server = VerifyServer(
        VerifySettings.load(None, {"model": str(model), "port": 0, "threads": 1, "kv_tokens": 4096})
    )
    address = f"127.0.0.1:{await server.start()}"
    await server.ready()
    channel = open_channel(address)
    try:
        yield Pair(address, VerifyServiceStub(channel))
    finally:
        await channel.close(None)
        await server.stop(0)


@asynccontextmanager
async def drafter(
    proposers: Sequence[Proposer] | None = None,
) -> AsyncIterator[tuple[DraftServer, FakeGateway]]:
    server = DraftServer(DraftSettings.load(None, {"port": 0}), proposers)
    channel = open_channel(f"127.0.0.1:{await server.start()}")
    stub: Any = DraftServiceStub(channel)
    gateway = FakeGateway(stub.Attend())
    try:
        yield server, gateway
    finally:
        gateway.call.cancel()
        await channel.close(None)
        await server.stop(0)


SAMPLINGS = [Sampling(), Sampling(temperature=0.8, top_p=0.95, seed=7)]

MAKERS: dict[str, Callable[[scripted.Baseline], scripted.Scripted]] = {
    "perfect": scripted.perfect,
    "always_wrong": scripted.always_wrong,
    "first_wrong": scripted.first_wrong,
    "accept_2": lambda baseline: scripted.accept_n(baseline, 2),
    "eos_everywhere": lambda baseline: scripted.eos_everywhere(2, baseline),
    "off_schema": lambda baseline: scripted.off_schema([3, 5], baseline),
    "bad_ids": lambda baseline: scripted.bad_ids(),
    "nan_scores": scripted.nan_scores,
    "stale": scripted.stale,
    "double": scripted.double,
    "foreign": scripted.foreign,
    "slow": lambda baseline: scripted.slow(scripted.perfect(baseline), 5),
    "failing": lambda baseline: scripted.failing(scripted.perfect(baseline), frozenset({2, 3})),
}

REFUSED = {
    "bad_ids": "token_range",
    "nan_scores": "bad_scores",
    "stale": "stale",
    "double": "repeated",
    "foreign": "foreign",
}


@pytest.mark.parametrize("name", list(MAKERS))
async def test_the_text_is_the_baseline_whatever_the_drafter_does(name: str, model: Path) -> None:
    async with verifying(model) as pair:
        for sampling in SAMPLINGS:
            plain = await pair.run(None, Tier(), sampling)
            assert len(plain.tokens) == NUM_TOKENS
            proposer = MAKERS[name](scripted.replay([[*PROMPT, *plain.tokens]]))
            async with drafter([proposer]) as (server, gateway):
                tier = Tier(proposer.name, 4, 4, 16)
                result = await pair.run(gateway, tier, sampling, deadline_s=0.05)
            assert result.tokens == plain.tokens
            told = result.finished
            assert 0 <= told.accepted_count <= told.drafted_count
            if name == "perfect":
                assert told.accepted_count == told.drafted_count > 0
                # ceil of the tokens after the first one over depth + bonus, and no round more.
                assert told.round_count == -(-(NUM_TOKENS - 1) // 5)
            if name in ("always_wrong", "first_wrong"):
                assert told.accepted_count == 0 < told.drafted_count
            if name in REFUSED:
                counted = server.metrics.registry.get_sample_value(
                    "graft_draft_tree_refusals_total", {"reason": REFUSED[name]}
                )
                assert counted and counted > 0


async def test_a_hanging_drafter_costs_time_and_not_text(model: Path) -> None:
    async with verifying(model) as pair:
        plain = await pair.run(None, Tier(), Sampling())
        proposer = scripted.Hang()
        async with drafter([proposer]) as (_, gateway):
            result = await pair.run(gateway, Tier("hang", 2, 1, 3), Sampling(), deadline_s=0.05)
            proposer.released.set()
        assert result.tokens == plain.tokens


async def test_a_drafter_of_another_vocabulary_is_refused_at_pairing(model: Path) -> None:
    async with verifying(model) as pair:
        plain = await pair.run(None, Tier(), Sampling())
        async with drafter([scripted.wrong_vocab(lambda prefix: [], 7)]) as (_, gateway):
            tier = Tier("wrong_vocab", 2, 1, 3)
            result = await pair.run(gateway, tier, Sampling(), deadline_s=0.05)
            refused = await gateway.next("refused")
        assert "7" in refused.detail
        assert result.tokens == plain.tokens


async def test_ngram_is_accepted_where_the_text_repeats_itself(model: Path) -> None:
    async with verifying(model) as pair:
        plain = await pair.run(None, Tier(), Sampling())
        prompt = [*PROMPT, *plain.tokens, *PROMPT, *plain.tokens, *PROMPT]
        alone = await pair.run(None, Tier(), Sampling(), prompt)
        async with drafter() as (server, gateway):
            result = await pair.run(gateway, Tier("ngram", 7, 4, 8), Sampling(), prompt)
            assert await server.wait_idle(10)
        assert result.tokens == alone.tokens
        assert result.finished.drafted_count > 0


async def test_sessions_side_by_side_keep_their_texts(model: Path) -> None:
    async with verifying(model) as pair:
        prompts = [[number, *PROMPT, number] for number in range(50, 56)]
        alone = [(await pair.run(None, Tier(), SAMPLINGS[1], prompt)).tokens for prompt in prompts]
        async with drafter() as (_, gateway):
            together = await asyncio.gather(
                *(pair.run(gateway, Tier("ngram", 4, 4, 8), SAMPLINGS[1], p) for p in prompts)
            )
        assert [run.tokens for run in together] == alone
