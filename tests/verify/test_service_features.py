"""Hidden states over real sockets: they are those of one forward over the whole text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from graft.common.channel import PROTOCOL_REVISION
from graft.common.errors import Mismatch, ModelNotFound
from graft.common.feature_codec import decode
from graft.common.features import FeatureSpec, spec_to_proto
from graft.common.projection import Projection, write_projection
from graft.common.tree import FloatArray, from_parents
from graft.testing.bits import agree_in_bf16
from graft.testing.models import write_tiny_model
from graft.testing.plain import Plain
from graft.testing.verify_client import (
    FeatureLog,
    Generation,
    Say,
    Script,
    ScriptedDrafter,
    Seat,
    VerifyBench,
    eventually,
    running_verify,
    sampled,
)
from graft.v1 import verify_pb2
from graft.v1.features_pb2 import FeatureCodec
from graft.v1.sampling_pb2 import StopRule

PROMPT = [(7 * i + 3) % 250 for i in range(75)]
COUNT = 100
BF16 = FeatureSpec((0, 1, 2))
INT8 = FeatureSpec((1, 2), codec=FeatureCodec.FEATURE_CODEC_INT8)
HIDDEN = 64


def silent() -> Script:
    async def script(seat: Seat) -> Say | None:
        return Say(empties=[empty(seat)])

    return script


def empty(seat: Seat) -> verify_pb2.EmptyProposal:
    return verify_pb2.EmptyProposal(
        session_id=seat.session_id,
        prefix_length=len(seat.prefix),
        prefix_digest=seat.prefix.digest,
    )


def behind_brothers(truth: list[int], prompt: list[int] = PROMPT) -> Script:
    """Trees whose true path never is the first one; some rounds accept a part, some nothing."""

    async def script(seat: Seat) -> Say | None:
        done = len(seat.tokens) - len(prompt)
        tokens, parents, parent = [seat.tokens[-1]], [-1], 0
        for token in truth[done : done + seat.round % 4]:
            tokens += [(token + 1) % 256, (token + 2) % 256, token]
            parents += [parent] * 3
            parent = len(tokens) - 1
        return Say(trees=[seat.propose(from_parents(tokens, parents))])

    return script


def hello(*specs: FeatureSpec) -> verify_pb2.DraftHello:
    return verify_pb2.DraftHello(
        protocol_revision=PROTOCOL_REVISION, features=[spec_to_proto(spec) for spec in specs]
    )


def check(log: FeatureLog, spec: FeatureSpec, expected: FloatArray) -> None:
    """The rows of a log are those of the same positions of `expected`."""
    width = expected.shape[1]
    rows = decode(log.payload, log.count, width, spec.codec)
    wanted = expected[log.start : log.start + log.count]
    if spec.codec == FeatureCodec.FEATURE_CODEC_BF16:
        assert agree_in_bf16(rows, wanted)
    else:
        scale = np.abs(wanted).max(axis=1, keepdims=True) / 127
        assert (np.abs(rows - wanted) <= 0.501 * scale).all()


@asynccontextmanager
async def drafting(
    bench: VerifyBench, script: Script, *announced: FeatureSpec
) -> AsyncIterator[ScriptedDrafter]:
    drafter = bench.drafter(script, hello(*announced))
    await drafter.welcomed.wait()
    try:
        yield drafter
    finally:
        await drafter.die()


@dataclass(slots=True)
class Late:
    """A session whose first token was decided before any drafter joined."""

    call: Any
    opened: verify_pb2.SessionOpened
    tokens: list[int]

    async def text(self) -> list[int]:
        """All its tokens, once it has ended."""
        while isinstance(message := await self.call.read(), verify_pb2.GenerateResponse):
            self.tokens += message.committed.tokens
        return self.tokens


async def started(bench: VerifyBench) -> Late:
    call = bench.generate_call()
    await call.write(
        verify_pb2.GenerateRequest(
            open=verify_pb2.OpenSession(
                prompt_tokens=PROMPT,
                stop=StopRule(max_tokens=COUNT, ignore_eos=True),
                tree_deadline_micros=5_000_000,
                speculate=True,
            )
        )
    )
    opened: Any = await call.read()
    first: Any = await call.read()
    return Late(call, opened.opened, list(first.committed.tokens))


@pytest.fixture(scope="module")
def truth(plain: Plain) -> list[int]:
    return plain.text(PROMPT, COUNT + 8)


async def generated(
    bench: VerifyBench, drafter: ScriptedDrafter, spec: FeatureSpec, **fields: Any
) -> tuple[Generation, FeatureLog]:
    """One session with features, after its last word to the drafter."""
    generation = await bench.generate(PROMPT, COUNT, drafter=drafter, spec=spec, **fields)
    assert generation.opened is not None
    session_id = generation.opened.session_id
    await drafter.until(lambda: session_id in drafter.closed)
    return generation, drafter.features[session_id]


@pytest.mark.parametrize("spec", [BF16, INT8, FeatureSpec((2,), final_norm=False)])
async def test_prompt_and_accepted_rows_are_those_of_one_forward(
    tiny_model: Path, plain: Plain, truth: list[int], spec: FeatureSpec
) -> None:
    expected = plain.states([*PROMPT, *truth], spec.layers, spec.final_norm)
    async with (
        running_verify(tiny_model) as bench,
        drafting(bench, behind_brothers(truth), spec) as drafter,
    ):
        generation, log = await generated(bench, drafter, spec)
        assert generation.tokens == truth[:COUNT]
        assert generation.finished is not None and generation.finished.accepted_count > 4
        told = sum(len(commit.tokens) for commit in generation.commits[:-1])
        assert (log.start, log.count) == (0, len(PROMPT) + told - 1)
        check(log, spec, expected)
        sent = [bench.metric("graft_feature_bytes_total", part=p) for p in ("prefix", "commit")]
        assert sum(sent) == len(log.payload)
        assert bench.metric("graft_feature_rows_total", part="commit") == log.count - sum(
            log.beside
        )
        await eventually(bench.idle_pages)


async def test_rows_of_a_prompt_come_in_chunks_before_its_prefix(
    tiny_model: Path, plain: Plain
) -> None:
    prompt = [(5 * i) % 250 for i in range(400)]
    async with (
        running_verify(tiny_model, max_step_rows=3, max_running=2) as bench,
        drafting(bench, silent(), BF16) as drafter,
    ):
        generation = await bench.generate(prompt, 4, drafter=drafter, spec=BF16)
        assert generation.opened is not None
        log = drafter.features[generation.opened.session_id]
        assert len(log.early) > 1 and max(log.early) < 400
        assert log.start == 0 and log.count >= 400
        check(log, BF16, plain.states([*prompt, *generation.tokens], BF16.layers))


async def test_the_text_is_the_same_with_and_without_capture(
    tiny_model: Path, plain: Plain
) -> None:
    async with running_verify(tiny_model) as bench:
        law = sampled(11)
        alone = (await bench.generate(PROMPT, COUNT, sampling=law)).tokens
        async with drafting(bench, behind_brothers(alone), INT8) as drafter:
            generation, _ = await generated(bench, drafter, INT8, sampling=law)
        assert generation.tokens == alone


async def test_a_drafter_that_announced_nothing_still_gets_every_row(
    tiny_model: Path, plain: Plain, truth: list[int]
) -> None:
    """Its rows were not kept from the start on, so they are run again."""
    async with (
        running_verify(tiny_model) as bench,
        drafting(bench, behind_brothers(truth)) as drafter,
    ):
        late = await started(bench)
        await drafter.join(late.opened.session_id, late.opened.ticket, BF16)
        text = await late.text()
        assert text == truth[:COUNT]
        log = drafter.features[late.opened.session_id]
        assert log.start == 0 and log.count >= len(PROMPT)
        check(log, BF16, plain.states([*PROMPT, *truth], BF16.layers))
        assert bench.metric("graft_recalled_tokens_total") >= len(PROMPT)
        await eventually(bench.idle_pages)


async def test_a_cached_prefix_brings_its_rows_too(
    tiny_model: Path, plain: Plain, truth: list[int]
) -> None:
    async with running_verify(tiny_model) as bench:
        first = await bench.generate(PROMPT, COUNT)
        assert first.tokens == truth[:COUNT]
        async with drafting(bench, behind_brothers(truth), BF16) as drafter:
            generation, log = await generated(bench, drafter, BF16)
        assert generation.opened is not None and generation.opened.cached_token_count >= 64
        assert generation.tokens == truth[:COUNT]
        assert log.start == 0
        check(log, BF16, plain.states([*PROMPT, *truth], BF16.layers))
        again = await bench.generate(PROMPT, COUNT)
        assert again.tokens == truth[:COUNT]
        await eventually(bench.idle_pages)


async def test_a_rejoin_gets_what_is_kept_without_running_it_again(
    tiny_model: Path, plain: Plain, truth: list[int]
) -> None:
    expected = plain.states([*PROMPT, *truth], BF16.layers)
    moved: list[FeatureLog] = []

    async with running_verify(tiny_model) as bench:
        inner = behind_brothers(truth)

        async def script(seat: Seat) -> Say | None:
            if seat.round == 5 and not moved:
                moved.append(drafter.features[seat.session_id])
                await drafter.leave(seat.session_id)
                await drafter.join(seat.session_id, late.opened.ticket, BF16)
                return None
            return await inner(seat)

        async with drafting(bench, script, BF16) as drafter:
            late = await started(bench)
            await drafter.join(late.opened.session_id, late.opened.ticket, BF16)
            assert await late.text() == truth[:COUNT]
            before, after = moved[0], drafter.features[late.opened.session_id]
            assert after.start == 0 and after.count > before.count
            check(before, BF16, expected)
            check(after, BF16, expected)
            assert bench.metric("graft_recalled_tokens_total") == 0


@pytest.mark.parametrize("memory_mb", [0, 256])
async def test_a_late_join_says_where_its_window_starts(
    tiny_model: Path, plain: Plain, truth: list[int], memory_mb: int
) -> None:
    async with (
        running_verify(tiny_model, feature_memory_mb=memory_mb) as bench,
        drafting(bench, behind_brothers(truth), BF16) as drafter,
    ):
        late = await started(bench)
        await drafter.join(late.opened.session_id, late.opened.ticket, BF16, window_tokens=10)
        assert await late.text() == truth[:COUNT]
        log = drafter.features[late.opened.session_id]
        assert log.start > len(PROMPT) - 10
        check(log, BF16, plain.states([*PROMPT, *truth], BF16.layers))


async def test_preempted_sessions_miss_no_row(tiny_model: Path, plain: Plain) -> None:
    prompts = [[(i * k + 1) % 250 for i in range(60)] for k in (3, 5, 7)]
    truths = [plain.text(prompt, 48) for prompt in prompts]
    async with running_verify(tiny_model, kv_tokens=256, max_running=3) as bench:

        async def one(prompt: list[int], text: list[int]) -> None:
            async with drafting(bench, behind_brothers(text, prompt), BF16) as drafter:
                generation = await bench.generate(prompt, 40, drafter=drafter, spec=BF16)
                assert generation.tokens == text[:40]
                assert generation.opened is not None
                log = drafter.features[generation.opened.session_id]
                assert log.start == 0
                check(log, BF16, plain.states([*prompt, *text], BF16.layers))

        await asyncio.gather(*(one(p, t) for p, t in zip(prompts, truths, strict=True)))
        assert bench.metric("graft_preemptions_total") > 0
        await eventually(bench.idle_pages)


def projection_of(hidden: int, width: int) -> Projection:
    rng = np.random.default_rng(5)

    def values(*shape: int) -> FloatArray:
        return rng.standard_normal(shape).astype(np.float32)

    return Projection(
        layers=(0, 1, 2),
        weight=values(width, 3 * hidden) / np.float32(hidden**0.5),
        bias=values(width),
        state_norms=(values(hidden), values(hidden), values(hidden)),
        out_norm=values(width),
        eps=1e-5,
    )


def applied(projection: Projection, states: FloatArray) -> Any:
    """The projection in plain float64."""

    def normed(x: Any, weight: FloatArray) -> Any:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + projection.eps) * weight

    parts = np.split(states.astype(np.float64), 3, axis=1)
    joined = np.concatenate(
        [normed(p, w) for p, w in zip(parts, projection.state_norms, strict=True)], axis=1
    )
    assert projection.bias is not None and projection.out_norm is not None
    return normed(joined @ projection.weight.T + projection.bias, projection.out_norm)


async def test_fused_int8_rows_of_576_values_cost_at_most_640_bytes_a_token(
    tmp_path: Path,
) -> None:
    """A target as wide as SmolLM2-135M; what is counted is the whole commit as it is sent."""
    model = write_tiny_model(tmp_path / "wide", hidden=576, layers=2, heads=9, kv_heads=3)
    projection = projection_of(576, 576)
    path = tmp_path / "fused.safetensors"
    write_projection(projection, path)
    spec = FeatureSpec(
        (0, 1, 2), codec=FeatureCodec.FEATURE_CODEC_INT8, fused_id=projection.fused_id
    )
    wide = Plain.load(model)
    text = wide.text(PROMPT, COUNT + 8)
    async with (
        running_verify(model, fused_features=str(path)) as bench,
        drafting(bench, behind_brothers(text), spec) as drafter,
    ):
        assert drafter.welcome is not None
        offered = drafter.welcome.features.projections[0]
        assert (offered.fused_id, offered.width) == (projection.fused_id, 576)
        generation, log = await generated(bench, drafter, spec)
        assert generation.tokens == text[:COUNT]
        states = applied(projection, wide.states([*PROMPT, *text], (0, 1, 2)))
        rows = decode(log.payload, log.count, 576, spec.codec)
        wanted = states[: log.count]
        assert (np.abs(rows - wanted) <= 0.51 * np.abs(wanted).max(1, keepdims=True) / 127).all()
        tokens = sum(tokens for tokens, _ in drafter.commit_bytes)
        num_bytes = sum(size for _, size in drafter.commit_bytes)
        assert tokens > 10 and num_bytes / tokens <= 640
        payload = bench.metric("graft_feature_bytes_total", part="commit")
        assert payload / bench.metric("graft_feature_rows_total", part="commit") == 580


@pytest.mark.parametrize("spec", [FeatureSpec((3,)), FeatureSpec((1,), fused_id="ab")])
async def test_a_join_for_what_the_target_lacks_is_refused_alone(
    tiny_model: Path, spec: FeatureSpec
) -> None:
    async with (
        running_verify(tiny_model) as bench,
        drafting(bench, silent(), spec, BF16) as drafter,
    ):
        generation = await bench.generate(
            PROMPT, 4, drafter=drafter, spec=spec, tree_deadline_micros=500_000
        )
        assert generation.opened is not None
        session_id = generation.opened.session_id
        await drafter.until(lambda: session_id in drafter.closed)
        assert drafter.closed[session_id] == Mismatch.reason
        assert len(generation.tokens) == 4


async def test_long_prompts_stay_below_the_message_cap(tmp_path: Path) -> None:
    """All rows of this prompt together are past the cap of 16 MiB."""
    model = write_tiny_model(tmp_path / "long", hidden=512, heads=4, kv_heads=1, context=4096)
    prompt = [(3 * i) % 250 for i in range(3000)]
    spec = FeatureSpec((0, 1, 2, 1, 2, 0))
    async with (
        running_verify(model, kv_tokens=4096, max_step_rows=1024) as bench,
        drafting(bench, silent(), spec) as drafter,
    ):
        generation = await bench.generate(prompt, 2, drafter=drafter, spec=spec)
        assert generation.opened is not None
        session_id = generation.opened.session_id
        # The rows are on another stream than the text, which may be through before them.
        async with asyncio.timeout(20):
            await drafter.until(lambda: drafter.features[session_id].count >= 3000)
        assert len(drafter.features[session_id].payload) > 16 << 20


async def test_a_projection_of_another_target_ends_the_start(
    tiny_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "fused.safetensors"
    write_projection(projection_of(32, 32), path)
    with pytest.raises(Mismatch, match="takes states of 32 values"):
        async with running_verify(tiny_model, fused_features=str(path)):
            pass
    with pytest.raises(ModelNotFound, match="cannot read the projection"):
        async with running_verify(tiny_model, fused_features=str(tmp_path / "none")):
            pass
