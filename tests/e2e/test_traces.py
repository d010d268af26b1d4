"""Traces across the three services, as a real collector gets them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from graft.common.channel import open_channel
from graft.testing.cluster import Cluster, running_cluster
from graft.testing.collector import Collector, SeenSpan, running_collector
from graft.testing.models import write_tiny_model
from graft.v1 import gateway_pb2, gateway_pb2_grpc

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLER = "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{CALLER}-01"
PROMPT = "a b a b a b a b a b"


@pytest.fixture(autouse=True)
def spans_are_sent_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The SDK's own variable: milliseconds that spans are gathered before they are sent."""
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")


@asynccontextmanager
async def traced_cluster(
    folder: Path, collector: Collector, rounds: float = 1.0
) -> AsyncIterator[Cluster]:
    told = {"otlp_endpoint": collector.endpoint}
    async with running_cluster(
        write_tiny_model(folder / "tiny"),
        verify={**told, "trace_rounds": rounds},
        draft={**told, "trace_rounds": rounds},
        gateway=told,
    ) as cluster:
        while not cluster.gateway.gateway.attendants.connected:
            await cluster.gateway.gateway.drafts.changed.wait(0.05)
        yield cluster


def named(spans: list[SeenSpan], service: str, name: str) -> list[SeenSpan]:
    return [span for span in spans if (span.service, span.name) == (f"graft-{service}", name)]


def whole(spans: list[SeenSpan]) -> bool:
    """Whether the spans that end last have come, of all three services."""
    return bool(
        named(spans, "draft", "attend")
        and named(spans, "verify", "graft.v1.VerifyService/Generate")
        and any(span.service == "graft-gateway" for span in spans)
    )


async def test_a_request_over_rest_is_one_trace_through_all_three_services(tmp_path: Path) -> None:
    async with running_collector() as collector, traced_cluster(tmp_path, collector) as cluster:
        body = await cluster.client.post(
            "/v1/completions",
            json={"prompt": PROMPT, "max_tokens": 12, "temperature": 0},
            headers={"traceparent": TRACEPARENT, "x-request-id": "seen-1"},
        )
        usage = body.json()["usage"]
        spans = await collector.until(whole)
        (request,) = named(spans, "gateway", "POST /v1/completions")
        (generate,) = named(spans, "verify", "graft.v1.VerifyService/Generate")
        (attend,) = named(spans, "draft", "attend")
        rounds = named(spans, "verify", "round")

        assert {span.trace for span in spans} == {TRACE}
        assert request.parent == CALLER
        assert generate.parent == request.span
        assert attend.parent == request.span
        assert {span.parent for span in rounds} == {generate.span}
        assert {span.parent for span in named(spans, "draft", "propose")} == {attend.span}
        assert request.attributes["http.response.status_code"] == 200
        assert request.attributes["graft.request"] == "seen-1"
        assert request.attributes["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
        assert generate.attributes["graft.session"] == attend.attributes["graft.session"]
        assert generate.attributes["graft.tokens"] == 12
        assert sum(span.attributes["graft.tokens"] for span in rounds) == 12
        assert not any(span.failed for span in spans)


async def test_a_request_over_grpc_is_traced_alike(tmp_path: Path) -> None:
    async with running_collector() as collector, traced_cluster(tmp_path, collector) as cluster:
        channel = open_channel(f"127.0.0.1:{cluster.gateway.grpc_port}")
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        request = gateway_pb2.CompleteStreamRequest(
            prompts=[gateway_pb2.Prompt(text=PROMPT)],
            options=gateway_pb2.GenerationOptions(max_tokens=8, seed=1, ignore_eos=True),
        )
        async for _ in stub.CompleteStream(request, metadata=(("traceparent", TRACEPARENT),)):
            pass
        await channel.close(None)
        spans = await collector.until(whole)
        (call,) = named(spans, "gateway", "graft.v1.GatewayService/CompleteStream")
        (generate,) = named(spans, "verify", "graft.v1.VerifyService/Generate")
        assert (call.trace, call.parent) == (TRACE, CALLER)
        assert generate.parent == call.span
        assert call.attributes["gen_ai.usage.output_tokens"] == 8


async def test_only_some_rounds_have_a_span(tmp_path: Path) -> None:
    async with (
        running_collector() as collector,
        traced_cluster(tmp_path, collector, 0.25) as cluster,
    ):
        await cluster.complete(PROMPT, max_tokens=9, speculation="off", ignore_eos=True)
        spans = await collector.until(
            lambda seen: bool(named(seen, "verify", "graft.v1.VerifyService/Generate"))
        )
        numbers = [span.attributes["graft.round"] for span in named(spans, "verify", "round")]
        assert numbers == [0, 4, 8]


async def test_a_request_that_fails_has_a_span_that_says_why(tmp_path: Path) -> None:
    async with running_collector() as collector, traced_cluster(tmp_path, collector) as cluster:
        answer = await cluster.client.post("/v1/completions", json={"prompt": "x" * 4000})
        assert answer.status_code == 400
        channel = open_channel(f"127.0.0.1:{cluster.gateway.grpc_port}")
        stub = gateway_pb2_grpc.GatewayServiceStub(channel)
        with pytest.raises(Exception, match="model"):
            await stub.Complete(
                gateway_pb2.CompleteRequest(model="no such", prompts=[gateway_pb2.Prompt(text="x")])
            )
        await channel.close(None)
        name = "graft.v1.GatewayService/Complete"
        spans = await collector.until(
            lambda seen: (
                bool(named(seen, "gateway", name))
                and bool(named(seen, "gateway", "POST /v1/completions"))
            )
        )
        (call,) = named(spans, "gateway", name)
        (request,) = named(spans, "gateway", "POST /v1/completions")
        assert (call.failed, call.attributes["error.type"]) == (True, "model_not_found")
        assert request.attributes["http.response.status_code"] == 400
        assert not call.parent


async def test_a_caller_that_does_not_sample_makes_no_spans(tmp_path: Path) -> None:
    async with running_collector() as collector, traced_cluster(tmp_path, collector) as cluster:
        unsampled = TRACEPARENT.removesuffix("01") + "00"
        fields = {"prompt": PROMPT, "max_tokens": 4}
        for header in (unsampled, "nonsense"):
            await cluster.client.post(
                "/v1/completions", json=fields, headers={"traceparent": header}
            )
        spans = await collector.until(whole)
        assert TRACE not in {span.trace for span in spans}
        assert len({span.trace for span in spans}) == 1


async def test_probes_and_scrapes_are_not_traced(tmp_path: Path) -> None:
    async with running_collector() as collector, traced_cluster(tmp_path, collector) as cluster:
        for path in ("/health", "/ready", "/metrics", "/v1/models"):
            await cluster.client.get(path)
        await cluster.client.post("/v1/tokenize", json={"prompt": PROMPT})
        spans = await collector.until(lambda seen: bool(seen))
        assert [span.name for span in spans] == ["POST /v1/tokenize"]


async def test_an_endpoint_that_nobody_listens_on_costs_no_request(tmp_path: Path) -> None:
    model = write_tiny_model(tmp_path / "tiny")
    gateway: dict[str, Any] = {"otlp_endpoint": "http://127.0.0.1:1"}
    async with running_cluster(model, gateway=gateway) as cluster:
        body = await cluster.complete(PROMPT, max_tokens=4)
        assert body["usage"]["completion_tokens"] == 4
        assert isinstance(cluster.client, httpx.AsyncClient)
