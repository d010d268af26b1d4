"""How accept rules pass through the gateway: from both surfaces to verify, and across a replay."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from graft.gateway.rpc_fields import chat_body
from graft.testing.front import running_front
from graft.testing.scripted_verify import Script
from graft.v1 import gateway_pb2
from graft.v1.sampling_pb2 import AcceptRule, Sampling

SAY = list(b"abcdefghijklmnopqrstuvwxyz" * 4)
TARGET_ONLY = AcceptRule.ACCEPT_RULE_TARGET_ONLY
LOSSY = {"rule": TARGET_ONLY, "threshold_single": 0.5, "threshold_acc": 1.0}


def rule_of(sampling: Sampling) -> tuple[int, float, float]:
    return sampling.rule, sampling.threshold_single, sampling.threshold_acc


@pytest.mark.parametrize(
    ("fields", "sent"),
    [
        ({}, (AcceptRule.ACCEPT_RULE_UNSPECIFIED, 0, 0)),
        ({"accept_rule": "coupled"}, (AcceptRule.ACCEPT_RULE_COUPLED, 1, 1)),
        ({"accept_rule": "block"}, (AcceptRule.ACCEPT_RULE_BLOCK, 1, 1)),
        ({"accept_rule": "target_only", "threshold_acc": 0.5}, (TARGET_ONLY, 1, 0.5)),
    ],
)
async def test_a_request_s_rule_reaches_verify_and_none_leaves_it_to_the_replica(
    tmp_path: Path, fields: dict[str, Any], sent: tuple[int, float, float]
) -> None:
    async with running_front(tmp_path, [Script(SAY)]) as front:
        assert (await front.complete(max_tokens=4, **fields)).status_code == 200
        (opened,) = front.verify.opened
    assert rule_of(opened.sampling) == sent


def test_both_surfaces_take_the_same_fields() -> None:
    options = gateway_pb2.GenerationOptions(accept_rule="target_only", threshold_single=0.25)
    messages = [gateway_pb2.ChatMessage(role="user", content="hi")]
    body = chat_body(gateway_pb2.ChatRequest(messages=messages, options=options))
    assert (body.accept_rule, body.threshold_single, body.threshold_acc) == ("target_only", 0.25, 1)
    plain = chat_body(gateway_pb2.ChatRequest(messages=messages))
    assert plain.accept_rule is None


async def test_a_replay_asks_for_the_rule_that_was_in_force(tmp_path: Path) -> None:
    reached = asyncio.Event()

    async def hold(num_committed: int) -> None:
        if num_committed >= 5:
            reached.set()
            await asyncio.Event().wait()

    scripts = [
        Script(SAY, widths=(4,), before_commit=hold, says_opened=LOSSY),
        Script(SAY, widths=(4,), before_commit=hold, says_opened=LOSSY),
    ]
    async with running_front(tmp_path, scripts) as front:
        task = asyncio.create_task(front.complete(max_tokens=20))
        await reached.wait()
        first, second = front.verifiers
        if not first.opened:
            first, second = second, first
        second.script.before_commit = None
        await first.stop()
        body = (await task).json()
    assert rule_of(first.opened[0].sampling) == (AcceptRule.ACCEPT_RULE_UNSPECIFIED, 0, 0)
    assert rule_of(second.opened[0].sampling) == (TARGET_ONLY, 0.5, 1)
    record = body["metrics"]["speculative_decoding"]
    assert (record["accept_rule"], record["lossy"]) == ("target_only", True)
