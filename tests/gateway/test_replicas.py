"""Replicas by address and by name: found, refused, lost and found again."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest

from graft.common.errors import InvalidArgument
from graft.gateway.resolve import host_and_port, resolve
from graft.testing.front import running_front
from graft.testing.scripted_verify import Script, ScriptedVerify

SAY = list(b"abcdefghijklmnopqrstuvwxyz" * 20)


@pytest.mark.parametrize("address", ["host", "host:", ":1", "host:x", "host:0", "host:65536", ""])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(InvalidArgument, match="expected host:port"):
        host_and_port(address)


def test_addresses_are_split() -> None:
    assert host_and_port("dns:///verify:7001") == ("verify", 7001)
    assert host_and_port("[::1]:7001") == ("::1", 7001)


async def test_a_name_stands_for_its_addresses() -> None:
    assert await resolve("dns:///localhost:7001") == ["127.0.0.1:7001"]
    assert await resolve("somewhere:7001") == ["somewhere:7001"]


async def test_replicas_behind_a_name_come_and_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replicas = [ScriptedVerify(Script(SAY)) for _ in range(2)]
    await replicas[0].start()
    port = replicas[0].port
    known = ["127.0.0.1"]

    async def look_up(host: str, number: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET, 0, 0, "", (ip, number)) for ip in known]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
    async with running_front(
        tmp_path, [], verify=[f"dns:///verify:{port}"], resolve_s=0.05
    ) as front:
        verify = front.server.gateway.verify
        assert [replica.address for replica in verify] == [f"127.0.0.1:{port}"]
        known[:] = ["127.0.0.1", "127.0.0.2"]
        while len(verify) != 2:
            await verify.changed.wait(0.1)
        known[:] = ["127.0.0.1"]
        while len(verify) != 1:
            await verify.changed.wait(0.1)
        assert (await front.complete(max_tokens=2)).status_code == 200
    await replicas[0].stop()


@pytest.mark.parametrize(
    ("described", "sentence"),
    [
        ({"tokenizer_digest": "ab" * 32}, "its tokenizer is abababababab"),
        ({"protocol_revision": 99}, "protocol revision 99, ours is 1"),
    ],
)
async def test_a_replica_that_does_not_fit_is_refused_with_a_sentence(
    tmp_path: Path, described: dict[str, Any], sentence: str
) -> None:
    script = Script(SAY, describe=described)
    async with running_front(tmp_path, [script], wait=False) as front:
        while sentence not in (await front.client.get("/ready")).json()["detail"]:
            await front.server.gateway.verify.changed.wait(0.05)
        refused = await front.complete()
        assert refused.status_code == 503
        assert sentence in refused.json()["error"]["message"]
        script.describe = {}
        await front.until(True)


@pytest.mark.parametrize("other", [{"model_id": "else"}, {"precision": "q4_1"}])
async def test_a_replica_with_other_weights_is_refused(
    tmp_path: Path, other: dict[str, Any]
) -> None:
    scripts = [Script(SAY), Script(SAY, describe=other)]
    async with running_front(tmp_path, scripts) as front:
        states: dict[str, str] = {}
        while "refused" not in states.values():
            await front.server.gateway.verify.changed.wait(0.05)
            info = (await front.client.get("/server_info")).json()
            states = {one["address"]: one["state"] for one in info["verify"]}
        assert (await front.complete(max_tokens=2)).status_code == 200


async def test_what_is_no_verify_service_is_refused(tmp_path: Path) -> None:
    async with running_front(tmp_path, [Script(SAY)]) as front:
        other = f"127.0.0.1:{front.server.grpc_port}"
        async with running_front(tmp_path / "b", [], wait=False, verify=[other]) as lost:
            detail = ""
            while "no verify service" not in detail:
                await lost.server.gateway.verify.changed.wait(0.05)
                detail = (await lost.client.get("/ready")).json()["detail"]


async def test_the_first_request_after_a_restart_succeeds(tmp_path: Path) -> None:
    async with running_front(tmp_path, [Script(SAY)]) as front:
        for _ in range(3):
            port = front.verify.port
            await front.verify.stop()
            await front.until(False)
            await front.verify.start(port)
            await front.until(True)
            assert (await front.complete(max_tokens=2)).status_code == 200


async def test_plain_text_beyond_this_machine_must_be_asked_for(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="--insecure"):
        async with running_front(tmp_path, [], verify=["192.0.2.1:7001"]):
            pass


async def test_a_name_that_does_not_resolve_is_said_once_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    tried, reason = 0, "no such name"

    async def look_up(host: str, number: int, **_: Any) -> list[Any]:
        nonlocal tried
        tried += 1
        raise socket.gaierror(reason)

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", look_up)
    async with running_front(tmp_path, [], wait=False, verify=["dns:///verify:7001"]) as front:
        detail = ""
        while tried < 4:
            await front.server.gateway.verify.changed.wait(0.05)
            detail = (await front.client.get("/ready")).json()["detail"]
        reason = "no name server"
        while tried < 7:
            await front.server.gateway.verify.changed.wait(0.05)
    assert "dns:///verify:7001" in detail and "no such name" in detail
    said = [line for line in capfd.readouterr().out.splitlines() if "did not resolve" in line]
    assert ["no such name" in said[0], "no name server" in said[1], len(said)] == [True, True, 2]


async def test_a_name_that_cannot_be_one_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="expected host:port"):
        async with running_front(tmp_path, [], verify=[f"dns:///{'a' * 64}:7001"]):
            pass
