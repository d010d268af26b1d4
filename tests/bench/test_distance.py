"""Distance is measured on real replicas, with one text in every mode."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from graft.bench.direct import paired
from graft.bench.distance import MODES, Distance, Point, Wire, measure
from graft.bench.rounds import Passage, Round
from graft.common.relay import Relay
from graft.common.sampling import Sampling
from graft.testing.cluster import running_cluster
from graft.testing.models import write_tiny_model

PROMPTS = [list(b"a b c a b c a b c"), list(b"one two one two one two")]


def passage(wall_s: float, num_tokens: int, ahead: bool) -> Passage:
    rounds = tuple(
        Round(wall_s, num_tokens, 4, drafted=True, ahead=ahead and place > 0) for place in range(4)
    )
    return Passage(tuple(range(4 * num_tokens)), rounds)


def test_what_is_kept_and_what_the_formula_says() -> None:
    def points(sync_s: float, ahead_s: float) -> dict[str, Point]:
        return {
            "off": Point([passage(0.010, 1, False)]),
            "synchronous": Point([passage(sync_s, 2, False)], 100.0),
            "lookahead": Point([passage(ahead_s, 2, True)], 400.0),
        }

    found = Distance(0.010, {0.0: points(0.014, 0.011), 1.0: points(0.024, 0.012)})
    assert found.kept(1.0, "synchronous") == pytest.approx(14 / 24)
    assert found.formula(1.0) == pytest.approx(14 / 24)
    answer = found.as_json()["points"][1]
    assert answer["lookahead"]["kept"] == pytest.approx(11 / 12, abs=1e-4)
    assert answer["lookahead"]["hit_rate"] == 1.0
    assert answer["synchronous"]["payload_bytes_per_token"] == 12.5
    assert not found.same_text
    assert [row[1] for row in found.page({}).tables[0].rows] == [*MODES, *MODES]


def sent_bytes(registry: CollectorRegistry) -> float:
    return registry.get_sample_value("graft_draft_sent_bytes_total") or 0.0


async def test_every_mode_runs_at_every_distance_and_writes_one_text(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    heard: list[None] = []
    async with running_cluster(model) as cluster:
        relay = Relay(cluster.verify_addresses[0])
        via = await relay.start()
        registry = cluster.drafters[0].metrics.registry

        async def sent() -> float:
            return sent_bytes(registry)

        try:
            async with paired(cluster.verify_addresses[0], cluster.draft_addresses[0], via) as pair:
                wire = Wire(pair, relay, sent, pair.tier, 6)
                found = await measure(
                    wire, PROMPTS, 24, Sampling(), lambda: heard.append(None), (0.0, 1.0)
                )
        finally:
            await relay.stop()
    assert found.same_text
    assert len(heard) == len(PROMPTS) * len(MODES) * 2
    for modes in found.points.values():
        assert modes["off"].sent_bytes == 0 < modes["synchronous"].sent_bytes
        assert modes["synchronous"].hit_rate == 0.0
    assert relay.bytes_there > 0
