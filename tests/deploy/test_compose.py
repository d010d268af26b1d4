"""The compose file against the Compose schema, and what the schema cannot say."""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
WATCHERS = {"prometheus", "grafana", "jaeger"}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    return content


@pytest.fixture(scope="module")
def own(compose: dict[str, Any]) -> dict[str, Any]:
    """The services that run graft."""
    services = compose["services"].items()
    return {name: service for name, service in services if name not in WATCHERS}


def test_it_follows_the_compose_schema(compose: dict[str, Any]) -> None:
    schemas = importlib.resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    schema = json.loads((schemas / "compose-spec.json").read_text())
    jsonschema.validate(compose, schema)


def test_the_schema_refuses_a_misspelt_key(compose: dict[str, Any]) -> None:
    schemas = importlib.resources.files("check_jsonschema") / "builtin_schemas" / "vendor"
    schema = json.loads((schemas / "compose-spec.json").read_text())
    broken = {**compose, "services": {"gateway": {"image": "x", "helthcheck": {}}}}
    with pytest.raises(jsonschema.ValidationError, match="helthcheck"):
        jsonschema.validate(broken, schema)


def test_each_profile_is_complete(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for profile in ("cpu", "gpu"):
        names = {name for name, service in services.items() if profile in service["profiles"]}
        kinds = {name.removesuffix("-gpu") for name in names}
        assert kinds == {"gateway", "verify", "draft"}
        for name in names:
            assert set(services[name].get("depends_on", {})) <= names


def test_every_service_has_a_health_check_and_comes_back(own: dict[str, Any]) -> None:
    for name, service in own.items():
        assert service["healthcheck"]["test"][:3] == ["CMD", "graft", "health"], name
        assert service["restart"] == "unless-stopped", name


def test_the_gateway_waits_for_healthy_neighbours(compose: dict[str, Any]) -> None:
    for name in ("gateway", "gateway-gpu"):
        conditions = compose["services"][name]["depends_on"].values()
        assert [entry["condition"] for entry in conditions] == ["service_healthy"] * 2


def test_names_in_addresses_are_services_or_aliases(compose: dict[str, Any]) -> None:
    services = compose["services"]
    for name in ("gateway", "gateway-gpu"):
        words = [word for word in services[name]["command"] if "dns:///" in word]
        assert len(words) == 2
        for word in words:
            host, port = word.split("dns:///")[1].split(":")
            waited = services[name]["depends_on"]
            known = set(waited) | {
                alias
                for other in waited
                for alias in services[other]
                .get("networks", {})
                .get("default", {})
                .get("aliases", [])
            }
            assert host in known
            assert any(f":{port}" in services[other]["healthcheck"]["test"][3] for other in waited)


def test_only_what_people_look_at_publishes_ports_and_only_on_loopback(
    compose: dict[str, Any],
) -> None:
    for name, service in compose["services"].items():
        if name.startswith("gateway") or name in WATCHERS:
            assert all(port.startswith("${GRAFT_BIND:-127.0.0.1}:") for port in service["ports"])
        else:
            assert "ports" not in service, name


def test_plain_text_inside_the_network_is_said_aloud(own: dict[str, Any]) -> None:
    for name, service in own.items():
        assert "--insecure" in service["command"], name
        assert "--host=0.0.0.0" in service["command"], name


def test_commands_are_flags_that_the_services_have(own: dict[str, Any]) -> None:
    from graft.cli.service import settings_of

    for service in own.values():
        kind, *words = service["command"]
        fields = settings_of(kind).model_fields
        for word in words:
            field = word.removeprefix("--").split("=")[0].replace("-", "_")
            assert field in fields, f"graft {kind} has no {word}"
        prefix = f"GRAFT_{kind.upper()}_"
        for variable in service.get("environment", {}):
            if variable.startswith("GRAFT_"):
                assert variable.removeprefix(prefix).lower() in fields, variable


def test_builds_name_stages_of_the_dockerfile(own: dict[str, Any]) -> None:
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    stages = {line.split(" AS ")[1] for line in lines if line.startswith("FROM ")}
    for name, service in own.items():
        assert service["build"]["target"] in stages, name
