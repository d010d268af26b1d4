"""Pairing with draft services: hello, welcome, mismatches, and peers that break the order."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc.aio
import pytest
import pytest_asyncio

from graft.common.channel import PROTOCOL_REVISION
from graft.common.errors import GraftError, Mismatch, ProtocolBroken
from graft.common.server import error_from_call
from graft.testing.verify_client import Say, Seat, VerifyBench, running_verify
from graft.v1 import verify_pb2


@pytest_asyncio.fixture
async def bench(tiny_model: Path) -> AsyncIterator[VerifyBench]:
    async with running_verify(tiny_model) as running:
        yield running


async def silent(seat: Seat) -> Say | None:
    return None


async def failure_of(bench: VerifyBench, *messages: Say) -> GraftError:
    call = bench.stub.Rounds()  # type: ignore[call-arg]
    for message in messages:
        await call.write(message)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    error = error_from_call(caught.value)
    assert error is not None
    return error


def hello(**fields: object) -> Say:
    values = {"protocol_revision": PROTOCOL_REVISION, **fields}
    return Say(hello=verify_pb2.DraftHello(**values))  # type: ignore[arg-type]


async def test_the_welcome_describes_the_replica(bench: VerifyBench) -> None:
    drafter = bench.drafter(silent)
    await drafter.welcomed.wait()
    about = await bench.stub.Describe(verify_pb2.VerifyServiceDescribeRequest())
    assert drafter.welcome == about
    await drafter.die()


@pytest.mark.parametrize(
    ("fields", "field", "words"),
    [
        ({"protocol_revision": 99}, "protocol_revision", "revision 99"),
        ({"vocab_size": 7}, "vocab_size", "7 tokens, the target's has 320"),
        ({"tokenizer_digest": "ab" * 32}, "tokenizer_digest", "abababab"),
        ({"tokenizer_digest": "ab" * 32, "vocab_size": 320}, "tokenizer_digest", "tokenizer"),
    ],
)
async def test_a_drafter_that_does_not_fit_is_told_what_differs(
    bench: VerifyBench, fields: dict[str, object], field: str, words: str
) -> None:
    error = await failure_of(bench, hello(**fields))
    assert isinstance(error, Mismatch)
    assert error.field == field
    assert words in str(error)


async def test_an_equal_tokenizer_makes_a_padded_vocabulary_fit(bench: VerifyBench) -> None:
    about = await bench.stub.Describe(verify_pb2.VerifyServiceDescribeRequest())
    greeting = hello(vocab_size=384, tokenizer_digest=about.tokenizer_digest).hello
    drafter = bench.drafter(silent, greeting)
    await drafter.welcomed.wait()
    await drafter.die()


async def test_a_stream_must_begin_with_hello(bench: VerifyBench) -> None:
    error = await failure_of(bench, Say(joins=[verify_pb2.JoinSession(session_id=1)]))
    assert isinstance(error, ProtocolBroken)


async def test_a_second_hello_ends_the_stream(bench: VerifyBench) -> None:
    assert isinstance(await failure_of(bench, hello(), hello()), ProtocolBroken)


async def test_a_half_close_ends_the_stream_well(bench: VerifyBench) -> None:
    call = bench.stub.Rounds()  # type: ignore[call-arg]
    await call.write(hello())
    await call.done_writing()
    assert len([message async for message in call]) == 1
    assert await call.code() == grpc.StatusCode.OK
