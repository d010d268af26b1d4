"""How traces are switched on, and which rounds have a span."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from graft.common.errors import InvalidArgument
from graft.common.tracing import OFF, open_tracing, outgoing_metadata, parent_of, traceparent
from graft.gateway.settings import GatewaySettings


def test_without_an_endpoint_there_are_no_spans() -> None:
    assert open_tracing("gateway", "") is OFF
    with OFF.serving("x", None, {}):
        assert outgoing_metadata() == ()
        assert traceparent() == ""


@pytest.mark.parametrize("endpoint", ["collector:4317", "ftp://127.0.0.1:4317", "http://"])
def test_an_endpoint_that_is_no_address_is_refused(endpoint: str) -> None:
    with pytest.raises(InvalidArgument, match="expected http://HOST:PORT") as raised:
        open_tracing("gateway", endpoint)
    assert raised.value.field == "otlp_endpoint"


def test_a_missing_exporter_is_one_clear_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc.trace_exporter", None)
    with pytest.raises(InvalidArgument, match=r"pip install 'graft-serve\[otel\]'"):
        open_tracing("gateway", "http://127.0.0.1:4317")


def test_a_traceparent_that_cannot_be_read_is_no_parent() -> None:
    assert parent_of({}) is None
    assert parent_of({"traceparent": "nonsense"}) is None
    assert parent_of({"traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01"}) is not None


@pytest.mark.parametrize(("rounds", "numbers"), [(0.0, []), (0.3, [0, 3, 6]), (1.0, [*range(10)])])
def test_sampled_rounds_are_evenly_spaced_from_the_first_on(
    rounds: float, numbers: list[int]
) -> None:
    tracing = open_tracing("verify", "http://127.0.0.1:1", rounds=rounds)
    assert [number for number in range(10) if tracing.sampled(number)] == numbers
    tracing.close()


def test_the_variable_of_opentelemetry_is_read_after_everything_of_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://general:4317")
    assert GatewaySettings.load().otlp_endpoint == "http://general:4317"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://traces:4317")
    assert GatewaySettings.load().otlp_endpoint == "http://traces:4317"
    file = tmp_path / "graft.yaml"
    file.write_text("gateway: {otlp_endpoint: 'http://file:4317'}")
    assert GatewaySettings.load(file).otlp_endpoint == "http://file:4317"
    monkeypatch.setenv("GRAFT_GATEWAY_OTLP_ENDPOINT", "http://ours:4317")
    assert GatewaySettings.load(file).otlp_endpoint == "http://ours:4317"
