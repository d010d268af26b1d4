"""Every request field, alone and in pairs, with speculation and without: the same answer.

Drafters that know what comes, that are always wrong, that look words up, and one with a network
stand behind one tiny model. The few bodies that hold all pairs are walked always; each pair by
itself is walked by the slow tests.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from graft.common.tree import Tree
from graft.draft.proposers.base import Seat, chain
from graft.draft.server import make_proposers
from graft.draft.settings import DraftSettings
from graft.testing import walk
from graft.testing.checkpoints import write_eagle3
from graft.testing.cluster import Cluster, running_cluster
from graft.testing.models import IM_END, write_tiny_model
from graft.testing.scripted import Scripted
from graft.testing.walk import CHAT, TEXT, Fields, Outcome, outcome

DRAFTERS = ("perfect", "always_wrong", "ngram", "eagle3")
ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Say na na na na na."}]},
    "/v1/completions": {"prompt": "abc abc abc ab"},
}
BASE: dict[str, Any] = {"max_tokens": 8, "temperature": 0.7, "seed": 11, "return_token_ids": True}
_numbers = itertools.count()


class Truth:
    """What sessions are about to write, as the answer without speculation said it."""

    def __init__(self) -> None:
        self.outputs: list[list[int]] = []

    def after(self, seat: Seat) -> list[int]:
        """What comes after the seat's prefix, as far as it is known."""
        tokens = seat.mirror.prefix.tokens.tolist()
        written = tokens[seat.mirror.prompt_length :]
        for output in self.outputs:
            if output[: len(written)] == written:
                return [*output[len(written) :], IM_END]
        return [IM_END]

    def right(self, seat: Seat) -> Tree | None:
        """What comes."""
        return chain(seat, self.after(seat)[:4])

    def wrong(self, seat: Seat) -> Tree | None:
        """What comes in none of the answers, however they share their beginnings.

        Nothing where they end: what is written behind a stop string is not told.
        """
        if len(self.after(seat)) < 2:
            return None
        said = {IM_END, *(token for output in self.outputs for token in output)}
        other = next(one for one in range(seat.mirror.limits.vocab_size) if one not in said)
        return chain(seat, [other] * 4)


class Walker:
    """Asks with each drafter and compares; remembers how much each of them was accepted."""

    def __init__(self, cluster: Cluster, truth: Truth) -> None:
        self.accepted = dict.fromkeys(DRAFTERS, 0)
        self.drafted = dict.fromkeys(DRAFTERS, 0)
        self._cluster = cluster
        self._truth = truth

    async def walk(self, route: str, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Each body, with every drafter; returns those that were answered."""
        answered = []
        for body in bodies:
            whole = {**BASE, **ROUTES[route], **body}
            plain = await self._ask(route, whole, "off")
            self._truth.outputs = plain.token_ids if plain.status == 200 else []
            drafted = await asyncio.gather(*(self._ask(route, whole, name) for name in DRAFTERS))
            for name, one in zip(DRAFTERS, drafted, strict=True):
                assert one.same_as(plain), f"{name} {route} {body}\n{plain}\n{one}"
                self.accepted[name] += one.accepted
                self.drafted[name] += one.drafted
            assert plain.status in (200, 400), (body, plain)
            if plain.status == 200:
                answered.append(body)
        return answered

    async def _ask(self, route: str, body: dict[str, Any], speculation: str) -> Outcome:
        """One answer, from a prefix cache of its own."""
        salt = f"{body.get('cache_salt', '')}{next(_numbers)}"
        fields = {**body, "speculation": speculation, "cache_salt": salt}
        return outcome(await self._cluster.client.post(route, json=fields))


@asynccontextmanager
async def walking(folder: Path) -> AsyncIterator[Walker]:
    target = write_tiny_model(folder / "tiny", layers=6, context=2048)
    checkpoint = write_eagle3(folder / "draft", target)
    flags = {
        "proposers": ["ngram", "eagle3"],
        "draft_model_path": str(checkpoint),
        "model": str(target),
    }
    truth = Truth()
    proposers = [
        Scripted("perfect", truth.right),
        Scripted("always_wrong", truth.wrong),
        *make_proposers(DraftSettings.load(None, flags)),
    ]
    patience = {"silent_s": 60.0, "stall_s": 60.0}
    async with running_cluster(target, proposers=proposers, gateway=patience) as cluster:
        yield Walker(cluster, truth)


def offered(fields: Fields, answered: Sequence[dict[str, Any]]) -> Fields:
    """The fields with the values that the server honours."""
    return {
        name: [value for value in values if dict(value) in answered]
        for name, values in fields.items()
    }


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("route", "fields"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)]
)
async def test_no_field_makes_speculation_show(route: str, fields: Fields, tmp_path: Path) -> None:
    async with walking(tmp_path) as walker:
        answered = await walker.walk(route, walk.alone(fields))
        bodies = walk.covering(offered(fields, answered))
        assert await walker.walk(route, bodies) == bodies
        assert walker.accepted["perfect"] > 0.5 * walker.drafted["perfect"] > 0
        # A guess that comes before its text is told may come true by chance.
        assert walker.accepted["always_wrong"] <= 0.02 * walker.drafted["always_wrong"]
        assert walker.drafted["always_wrong"] > 0
        assert walker.drafted["ngram"] > 0 and walker.drafted["eagle3"] > 0
        assert not await walker.walk(route, [dict(fragment) for fragment in walk.REFUSED])
        await walker.walk(route, [dict(fragment) for fragment in walk.FORCED])


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("route", "fields"), [("/v1/chat/completions", CHAT), ("/v1/completions", TEXT)]
)
async def test_no_pair_of_fields_makes_speculation_show(
    route: str, fields: Fields, tmp_path: Path
) -> None:
    async with walking(tmp_path) as walker:
        assert len(await walker.walk(route, walk.pairs(fields))) > 100


def test_few_bodies_hold_every_pair() -> None:
    bodies = walk.covering(CHAT)
    for pair in walk.pairs(CHAT):
        assert any(walk.fit(pair, body) and pair.keys() <= body.keys() for body in bodies), pair
    assert len(bodies) < 60
