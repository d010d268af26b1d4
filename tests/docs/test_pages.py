"""The pages that are made of the code say all there is, and the site builds without a warning."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from graft.common.errors import TABLE, reason_name
from graft.testing.cluster import running_cluster
from graft.testing.models import write_tiny_model
from graft.v1.error_reason_pb2 import ErrorReason

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def pages() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", ROOT / "docs" / "generate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_reason_of_an_error_has_its_advice(pages: ModuleType) -> None:
    reasons = set(ErrorReason.values()) - {ErrorReason.ERROR_REASON_UNSPECIFIED}
    assert reasons == set(TABLE)
    assert set(pages.ADVICE) == {reason_name(reason) for reason in reasons}
    text = pages.errors_page()
    for reason, row in TABLE.items():
        assert f"## {reason_name(reason)}\n\nHTTP {row.http} · gRPC {row.code.name}" in text


def test_every_setting_has_its_flag_and_words(pages: ModuleType) -> None:
    text = pages.flags_page()
    for line in ("| `--otlp-endpoint` | `GRAFT_VERIFY_OTLP_ENDPOINT` |", "## graft up"):
        assert line in text
    rows = [line for line in text.splitlines() if line.startswith("| `--")]
    assert len(rows) > 80
    assert all(line.rstrip(" |").rsplit("|", 1)[-1].strip() for line in rows), "a flag has no words"


def test_every_message_and_field_of_the_protos_is_there(pages: ModuleType) -> None:
    text = pages.grpc_page()
    for path in (ROOT / "protos" / "graft" / "v1").glob("*.proto"):
        source = path.read_text()
        for name in re.findall(r"^(?:message|enum|service) (\w+)", source, re.MULTILINE):
            assert f"### {name}\n" in text, name
        for name in re.findall(r"^ +[\w.<>, ]+ (\w+) = \d+;", source, re.MULTILINE):
            assert f"| `{name}` |" in text, name


def test_every_route_of_rest_is_there(pages: ModuleType) -> None:
    text = pages.rest_page()
    for route in ("POST /v1/chat/completions", "POST /v1/completions", "GET /metrics"):
        assert f"| `{route}` |" in text
    assert "## ChatRequest" in text and "| `speculation` |" in text


async def test_every_metric_of_running_services_is_there(pages: ModuleType, tmp_path: Path) -> None:
    told = set(re.findall(r"^\| `([\w:]+)` \|", pages.metrics_page(), re.MULTILINE))
    async with running_cluster(write_tiny_model(tmp_path / "tiny")) as cluster:
        texts = [
            (await cluster.client.get("/metrics")).text,
            generate_latest(cluster.verifiers[0].metrics.registry).decode(),
            generate_latest(cluster.drafters[0].metrics.registry).decode(),
        ]
    for text in texts:
        for family in text_string_to_metric_families(text):
            if family.name.endswith("_created"):  # when counting began; the client adds it
                continue
            name = f"{family.name}_total" if family.type == "counter" else family.name
            assert name in told, name


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr, done.stderr
    assert (tmp_path / "reference" / "grpc.html").is_file()


def test_pictures_say_in_words_what_they_show() -> None:
    for path in (ROOT / "docs").glob("*.svg"):
        text = path.read_text()
        assert "<title" in text and "<desc" in text and "prefers-color-scheme: dark" in text, path
