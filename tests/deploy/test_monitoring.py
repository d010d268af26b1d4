"""Prometheus and Grafana files against what running services expose, and against compose."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.exposition import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from graft.testing.cluster import running_cluster
from graft.testing.models import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
MONITORING = ROOT / "deploy" / "monitoring"
DASHBOARD = MONITORING / "grafana" / "dashboards" / "graft.json"
SOURCES = MONITORING / "grafana" / "provisioning" / "datasources" / "prometheus.yml"
SUFFIXES = {
    "counter": ["_total"],
    "histogram": ["_bucket", "_sum", "_count"],
    "gauge": [""],
}
# A metric with the labels that pick it, as expressions of the dashboard and the alerts write it.
SELECTED = re.compile(r'((?:graft|vllm)[\w:]*)\{job="(graft-\w+)"([^}]*)\}')
GROUPED = re.compile(r"by \(([^)]*)\)")


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def panels() -> list[dict[str, Any]]:
    return [
        panel for panel in json.loads(DASHBOARD.read_text())["panels"] if panel["type"] != "row"
    ]


def expressions() -> Iterator[str]:
    for panel in panels():
        yield from (target["expr"] for target in panel["targets"])
    for group in loaded(MONITORING / "alerts.yml")["groups"]:
        yield from (rule["expr"] for rule in group["rules"])


@pytest.fixture
async def exposed(tmp_path: Path) -> AsyncIterator[dict[str, dict[str, set[str]]]]:
    """By job, the names of its samples and the labels that they have had."""
    async with running_cluster(write_tiny_model(tmp_path / "tiny")) as cluster:
        while not cluster.gateway.gateway.attendants.connected:
            await cluster.gateway.gateway.drafts.changed.wait(0.05)
        await cluster.complete("a b a b a b", max_tokens=24, temperature=0, ignore_eos=True)
        yield {
            "graft-gateway": _names((await cluster.client.get("/metrics")).text),
            "graft-verify": _names(generate_latest(cluster.verifiers[0].metrics.registry).decode()),
            "graft-draft": _names(generate_latest(cluster.drafters[0].metrics.registry).decode()),
        }


def _names(text: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        labels = {label for sample in family.samples for label in sample.labels}
        for suffix in SUFFIXES[family.type]:
            found[family.name + suffix] = labels
    return found


async def test_every_name_is_one_that_its_service_exposes(
    exposed: dict[str, dict[str, set[str]]],
) -> None:
    num_seen = 0
    for expression in expressions():
        selected = SELECTED.findall(expression)
        assert selected, f"{expression} names no metric of a job"
        assert len(selected) == len(re.findall(r"\b(?:graft_|vllm:)\w+", expression)), expression
        for name, job, _ in selected:
            assert name in exposed[job], f"{job} has no {name}: {expression}"
        num_seen += len(selected)
    assert num_seen > 50


async def test_every_label_that_is_asked_for_exists(
    exposed: dict[str, dict[str, set[str]]],
) -> None:
    for expression in expressions():
        grouped = {
            word.strip() for words in GROUPED.findall(expression) for word in words.split(",")
        }
        for name, job, rest in SELECTED.findall(expression):
            labels = exposed[job][name]
            if not labels:  # nothing has been counted yet, so no label has been seen
                continue
            asked = grouped | set(re.findall(r"(\w+)=~?\"", rest))
            assert asked <= labels | {"le"}, f"{expression}: {asked - labels}"


def test_every_panel_has_a_place_of_its_own_and_a_known_source() -> None:
    (source,) = {panel["datasource"]["uid"] for panel in panels()}
    assert source in {one["uid"] for one in loaded(SOURCES)["datasources"]}
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        place = panel["gridPos"]
        cells = {
            (place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])
        }
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells


def test_jobs_scrape_the_ports_that_compose_gives_them() -> None:
    services = loaded(ROOT / "docker-compose.yml")["services"]
    for job in loaded(MONITORING / "prometheus.yml")["scrape_configs"]:
        (found,) = job["dns_sd_configs"]
        (name,) = found["names"]
        assert job["job_name"] == f"graft-{name}"
        if name == "gateway":
            assert any(port.endswith(f":{found['port']}") for port in services[name]["ports"])
        else:
            assert f"--metrics-port={found['port']}" in services[name]["command"]


def test_files_that_compose_mounts_are_there() -> None:
    services = loaded(ROOT / "docker-compose.yml")["services"]
    for name in ("prometheus", "grafana"):
        mounted = [volume.split(":")[0] for volume in services[name]["volumes"]]
        for path in (path for path in mounted if path.startswith("./")):
            assert (ROOT / path).exists(), path


def test_every_alert_says_what_is_wrong() -> None:
    for group in loaded(MONITORING / "alerts.yml")["groups"]:
        for rule in group["rules"]:
            assert rule["alert"].startswith("Graft")
            assert rule["labels"]["severity"] in ("page", "ticket")
            assert rule["annotations"]["summary"].endswith(".")


def test_the_sources_and_providers_are_of_the_form_grafana_reads() -> None:
    assert loaded(SOURCES)["apiVersion"] == 1
    provided = loaded(MONITORING / "grafana" / "provisioning" / "dashboards" / "graft.yml")
    services = loaded(ROOT / "docker-compose.yml")["services"]
    folder = provided["providers"][0]["options"]["path"]
    assert any(f":{folder}:" in volume for volume in services["grafana"]["volumes"])
