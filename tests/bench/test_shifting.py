"""A shifting trace over real gateways; what it says of the ways is arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest

from graft.bench.ask import Client
from graft.bench.prompts import Prompt
from graft.bench.shifting import ADAPTIVE, TRACE, Answered, Phase, Shifting, measure, requests_of
from graft.common.errors import GraftError
from graft.common.relay import Relay
from graft.gateway.server import GatewayServer
from graft.gateway.settings import GatewaySettings
from graft.testing.cluster import running_cluster
from graft.testing.models import write_tiny_model

SHORT = (
    Phase("near", ("a",), temperature=0.8),
    Phase("crowd, far", ("a", "b"), clients=3, share=2, rtt_s=0.02),
)
PROMPTS = [Prompt("the cat sat on the mat, the cat sat", "a"), Prompt("one two one two", "b")]


def test_the_best_fixed_way_is_found_over_the_whole_trace() -> None:
    def line(*seconds: float) -> list[Answered]:
        return [Answered(f"{place}", one, 100, ("x",)) for place, one in enumerate(seconds)]

    found = Shifting({ADAPTIVE: line(2, 2), "off": line(4, 4), "ngram": line(1, 9)}, {"goodput": 3})
    assert found.best_fixed == "off"
    assert found.as_json()["adaptive_to_best_fixed"] == 2.0
    assert found.same_text
    assert [row[-1] for row in found.page({}).tables[0].rows] == ["2.000", "1.000", "0.800"]
    found.answered["off"][1:] = [Answered("1", 4, 100, ("y",))]  # type: ignore[index]
    assert not found.same_text


def test_the_trace_shifts_in_class_distance_and_clients() -> None:
    assert len({phase.categories for phase in TRACE}) > 2
    assert len({phase.rtt_s for phase in TRACE}) > 1
    assert len({phase.clients for phase in TRACE}) > 1


def test_a_phase_without_prompts_is_refused() -> None:
    with pytest.raises(GraftError, match="no prompt is of a category"):
        requests_of(Phase("none", ("poems",)), PROMPTS, 2, 8)


async def test_all_ways_answer_the_same_requests_with_one_text(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    heard: list[None] = []
    async with running_cluster(model) as cluster:
        relay = Relay(cluster.verify_addresses[0])
        via = await relay.start()
        servers = []
        try:
            clients: dict[str, Client] = {}
            for way, tiers in ((ADAPTIVE, "goodput"), ("ngram", "fixed")):
                words = {"verify": [via], "draft": cluster.draft_addresses, "tiers": tiers}
                given = {**words, "model": str(model), "port": 0, "grpc_port": 0}
                server = GatewayServer(GatewaySettings.model_validate(given))
                servers.append(server)
                port = await server.start()
                clients[way] = Client(f"http://127.0.0.1:{port}")
                while not server.gateway.readiness().ready:
                    await server.gateway.verify.changed.wait(0.05)
            async with clients[ADAPTIVE], clients["ngram"]:
                found = await measure(
                    clients, relay, PROMPTS, 2, 8, lambda: heard.append(None), SHORT
                )
        finally:
            for server in servers:
                await server.stop(1.0)
            await relay.stop()
    assert found.same_text
    assert len(heard) == 2 * (2 + 4)
    for line in found.answered.values():
        assert [len(one.texts) for one in line] == [2, 4]
        assert all(one.num_tokens > 0 for one in line)
