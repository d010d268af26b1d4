"""Tiers that change between rounds: the same text, and a slow drafter that is left in time."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from graft.common.tier import Tier
from graft.gateway.tiers.choose import Offer
from graft.gateway.tiers.controller import FixedPilot
from graft.gateway.tiers.seen import Seen, Switch
from graft.testing.cluster import Cluster, running_cluster
from graft.testing.models import write_tiny_model
from graft.testing.scripted import accept_n, perfect, replay, slow

PROMPTS = ("the first prompt", "and another one", "third")
TOKENS = 24


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


class Restless(FixedPilot):
    """Another tier every round."""

    def __init__(self, tiers: Sequence[Tier]) -> None:
        super().__init__(tiers[0])
        self._next = cycle([*tiers[1:], tiers[0]])

    def observe(self, seen: Seen, now: float) -> Switch | None:
        before, self.tier = self.tier, next(self._next)
        return Switch(before, self.tier, "gain")


class RestlessPolicy:
    """Gives every session a pilot that changes its mind every round."""

    def open(
        self, verify: str, offers: Sequence[Offer], num_sessions: int, context: int, now: float
    ) -> Restless:
        tiers = []
        for offer in offers:
            name = offer.name
            tiers += [Tier(name, 3, 1, 4), Tier(name, 1, 1, 2), Tier(name), Tier(name, 4, 2, 9)]
        return Restless(tiers)

    def as_body(self) -> dict[str, object]:
        return {}


async def texts(cluster: Cluster, speculation: str, temperature: float) -> list[dict[str, Any]]:
    return [
        await cluster.complete(
            prompt,
            max_tokens=TOKENS,
            temperature=temperature,
            seed=11,
            ignore_eos=True,
            speculation=speculation,
            return_token_ids=True,
        )
        for prompt in PROMPTS
    ]


def ids(bodies: list[dict[str, Any]]) -> list[list[int]]:
    return [body["choices"][0]["token_ids"] for body in bodies]


async def truth_of(model: Path) -> list[list[int]]:
    """Prompt and greedy answer of every prompt."""
    async with running_cluster(model, num_draft=0) as cluster:
        bodies = await texts(cluster, "off", 0.0)
        prompts = [
            cluster.gateway.gateway.tokenizer.encode(prompt, specials=True) for prompt in PROMPTS
        ]
        return [prompt + answer for prompt, answer in zip(prompts, ids(bodies), strict=True)]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
async def test_tiers_that_change_every_round_change_no_text(
    model: Path, temperature: float
) -> None:
    runs = await truth_of(model)
    proposers = [perfect(replay(runs)), accept_n(replay(runs), 1)]
    async with running_cluster(model, proposers=proposers, gateway={"tiers": "goodput"}) as cluster:
        alone = await texts(cluster, "off", temperature)
        cluster.gateway.gateway.steering._policy = RestlessPolicy()
        drafted = await texts(cluster, "auto", temperature)
        info = (await cluster.client.get("/server_info")).json()
        exposed = (await cluster.client.get("/metrics")).text
    assert ids(drafted) == ids(alone)
    assert info["tiers"]["switches"] >= 4 * len(PROMPTS)
    assert info["tiers"]["last_switches"][-1]["reason"] == "gain"
    assert 'graft_tier_switches_total{from="perfect-middle"' in exposed
    if temperature == 0.0:
        assert sum(accepted(body) for body in drafted) > 0


def accepted(body: dict[str, Any]) -> int:
    number: int = body["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]
    return number


async def test_tier_zero_makes_no_draft_and_no_message(model: Path) -> None:
    runs = await truth_of(model)
    drafter = perfect(replay(runs))

    class Off(FixedPilot):
        def observe(self, seen: Seen, now: float) -> Switch | None:
            before, self.tier = self.tier, Tier(self.tier.proposer)
            return None if before.off else Switch(before, self.tier, "pays_not")

    class OffPolicy:
        def open(
            self, verify: str, offers: Sequence[Offer], num_sessions: int, context: int, now: float
        ) -> Off:
            return Off(offers[0].base)

        def as_body(self) -> dict[str, object]:
            return {}

    async with running_cluster(
        model, proposers=[drafter], gateway={"tiers": "goodput", "tree_deadline_ms": 10_000}
    ) as cluster:
        cluster.gateway.gateway.steering._policy = OffPolicy()
        bodies = await texts(cluster, "auto", 0.0)
    assert ids(bodies) == [run[-TOKENS:] for run in runs]
    assert drafter.num_batches <= 4 * len(PROMPTS)


async def test_a_drafter_that_becomes_slow_is_left_and_taken_back_when_it_is_well(
    model: Path,
) -> None:
    """The tiny model decodes a token in milliseconds, so 800 ms a tree are hopeless."""
    runs = await truth_of(model)
    inner = perfect(replay(runs))
    drafter = slow(inner, 0.0)
    gateway = {"tiers": "goodput", "tree_deadline_ms": 2000}
    async with running_cluster(model, proposers=[drafter], gateway=gateway) as cluster:
        steering = cluster.gateway.gateway.steering
        drafter.delay_ms = 800.0  # type: ignore[attr-defined]
        await cluster.complete(
            PROMPTS[0], max_tokens=TOKENS, temperature=0.0, ignore_eos=True, speculation="auto"
        )
        left = [past.switch for past in steering._past if past.switch.after.off]
        assert left, "a drafter of 800 ms a tree is not worth its while"
        before = drafter.num_batches
        await cluster.complete(
            PROMPTS[1], max_tokens=TOKENS, temperature=0.0, ignore_eos=True, speculation="auto"
        )
        assert drafter.num_batches <= before + 4


async def test_a_request_that_names_a_tier_is_not_steered(model: Path) -> None:
    runs = await truth_of(model)

    inner = perfect(replay(runs))
    async with running_cluster(model, proposers=[inner], gateway={"tiers": "goodput"}) as cluster:
        body = await cluster.complete(
            PROMPTS[0],
            max_tokens=TOKENS,
            temperature=0.0,
            ignore_eos=True,
            speculation={"proposer": "perfect", "num_steps": 2},
        )
        info = (await cluster.client.get("/server_info")).json()
    assert body["metrics"]["speculative_decoding"]["num_spec_tokens"] == 2
    assert info["tiers"]["switches"] == info["tiers"]["probes"] == 0
