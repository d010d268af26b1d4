"""Whether a replica fits this gateway, and the sentence that says why not."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import grpc.aio

from graft.common.channel import PROTOCOL_REVISION
from graft.gateway.reader import VerifyReplica
from graft.gateway.replicas import Pairing
from graft.v1 import draft_pb2, draft_pb2_grpc, verify_pb2, verify_pb2_grpc

_MICROS = 1e-6
_DIGEST_CHARS = 12

Verify = verify_pb2.VerifyServiceDescribeResponse
Draft = draft_pb2.DraftServiceDescribeResponse


def verify_pairing(
    model: str, digest: str, replicas: Callable[[], Iterable[VerifyReplica]]
) -> Pairing[Verify]:
    """Verify replicas must share our tokenizer, and one model among themselves."""

    def differs(address: str, described: Verify) -> str | None:
        sentence = _common(described.protocol_revision, described.tokenizer_digest, model, digest)
        if sentence is not None:
            return sentence
        for replica in replicas():
            known = replica.description
            if replica.address == address or not replica.usable or known is None:
                continue
            if known.model_id != described.model_id:
                return f"it serves {described.model_id}, {replica.address} serves {known.model_id}"
            if known.precision != described.precision:
                # A session that moves between them would go on with other logits.
                return (
                    f"its weights are {described.precision or 'of unknown precision'}, those of "
                    f"{replica.address} are {known.precision or 'of unknown precision'}"
                )
        return None

    def progress_age_s(described: Verify) -> float:
        return described.last_progress_micros * _MICROS

    return Pairing("verify", _describe_verify, differs, progress_age_s)


def draft_pairing(model: str, digest: str) -> Pairing[Draft]:
    """Draft replicas must share our tokenizer, unless they take the target's."""

    def differs(_: str, described: Draft) -> str | None:
        sentence = _common(described.protocol_revision, described.tokenizer_digest, model, digest)
        if sentence is None and not described.proposers:
            return "it has no proposers"
        return sentence

    return Pairing("draft", _describe_draft, differs, lambda _: 0.0)


def _common(revision: int, theirs: str, model: str, ours: str) -> str | None:
    if revision != PROTOCOL_REVISION:
        return f"it speaks protocol revision {revision}, ours is {PROTOCOL_REVISION}"
    if theirs and theirs != ours:
        return (
            f"its tokenizer is {theirs[:_DIGEST_CHARS]}, ours is {ours[:_DIGEST_CHARS]} ({model})"
        )
    return None


async def _describe_verify(channel: grpc.aio.Channel, timeout_s: float) -> Verify:
    return await verify_pb2_grpc.VerifyServiceStub(channel).Describe(
        verify_pb2.VerifyServiceDescribeRequest(), timeout=timeout_s
    )


async def _describe_draft(channel: grpc.aio.Channel, timeout_s: float) -> Draft:
    return await draft_pb2_grpc.DraftServiceStub(channel).Describe(
        draft_pb2.DraftServiceDescribeRequest(), timeout=timeout_s
    )
