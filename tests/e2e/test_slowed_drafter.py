"""A drafter that becomes ten times slower and recovers: plain speed meanwhile, drafts again after.

The target is the embedded one, so that a round takes the time that a round takes; the drafter is
scripted, so that nothing but its pace changes. Rates are compared within one run.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from graft.common.model_files import EMBEDDED
from graft.testing.cluster import Cluster, running_cluster
from graft.testing.scripted import accept_n, replay, slow

PACE_MS = 10.0
SLOWED = 10.0
TOKENS = 300
ROUNDS_TO_NOTICE = 8
BACK_WITHIN_S = 5.0


async def stream(cluster: Cluster, prompt: list[int], wish: str | None) -> list[tuple[float, int]]:
    """When how many tokens came."""
    fields: dict[str, Any] = {
        "model": cluster.model,
        "prompt": prompt,
        "max_tokens": TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    if wish is not None:
        fields["speculation"] = wish
    came: list[tuple[float, int]] = []
    async with cluster.client.stream("POST", "/v1/completions", json=fields) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                if choice.get("token_ids"):
                    came.append((time.monotonic(), len(choice["token_ids"])))
    return came


def rate(came: list[tuple[float, int]]) -> float:
    """Tokens a second after the first event."""
    return sum(count for _, count in came[1:]) / (came[-1][0] - came[0][0])


async def truth_of(prompt: list[int]) -> list[int]:
    async with running_cluster(Path(EMBEDDED), num_draft=0) as cluster:
        body = await cluster.complete(
            prompt,
            max_tokens=TOKENS,
            temperature=0,
            ignore_eos=True,
            return_token_ids=True,
            speculation="off",
        )
    found: list[int] = body["choices"][0]["token_ids"]
    return found


@pytest.mark.slow
@pytest.mark.embedded
@pytest.mark.timeout(600)
async def test_a_drafter_ten_times_slower_costs_little_and_is_taken_back() -> None:
    prompt = [28120, 198, 2683, 253, 1890, 2815, 338]
    inner = accept_n(replay([[*prompt, *await truth_of(prompt)]]), 2)
    drafter: Any = slow(inner, PACE_MS)
    async with running_cluster(
        Path(EMBEDDED),
        proposers=[drafter],
        gateway={"tiers": "goodput", "tree_deadline_ms": 50},
    ) as cluster:
        await stream(cluster, prompt, "off")
        plain = rate(await stream(cluster, prompt, "off"))
        for _ in range(4):  # the policy learns what this drafter is worth
            healthy = rate(await stream(cluster, prompt, None))
        assert healthy > 1.2 * plain

        drafter.delay_ms = SLOWED * PACE_MS
        slowed = await stream(cluster, prompt, None)
        plain = max(plain, rate(await stream(cluster, prompt, "off")))
        assert rate(slowed[ROUNDS_TO_NOTICE:]) >= 0.9 * plain
        assert rate(await stream(cluster, prompt, None)) >= 0.9 * plain

        drafter.delay_ms = PACE_MS
        restored = time.monotonic()
        while time.monotonic() - restored < BACK_WITHIN_S:
            came = await stream(cluster, prompt, None)
            if max(count for _, count in came) > 1:
                break
        back = next(at for at, count in came if count > 1)
        assert back - restored < BACK_WITHIN_S
        assert rate(await stream(cluster, prompt, None)) > 1.2 * plain
