"""What `graft doctor` says about drafting: each proposer with its default tier and its checkpoint.

Asks the draft service where one runs, and otherwise says what each proposer would take to start.
"""

from __future__ import annotations

from collections.abc import Iterator

from graft.common.errors import GraftError

_TIMEOUT_S = 2.0


def served(address: str) -> list[str]:
    """A line for each proposer of the draft service at `address`; empty where none answers."""
    import grpc

    from graft.v1.draft_pb2 import DraftServiceDescribeRequest
    from graft.v1.draft_pb2_grpc import DraftServiceStub

    with grpc.insecure_channel(address, [("grpc.enable_http_proxy", 0)]) as channel:
        try:
            told = DraftServiceStub(channel).Describe(
                DraftServiceDescribeRequest(), timeout=_TIMEOUT_S
            )
        except grpc.RpcError:
            return []
    lines = []
    for proposer in told.proposers:
        tier = proposer.default_tier
        shape = f"{tier.num_steps} steps, topk {tier.topk}, {tier.num_draft_tokens} nodes"
        lines.append(f"{proposer.name} at {address}: {shape}; {proposer.detail}")
    return lines


def startable(model: str) -> Iterator[str]:
    """A line for each proposer: what it drafts for `model` with, or what it needs."""
    from graft.draft.server import MERGED, PROPOSERS
    from graft.draft.shipped import shipped_for

    try:
        ours = {one.proposer: one for one in shipped_for(model)}
    except GraftError:
        ours = {}
    for name in PROPOSERS:
        if name == "ngram":
            yield f"{name}: needs no checkpoint"
        elif name == MERGED:
            yield f"{name}: --proposers merged=eagle3+ngram,eagle3=PATH puts two into one tree"
        elif name in ours:
            yield f"{name}: {ours[name].folder} for {model}"
        else:
            yield f"{name}: needs a checkpoint, --proposers {name}=PATH"
