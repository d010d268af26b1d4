"""Hidden states from a real verify replica to a proposer in a real draft service.

At every proposal the proposer compares its rows with one forward over its prefix; whatever befalls
the session in between, they must be those, and the text must be the baseline. Torch's products
depend on the number of rows: where it serves, a row may be rounded to the next bf16 number.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from graft.common.channel import open_channel
from graft.common.sampling import Sampling, sampling_to_proto
from graft.common.tier import Tier, tier_to_proto
from graft.common.tree import Tree, from_parents
from graft.draft.features import FeatureNeed
from graft.draft.mirror import Mirror
from graft.draft.proposers.base import ProposerInfo, Seat
from graft.draft.server import DraftServer
from graft.draft.settings import DraftSettings
from graft.testing.bits import agree_in_bf16
from graft.testing.drafting import FakeGateway
from graft.testing.models import write_tiny_model
from graft.testing.plain import Plain
from graft.testing.verify_client import VerifyBench, running_verify
from graft.v1.draft_pb2 import AttendSession
from graft.v1.draft_pb2_grpc import DraftServiceStub
from graft.v1.sampling_pb2 import StopRule
from graft.v1.verify_pb2 import GenerateRequest, GenerateResponse, OpenSession

COUNT = 32
NEED = FeatureNeed((0, 1, 2))
TIER = Tier("checker", 4, 3, 16)
# Two draft services have two engines, and the decoder they compare with takes one thread.
_ONE_AT_A_TIME = threading.Lock()
LAWS = [Sampling(), Sampling(temperature=0.8, top_p=0.95, seed=7)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tiny_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def plain(model: Path) -> Plain:
    return Plain.load(model)


@dataclass(slots=True)
class Checker:
    """Knows the texts; proposes them behind wrong brothers and checks its rows every time."""

    plain: Plain
    texts: dict[bytes, list[int]]
    exact: bool = True
    name: str = "checker"
    starts: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def describe(self) -> ProposerInfo:
        return ProposerInfo(TIER, needs=NEED)

    def open(self, mirror: Mirror) -> object:
        return None

    def commit(self, seat: Seat, tokens: Sequence[int]) -> None: ...

    def close(self, seat: Seat) -> None: ...

    def propose(self, batch: Sequence[Seat]) -> Sequence[Tree | None]:
        return [self._propose(seat) for seat in batch]

    def _propose(self, seat: Seat) -> Tree | None:
        prefix = seat.mirror.prefix.tokens.tolist()
        self._check(seat, prefix)
        text = next((t for t in self.texts.values() if t[: len(prefix)] == prefix), prefix)
        tokens, parents, parent = [prefix[-1]], [-1], 0
        for token in text[len(prefix) : len(prefix) + len(self.starts) % 4]:
            tokens += [(token + 1) % 250, token]
            parents += [parent] * 2
            parent = len(tokens) - 1
        return from_parents(tokens, parents)

    def _check(self, seat: Seat, prefix: list[int]) -> None:
        store = seat.mirror.features
        assert store is not None
        self.starts.append(store.start)
        with _ONE_AT_A_TIME:
            expected = self.plain.states(prefix[:-1], NEED.layers)[store.start :]
        rows = store.rows(store.start, store.length)
        if self.exact:
            good = agree_in_bf16(rows, expected)
        else:
            scale = np.abs(expected).max(axis=1, keepdims=True) / 127
            good = rows.shape == expected.shape and bool(
                (np.abs(rows - expected) <= 0.501 * scale).all()
            )
        if not good:
            self.errors.append(f"rows {store.start}..{store.length - 1} differ")


@asynccontextmanager
async def draft_service(checker: Checker, **settings: Any) -> AsyncIterator[FakeGateway]:
    server = DraftServer(DraftSettings.load(None, {"port": 0, **settings}), [checker])
    channel = open_channel(f"127.0.0.1:{await server.start()}")
    stub: Any = DraftServiceStub(channel)
    gateway = FakeGateway(stub.Attend())
    try:
        yield gateway
    finally:
        gateway.call.cancel()
        await channel.close(None)
        await server.stop(0)


async def generate(
    bench: VerifyBench,
    prompt: list[int],
    law: Sampling,
    gateways: Sequence[FakeGateway],
    changes_at: int = 10**9,
) -> list[int]:
    """One session; after `changes_at` tokens the last gateway's draft service takes it over."""
    call: Any = bench.generate_call()
    await call.write(
        GenerateRequest(
            open=OpenSession(
                prompt_tokens=prompt,
                sampling=sampling_to_proto(law),
                stop=StopRule(max_tokens=COUNT, ignore_eos=True),
                tree_deadline_micros=5_000_000,
                speculate=bool(gateways),
            )
        )
    )
    tokens: list[int] = []
    attend = AttendSession(verify_address=bench.address, tier=tier_to_proto(TIER))
    moved = False
    async with asyncio.timeout(60):
        while isinstance(message := await call.read(), GenerateResponse):
            if message.HasField("opened"):
                attend.session_id, attend.ticket = message.opened.session_id, message.opened.ticket
                if gateways:
                    await gateways[0].send(attend=attend)
            tokens += message.committed.tokens
            if len(tokens) >= changes_at and not moved:
                moved = True
                await gateways[-1].send(attend=attend)
    return tokens


PROMPTS = [[(i * k + 1) % 250 for i in range(20 + 17 * k)] for k in (3, 5, 7)]


async def baselines(bench: VerifyBench, law: Sampling) -> dict[bytes, list[int]]:
    texts = {}
    for prompt in PROMPTS:
        texts[bytes(prompt)] = [*prompt, *await generate(bench, prompt, law, [])]
    return texts


@pytest.mark.parametrize("law", LAWS, ids=["greedy", "sampled"])
@pytest.mark.parametrize("codec", ["bf16", "int8"])
async def test_proposers_have_the_rows_of_one_forward_at_every_round(
    model: Path, plain: Plain, law: Sampling, codec: str
) -> None:
    async with running_verify(model, max_step_rows=48) as bench:
        texts = await baselines(bench, law)
        checker = Checker(plain, texts, exact=codec == "bf16")
        async with draft_service(checker, feature_codec=codec) as gateway:
            came = await asyncio.gather(
                *(generate(bench, prompt, law, [gateway]) for prompt in PROMPTS)
            )
    assert [[*p, *t] for p, t in zip(PROMPTS, came, strict=True)] == list(texts.values())
    assert not checker.errors and set(checker.starts) == {0} and len(checker.starts) > 10


async def test_preempted_sessions_keep_their_drafters_fed(model: Path, plain: Plain) -> None:
    async with running_verify(model) as roomy:
        texts = await baselines(roomy, LAWS[1])
    async with running_verify(model, kv_tokens=368, max_running=3) as bench:
        checker = Checker(plain, texts)
        async with draft_service(checker) as gateway:
            came = await asyncio.gather(
                *(generate(bench, prompt, LAWS[1], [gateway]) for prompt in PROMPTS)
            )
        assert bench.metric("graft_preemptions_total") > 0
    assert [[*p, *t] for p, t in zip(PROMPTS, came, strict=True)] == list(texts.values())
    assert not checker.errors


@pytest.mark.parametrize("window", [0, 12])
async def test_another_draft_service_takes_over_with_the_recent_window(
    model: Path, plain: Plain, window: int
) -> None:
    async with running_verify(model) as bench:
        texts = await baselines(bench, LAWS[0])
        prompt = PROMPTS[0]
        first, second = Checker(plain, texts), Checker(plain, texts)
        async with (
            draft_service(first) as one,
            draft_service(second, feature_window=window) as other,
        ):
            tokens = await generate(bench, prompt, LAWS[0], [one, other], changes_at=6)
    assert [*prompt, *tokens] == texts[bytes(prompt)]
    assert first.starts and second.starts
    assert not first.errors and not second.errors
    assert all(start > len(prompt) - 12 for start in second.starts) if window else True
