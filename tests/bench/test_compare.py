"""Systems side by side: turns, sums, what is left out, and peers in processes of their own."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from graft.bench.ask import Client
from graft.bench.compare import Asked, Comparison, Taken, measure
from graft.bench.lineup import Wanted, lineup
from graft.bench.peers import worker
from graft.bench.peers.catalog import (
    NAMES,
    PEERS,
    Peer,
    environment_of,
    install,
    interpreter_of,
    peer_of,
)
from graft.bench.systems import Gateway, Job, PeerProcess, PeerRun, Written
from graft.common.errors import GraftError, InvalidArgument
from graft.models.storage import Precision
from graft.testing.cluster import running_cluster
from graft.testing.models import write_tiny_model

JOB = Job([5, 6, 7, 5, 6, 7, 5, 6], 6, 0.0, 0)


@dataclass
class Fake:
    """Answers at once and notes who was asked when."""

    name: str
    log: list[str]
    most_clients: int = 8
    salts: list[str] = field(default_factory=list)
    lasts: int = 1000

    async def write(self, jobs: Sequence[Job], salt: str) -> list[Written]:
        self.log.append(self.name)
        self.salts.append(salt)
        if len(self.salts) > self.lasts:
            raise GraftError("it broke")
        return [Written(job.max_tokens) for job in jobs]

    async def close(self) -> None:
        """Nothing."""


def taken(system: str, block: int, seconds: float, tokens: int, category: str = "") -> Taken:
    return Taken(system, block, category, seconds, (Written(tokens, 2, (tokens - 2,)),))


async def test_systems_take_turns_and_no_prompt_is_cached() -> None:
    log: list[str] = []
    fakes = [Fake("a", log), Fake("b", log)]
    found = await measure(fakes, [Asked(JOB, "x"), Asked(JOB, "y")], repeats=2)
    assert log == ["a", "b"] * 5
    assert len(set(fakes[0].salts)) == 5
    assert len(found.taken) == 8 and found.systems == ["a", "b"]


async def test_a_system_for_one_client_is_left_out_with_a_line() -> None:
    log: list[str] = []
    found = await measure(
        [Fake("a", log), Fake("b", log, most_clients=1)], [Asked(JOB, "")] * 5, clients=2
    )
    assert found.systems == ["a"] and found.skipped == ("b: takes one client at a time",)
    assert sorted({one.block for one in found.taken}) == [0, 1, 2]


async def test_a_system_that_fails_is_left_out_with_a_line_and_the_others_go_on() -> None:
    log: list[str] = []
    found = await measure([Fake("a", log), Fake("b", log, lasts=2)], [Asked(JOB, "")] * 3)
    assert log == ["a", "b", "a", "b", "a", "b", "a"]
    assert found.systems == ["a"] and len(found.taken) == 3
    assert found.skipped == ("b: left out, it failed: it broke",)


async def test_nothing_is_reported_when_every_system_failed() -> None:
    with pytest.raises(GraftError, match="a: left out, it failed: it broke"):
        await measure([Fake("a", [], lasts=0)], [Asked(JOB, "")])


def test_a_rate_is_all_tokens_over_median_seconds() -> None:
    found = Comparison(
        1,
        (
            taken("a", 0, 1.0, 10, "x"),
            taken("a", 0, 9.0, 10, "x"),
            taken("a", 0, 2.0, 10, "x"),
            taken("a", 1, 3.0, 10, "y"),
        ),
    )
    assert found.tokens_per_s("a") == pytest.approx(20 / 5)
    assert found.tokens_per_s("a", "x") == pytest.approx(5)
    assert found.accept_length("a") == pytest.approx(36 / 8)
    assert found.as_json() == {"systems": {"a": 4.0}, "accept_length": {"a": 4.5}}
    assert [table.title for table in found.page({}).tables][1] == "Tokens/s by category"


async def test_our_gateway_answers_token_ids(tmp_path: Path) -> None:
    async with (
        running_cluster(write_tiny_model(tmp_path / "tiny")) as cluster,
        Client(cluster.url) as client,
    ):
        tokens = await client.tokenize("a b c a b c")
        job = Job(tokens, 8, 0.0, 0)
        found = await measure(
            [Gateway("plain", client, "off"), Gateway("speculative", client, "auto")],
            [Asked(job, "")],
        )
    assert [one.num_tokens for one in found.taken] == [found.taken[0].num_tokens] * 2
    assert 1 <= found.taken[0].num_tokens <= 8
    assert found.accept_length("plain") in (None, 1.0)


def scripted(tmp_path: Path, body: str) -> Callable[[pytest.MonkeyPatch], None]:
    path = tmp_path / "scripted_worker.py"
    path.write_text("import json, sys\n" + body)

    def install(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(worker, "__file__", str(path))

    return install


async def start(mode: str = "plain", model: str = "m") -> PeerProcess:
    run = PeerRun(peer_of("transformers"), Path(sys.executable), mode, Path(model), 1)
    return await PeerProcess.start("peer", run)


async def test_a_peer_that_cannot_load_ends_with_its_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(tmp_path, "sys.exit('no such model')")(monkeypatch)
    with pytest.raises(GraftError, match="peer ended: no such model"):
        await start()


async def test_a_peer_s_error_stands_before_what_it_says_on_its_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = ["loading", "(core) ERROR 12:00 ValueError: no such head", "", "destroying the group"]
    scripted(tmp_path, f"sys.exit({chr(10).join(told)!r})")(monkeypatch)
    with pytest.raises(GraftError, match=r"peer ended: .*ValueError: no such head$"):
        await start()


async def test_a_peer_gets_a_block_of_jobs_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(
        tmp_path,
        "print(json.dumps({'ready': True}), flush=True)\n"
        "for line in sys.stdin:\n"
        "    answers = [(len(job['tokens']), 2, [1]) for job in json.loads(line)]\n"
        "    print(json.dumps({'answers': answers}), flush=True)\n",
    )(monkeypatch)
    peer = await start()
    try:
        assert await peer.write([JOB], "") == [Written(len(JOB.tokens), 2, (1,))]
        assert await peer.write([JOB, JOB], "") == [Written(len(JOB.tokens), 2, (1,))] * 2
    finally:
        await peer.close()
    with pytest.raises(GraftError, match="peer ended"):
        await peer._line(5)


@pytest.mark.parametrize("mode", ["plain", "prompt lookup"])
async def test_transformers_writes_what_it_is_asked_for(tmp_path: Path, mode: str) -> None:
    peer = await start(mode, str(write_tiny_model(tmp_path / "tiny")))
    try:
        (written,) = await peer.write([JOB], "")
        assert 1 <= written.num_tokens <= JOB.max_tokens
    finally:
        await peer.close()


def test_a_peer_s_own_environment_goes_before_ours(tmp_path: Path) -> None:
    peer = peer_of("transformers")
    assert interpreter_of(peer, tmp_path) == Path(sys.executable)
    own = tmp_path / "transformers" / "bin" / "python"
    own.parent.mkdir(parents=True)
    own.write_text("")
    assert interpreter_of(peer, tmp_path) == own


def test_a_peer_starts_with_the_libraries_it_asks_for_where_they_are(tmp_path: Path) -> None:
    python = tmp_path / "bin" / "python"
    peer = Peer("p", "p", (), {}, preload=("libone.so", "libtwo.so"))
    assert environment_of(peer, python, 3) == {"OMP_NUM_THREADS": "3"}
    there = tmp_path / "lib" / "libtwo.so"
    there.parent.mkdir()
    there.write_text("")
    assert environment_of(peer, python, 3)["LD_PRELOAD"] == str(there)


async def test_an_install_that_fails_leaves_no_half_environment(tmp_path: Path) -> None:
    peer = Peer("none", "none_at_all", ("--no-such-option",), {})
    with pytest.raises(GraftError, match=r"installing none failed: .*no such option"):
        await install(peer, tmp_path, lambda _what, _share: None)
    assert interpreter_of(peer, tmp_path) is None


def test_an_unknown_peer_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidArgument, match=", ".join(NAMES)):
        peer_of("nope")
    assert len({system for peer in PEERS for system in peer.modes}) == 8


@pytest.mark.timeout(300)
async def test_a_lineup_starts_what_is_there_and_says_what_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRAFT_CACHE", str(tmp_path / "cache"))
    config = tmp_path / "config.yaml"
    config.write_text(json.dumps({"verify": {"kv_tokens": 2048}}))
    wanted = Wanted(
        str(write_tiny_model(tmp_path / "tiny")),
        [Precision.FP32, Precision.Q4_1],
        ["llama.cpp"],
        1,
        config=config,
        peers_folder=tmp_path / "peers",
    )
    async with lineup(wanted, lambda _what, _share: None) as up:
        names = [system.name for system in up.systems if system.name.startswith("graft")]
        assert names == ["graft fp32 plain", "graft fp32 speculative"]
        assert any(line.startswith("graft q4_1: skipped, precision") for line in up.skipped)
        tokens = await up.client.tokenize("a b c a b c")
        found = await measure(up.systems[:2], [Asked(Job(tokens, 6, 0.0, 0), "")])
    assert min(found.as_json()["systems"].values()) > 0
