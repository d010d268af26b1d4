"""The Dockerfile and the example settings: what can be checked without an engine."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from graft.cli.plan import UpSettings
from graft.cli.service import settings_of
from graft.common.config import Settings

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def stages() -> dict[str, str]:
    """Stage name -> its text, with continued lines joined."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    parts = re.split(r"^FROM (\S+) AS (\S+)$", text, flags=re.MULTILINE)
    return {
        name: f"FROM {source}{body}"
        for source, name, body in zip(parts[1::3], parts[2::3], parts[3::3], strict=True)
    }


def lineage(stages: dict[str, str], name: str) -> str:
    """The text of a stage and of all stages it is built on or copies from."""
    text = stages[name]
    for other in re.findall(r"(?:FROM |--from=)([\w-]+)", text):
        if other in stages:
            text += lineage(stages, other)
    return text


def test_the_base_image_is_an_argument(stages: dict[str, str]) -> None:
    text = (ROOT / "Dockerfile").read_text()
    assert "ARG BASE_IMAGE=" in text
    assert stages["base"].startswith("FROM ${BASE_IMAGE}")
    assert all("FROM base" in body for name, body in stages.items() if name != "base")


@pytest.mark.parametrize("name", ["gateway", "worker-cpu", "worker-cuda"])
def test_services_run_without_root(stages: dict[str, str], name: str) -> None:
    lines = [line for line in stages[name].splitlines() if line]
    users = [number for number, line in enumerate(lines) if line == "USER graft"]
    assert users, "no USER line"
    assert not any(line.startswith("RUN ") for line in lines[users[0] :])
    assert 'ENTRYPOINT ["graft"]' in lines


def test_the_gateway_image_has_no_torch(stages: dict[str, str]) -> None:
    text = lineage(stages, "gateway")
    assert "[gateway,otel]" in text
    assert "worker" not in text
    assert not re.search(r"pip install[^\n]*torch", text)


def test_versions_are_pinned_by_the_constraints(stages: dict[str, str]) -> None:
    for name, body in stages.items():
        for command in re.findall(r"pip install[^&\n]*", body):
            assert "constraints.txt" in command or "--no-deps" in command, f"{name}: {command}"


def test_the_build_sees_every_portion_and_nothing_else() -> None:
    lines = (ROOT / ".dockerignore").read_text().split()
    allowed = {line.removeprefix("!") for line in lines if line.startswith("!")}
    text = (ROOT / "pyproject.toml").read_text()
    found = re.search(r"^packages = \[(.*)\]$", text, flags=re.MULTILINE)
    assert found is not None
    portions = {part.split("/")[0] for part in re.findall(r'"([^"]+)"', found[1])}
    assert portions <= allowed
    assert lines[0] == "*"
    assert ".git" not in allowed


@pytest.mark.parametrize("section", ["up", "gateway", "verify", "draft"])
def test_the_example_settings_are_read(section: str) -> None:
    file = ROOT / "deploy" / "graft.example.yaml"
    kind: type[Settings] = UpSettings if section == "up" else settings_of(section)
    given = yaml.safe_load(file.read_text())[section]
    settings = kind.load(file)
    assert {name: getattr(settings, name) for name in given} == given


def test_ci_runs_what_the_readme_says() -> None:
    script = (ROOT / ".ci" / "run").read_text()
    assert "step check" in script and "step test" in script
    assert "make test" in (ROOT / "README.md").read_text()
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111
