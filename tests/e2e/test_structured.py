"""Answers that are held to schemas, expressions and rules, through all services."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import grpc.aio
import jsonschema
import pytest
import pytest_asyncio
from openai import AsyncOpenAI, BadRequestError
from pydantic import BaseModel

from graft.common.channel import open_channel
from graft.testing.cluster import Cluster, running_cluster
from graft.testing.models import write_tiny_model
from graft.testing.schemas import schema
from graft.v1 import gateway_pb2, verify_pb2, verify_pb2_grpc
from graft.v1.gateway_pb2_grpc import GatewayServiceStub

pytestmark = pytest.mark.asyncio(loop_scope="module")

LONG = {"kv_tokens": 16384, "max_running": 8}
HOSTILE: dict[str, dict[str, Any]] = {
    "deep nesting": {"schema": json.loads('{"items":' * 400 + "{}" + "}" * 400)},
    "a great enum": {"schema": {"enum": [f"value number {i}" for i in range(4000)] * 2}},
    "a megabyte": {"schema": {"enum": ["x" * 1000] * 1000}},
    "many properties": {
        "schema": {"type": "object", "properties": {f"a{i}": {} for i in range(3000)}}
    },
    "an expression of many parts": {"regex": "[^a]" * 5000},
    "an expression that counts": {"regex": ".{0,1000}x.{0,1000}y.{0,1000}"},
    "rules without an end": {"ebnf": "root ::= root"},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", context=1024)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(model: Path) -> AsyncIterator[Cluster]:
    async with running_cluster(model, verify=LONG, gateway={"model": str(model)}) as running:
        await running.verifiers[0].warm()
        yield running


def of_schema(wanted: Any) -> dict[str, Any]:
    return {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "answer", "schema": wanted, "strict": True},
        }
    }


async def answer(cluster: Cluster, speculation: str, seed: int, **fields: Any) -> dict[str, Any]:
    body = await cluster.chat(
        '{"name": "x", "id": 1, "tags": [null, true]}',
        seed=seed,
        max_tokens=600,
        speculation=speculation,
        **fields,
    )
    choice = body["choices"][0]
    return {
        "text": choice["message"]["content"],
        "end": choice["finish_reason"],
        "accepted": body["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"],
    }


async def check_schemas(cluster: Cluster, numbers: range) -> None:
    accepted = ended = 0
    for number in numbers:
        wanted = schema(number)
        plain = await answer(cluster, "off", number, **of_schema(wanted))
        drafted = await answer(cluster, "ngram", number, **of_schema(wanted))
        assert plain["text"] == drafted["text"], number
        assert plain["end"] == drafted["end"]
        accepted += drafted["accepted"]
        if plain["end"] == "stop":
            ended += 1
            jsonschema.Draft202012Validator(wanted).validate(json.loads(plain["text"]))
    assert ended >= 0.97 * len(numbers)
    assert accepted > 0


async def test_some_schemas_are_kept_with_and_without_speculation(cluster: Cluster) -> None:
    await check_schemas(cluster, range(10))


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_two_hundred_schemas_are_kept_with_and_without_speculation(cluster: Cluster) -> None:
    await check_schemas(cluster, range(200))


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    good: bool


class Family(BaseModel):
    pets: tuple[Pet, Pet]
    size: Literal[1, 2]


async def test_the_openai_client_parses_models(cluster: Cluster) -> None:
    client = AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0)
    parsed = await client.chat.completions.parse(
        model=cluster.model,
        messages=[{"role": "user", "content": "Who lives here?"}],
        response_format=Family,
        seed=5,
    )
    family = parsed.choices[0].message.parsed
    assert isinstance(family, Family)
    with pytest.raises(BadRequestError) as refused:
        await client.chat.completions.create(
            model=cluster.model,
            messages=[{"role": "user", "content": "?"}],
            response_format=of_schema({"not": {}})["response_format"],
        )
    assert refused.value.param == "response_format"
    assert "'not'" in refused.value.message
    await client.close()


async def test_expressions_and_rules_are_kept_on_both_routes(cluster: Cluster) -> None:
    chat = await cluster.chat("When?", regex=r"[0-9]{4}-[0-9]{2}", seed=1, max_tokens=50)
    assert re.fullmatch(r"\d{4}-\d{2}", chat["choices"][0]["message"]["content"])
    assert chat["choices"][0]["finish_reason"] == "stop"
    done = await cluster.complete("Well: ", ebnf='root ::= "yes" | "no"', n=3, max_tokens=50)
    assert {choice["text"] for choice in done["choices"]} <= {"yes", "no"}
    anything = {"response_format": {"type": "json_object"}}
    free = await cluster.chat("An object?", seed=3, max_tokens=30, **anything)
    assert free["choices"][0]["message"]["content"].startswith("{")


async def test_a_stop_string_ends_an_answer_inside_its_grammar(cluster: Cluster) -> None:
    body = await cluster.chat("?", regex="[ab]{30}x", stop=["x"], seed=2, max_tokens=60)
    assert re.fullmatch("[ab]{30}", body["choices"][0]["message"]["content"])
    assert body["choices"][0]["finish_reason"] == "stop"


async def test_grammars_over_grpc(cluster: Cluster) -> None:
    async with open_channel(f"127.0.0.1:{cluster.gateway.grpc_port}") as channel:
        stub = GatewayServiceStub(channel)
        request = gateway_pb2.ChatRequest(
            messages=[gateway_pb2.ChatMessage(role="user", content="?")],
            options=gateway_pb2.GenerationOptions(
                max_tokens=60, seed=1, json_schema='{"enum": ["über", 3]}'
            ),
        )
        written = await stub.Chat(request, timeout=60)
        assert json.loads(written.answer.choices[0].text) in ("über", 3)


async def test_the_server_says_what_it_offers(cluster: Cluster) -> None:
    kinds = ["json_object", "json_schema", "regex", "ebnf"]
    assert (await cluster.client.get("/v1/models")).json()["data"][0]["structured_output"] == kinds
    assert (await cluster.client.get("/server_info")).json()["structured_output"] == kinds


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"regex": "a", "ebnf": 'root ::= "a"'}, "ebnf"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"regex": "(a"}, "regex"),
        ({"ebnf": "r ::= 1"}, "ebnf"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        (of_schema([1]), "response_format.json_schema.schema"),
        (of_schema({"$ref": "#/$defs/none"}), "response_format"),
        ({"regex": "\ud83d"}, "regex"),
    ],
)
async def test_what_cannot_be_kept_is_refused_by_name(
    cluster: Cluster, fields: dict[str, Any], param: str
) -> None:
    body = {"model": cluster.model, "messages": [{"role": "user", "content": "?"}], **fields}
    response = await cluster.client.post(
        "/v1/chat/completions",
        content=json.dumps(body),
        headers={"content-type": "application/json"},
    )
    assert response.status_code == 400, response.text
    assert str(response.json()["error"]["param"]).startswith(param)


async def test_a_hostile_grammar_costs_its_own_request_alone(cluster: Cluster) -> None:
    alone = await cluster.complete("Go on: ", seed=1, max_tokens=900, ignore_eos=True)
    company = asyncio.create_task(
        cluster.complete("Go on: ", seed=1, max_tokens=900, ignore_eos=True)
    )
    taken, refused = [], 0
    for name, fields in HOSTILE.items():
        wanted = of_schema(fields["schema"]) if "schema" in fields else fields
        body = {"model": cluster.model, "prompt": "?", "max_tokens": 5, **wanted}
        started = time.monotonic()
        response = await cluster.client.post("/v1/completions", json=body)
        taken.append(time.monotonic() - started)
        refused += response.status_code in (400, 413)
        assert response.status_code in (200, 400, 413), (name, response.text[:200])
    # Two seconds of a child's own time, and three times that where the machine is shared.
    assert max(taken) < 10
    assert refused >= 5
    assert (await company)["choices"][0]["text"] == alone["choices"][0]["text"]
    assert (await cluster.chat("?", regex="ok", max_tokens=5))["choices"][0]["message"]


async def test_a_lost_replica_changes_no_structured_text(model: Path) -> None:
    wanted = {"type": "string", "pattern": "^[a-z]{120}$"}
    async with running_cluster(model, num_verify=2, num_draft=0, verify=LONG) as cluster:
        await asyncio.gather(*(one.warm() for one in cluster.verifiers))
        whole = await answer(cluster, "off", 1, **of_schema(wanted))
        told = asyncio.Event()
        asking = asyncio.create_task(streamed(cluster, told, 1, of_schema(wanted)))
        await told.wait()
        busy = max(cluster.verifiers, key=lambda one: one.engine.scheduler.num_sessions)  # type: ignore[union-attr]
        await busy.stop(0)
        assert await asking == whole["text"]


async def streamed(cluster: Cluster, told: asyncio.Event, seed: int, fields: Any) -> str:
    """The text of a streamed answer; `told` is set after its first pieces."""
    body = {
        "model": cluster.model,
        "messages": [{"role": "user", "content": '{"name": "x", "id": 1, "tags": [null, true]}'}],
        **{"seed": seed, "max_tokens": 600, "stream": True, "speculation": "off"},
        **fields,
    }
    text, pieces = "", 0
    async with cluster.client.stream("POST", "/v1/chat/completions", json=body) as response:
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            text += event["choices"][0]["delta"].get("content") or ""
            pieces += 1
            if pieces == 8:
                told.set()
    return text


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_killed_replica_changes_no_structured_text(model: Path, tmp_path: Path) -> None:
    wanted = {"type": "string", "pattern": "^[a-z]{400}$"}
    processes, ports = [], []
    for number in range(2):
        port = _free_port()
        command = [sys.executable, "-m", "graft.cli.main", "verify", "--model", str(model)]
        words = [*command, "--port", str(port), "--threads", "1", "--kv-tokens", "16384"]
        with (tmp_path / f"verify-{number}.log").open("wb") as log:
            processes.append(await asyncio.create_subprocess_exec(*words, stdout=log, stderr=log))
        ports.append(f"127.0.0.1:{port}")
    try:
        await asyncio.gather(*map(_serving, ports))
        flags = {"verify": ports, "replay_timeout_s": 120}
        async with running_cluster(model, num_verify=0, num_draft=0, gateway=flags) as cluster:
            await _until_two_serve(cluster)
            whole = await answer(cluster, "off", 2, **of_schema(wanted))
            told = asyncio.Event()
            asking = asyncio.create_task(streamed(cluster, told, 2, of_schema(wanted)))
            await told.wait()
            info = (await cluster.client.get("/server_info")).json()
            busy = max(range(2), key=lambda place: info["verify"][place]["sessions"])
            os.kill(processes[ports.index(info["verify"][busy]["address"])].pid, signal.SIGKILL)
            assert await asking == whole["text"]
            metrics = (await cluster.client.get("/metrics")).text
            assert re.search(r"^graft_verify_replays_total 1", metrics, re.M)
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def _until_two_serve(cluster: Cluster) -> None:
    async with asyncio.timeout(300):
        while True:
            info = (await cluster.client.get("/server_info")).json()
            if [one["state"] for one in info["verify"]].count("up") == 2:
                return
            await asyncio.sleep(0.2)


async def _serving(address: str) -> None:
    """Returns once a replica has loaded its model."""
    request = verify_pb2.VerifyServiceDescribeRequest()
    async with asyncio.timeout(300), open_channel(address) as channel:
        stub = verify_pb2_grpc.VerifyServiceStub(channel)
        while True:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await stub.Describe(request, timeout=10)
                return
            await asyncio.sleep(0.2)


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
