"""What a target alone writes: the token ids of plain sessions at a real verify service."""

from __future__ import annotations

from collections.abc import Sequence

import grpc.aio

from graft.common.channel import open_channel
from graft.v1 import sampling_pb2, verify_pb2, verify_pb2_grpc


async def plain_tokens(
    address: str,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    sampling: sampling_pb2.Sampling | None = None,
    ignore_eos: bool = True,
) -> list[int]:
    """The ids of one session without a drafter."""
    async with open_channel(address) as channel:
        call: grpc.aio.StreamStreamCall[verify_pb2.GenerateRequest, verify_pb2.GenerateResponse] = (
            verify_pb2_grpc.VerifyServiceStub(channel).Generate(None, timeout=60)
        )
        await call.write(
            verify_pb2.GenerateRequest(
                open=verify_pb2.OpenSession(
                    prompt_tokens=prompt,
                    sampling=sampling,
                    stop=sampling_pb2.StopRule(max_tokens=max_tokens, ignore_eos=ignore_eos),
                )
            )
        )
        tokens: list[int] = []
        async for response in call:
            tokens.extend(response.committed.tokens)
        return tokens
