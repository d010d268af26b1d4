"""What a scrape of a replica shows."""

from __future__ import annotations

import socket
from pathlib import Path

import httpx
import pytest

from graft.common.errors import InvalidArgument
from graft.common.tree import chain
from graft.testing.verify_client import Say, Seat, running_verify, settings_of
from graft.v1.tree_pb2 import TreeRefusal
from graft.verify.metrics import VerifyMetrics
from graft.verify.server import VerifyServer
from graft.verify.tally import Tally

GAUGES = {"running": 1, "waiting": 2, "free": 3, "used": 4, "cached": 5, "dropped_streams": 6}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_a_tally_is_read_at_every_scrape() -> None:
    metrics, tally = VerifyMetrics(), Tally()
    metrics.attach(tally, lambda: GAUGES)
    read = metrics.registry.get_sample_value
    assert read("graft_draft_tokens_total") == 0
    tally.count_round(kept=4, accepted=3, num_drafted=9, reason=0)  # type: ignore[arg-type]
    tally.refused[TreeRefusal.TREE_REFUSAL_TOO_DEEP] += 2
    assert read("graft_draft_tokens_total") == 9
    assert read("graft_accepted_tokens_total") == 3
    assert read("graft_accepted_per_pos_total", {"position": "2"}) == 1
    assert read("graft_rejected_trees_total", {"reason": "too_deep"}) == 2
    assert read("graft_kv_pages", {"state": "cached"}) == 5
    assert read("graft_sessions_open", {"state": "waiting"}) == 2
    assert read("graft_pushed_trees_total", {"outcome": "hit"}) == 0


async def test_metrics_are_served_on_their_own_port(tiny_model: Path) -> None:
    prompt = list(b"repeat")

    async def guess(seat: Seat) -> Say:
        return Say(trees=[seat.propose(chain([seat.tokens[-1], 113, 50]))])

    port = free_port()
    async with running_verify(tiny_model, metrics_port=port) as bench:
        generation = await bench.generate(prompt, 12, drafter=bench.drafter(guess))
        async with httpx.AsyncClient() as client:
            page = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
    assert generation.finished is not None
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    assert float(values["graft_draft_tokens_total"]) == generation.finished.drafted_count
    assert float(values["graft_accepted_tokens_total"]) == generation.finished.accepted_count
    rounds = float(values['graft_rounds_total{outcome="tree"}'])
    assert float(values["graft_accept_length_count"]) >= rounds > 0


async def test_a_metrics_port_in_use_is_named(tiny_model: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = VerifyServer(settings_of(tiny_model, metrics_port=port))
        await server.start()
        with pytest.raises(InvalidArgument, match=f"{port}: is the port in use"):
            await server.ready()
        await server.stop(0)
