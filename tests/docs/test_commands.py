"""Every command of the README and the quickstart is run here, or by the test that is named."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from graft.cli.flags import arguments_of
from graft.cli.plan import UpSettings
from graft.testing.elsewhere import Elsewhere, gateway_elsewhere

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
PAGES = ("README.md", "docs/quickstart.md")
TIMEOUT_S = 100

# Commands that serve, install, or need a model of the hub or a Docker engine: what is checked of
# them here is that make, graft or compose would take them; the tests named run them.
STARTS = {
    "make up": "tests/cli/test_up.py",
    "make test": "this run",
    "make demo-checkpoints": "the fixture below",
    "docker compose --profile cpu up --build": "deploy/compose_test.py",
    "docker compose --profile cpu up --scale draft=2 --no-recreate": "deploy/compose_test.py",
}


def blocks(page: str, language: str) -> list[str]:
    text = (ROOT / page).read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands(page: str) -> Iterator[str]:
    """The commands of a page's shell blocks; a quoted argument may go over lines."""
    for block in blocks(page, "sh"):
        lines = iter(block.splitlines())
        for line in lines:
            command = re.sub(r"\s+#.*$", "", line)
            while command.endswith("\\") or command.count("'") % 2:
                command += "\n" + next(lines)
            if command.strip():
                yield command


ALL = [(page, command) for page in PAGES for command in commands(page)]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Elsewhere]:
    with gateway_elsewhere(tmp_path_factory.mktemp("served")) as running:
        yield running


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make demo-checkpoints` writes, by the command that it runs."""
    folder = tmp_path_factory.mktemp("demo")
    subprocess.run(
        [sys.executable, "-m", "graft.testing.demo", str(folder)],
        env={**os.environ, "PYTHONPATH": str(ROOT / "tests")},
        check=True,
        capture_output=True,
        timeout=TIMEOUT_S,
    )
    return folder


def there(text: str, served: Elsewhere) -> str:
    """The text with the addresses and the model of the gateway that runs here."""
    text = text.replace("http://127.0.0.1:8000", served.url)
    return text.replace("127.0.0.1:8001", served.grpc).replace("smollm2-135m-instruct", "tiny")


@pytest.mark.parametrize(("page", "command"), ALL, ids=[one[:60] for _, one in ALL])
def test_a_command_runs(page: str, command: str, served: Elsewhere, demo: Path) -> None:
    words = shlex.split(command)
    if command in STARTS or words[:2] in (["graft", "up"], ["make", "up"]):
        would_start(words)
        return
    if words[0] == "." and not (ROOT / words[1]).exists():
        pytest.skip("the environment was not made by make setup")
    if "demo/" in command:
        command = command.replace("demo/", f"{demo}/")
    if words[0] == "graft" and words[1] == "chat" and "|" not in command:
        command = f"echo hello | {command}"
    if words[0] == "curl" and not shutil.which("curl"):
        pytest.skip("curl is not here")
    done = subprocess.run(
        ["sh", "-c", there(command, served)],
        cwd=ROOT,
        env={**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "GRAFT_URL": served.url},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"


def would_start(words: list[str]) -> None:
    """Checks a command that serves without letting it serve."""
    if words[0] == "make":
        made = ["make", "-n", *words[1:]]
        subprocess.run(made, cwd=ROOT, check=True, capture_output=True, timeout=TIMEOUT_S)
        given = [word.removeprefix("ARGS=") for word in words if word.startswith("ARGS=")]
        words = ["graft", "up", *shlex.split(" ".join(given))]
    if words[0] == "docker":
        services = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]
        profile = words[words.index("--profile") + 1]
        assert any(profile in service["profiles"] for service in services.values())
        return
    known = {arguments_of({key: "x"})[0].split("=")[0] for key in UpSettings.model_fields}
    for word in words[2:]:
        if word.startswith("--"):
            assert word.split("=")[0] in known, word


@pytest.mark.parametrize("page", PAGES)
def test_python_of_a_page_runs(page: str, served: Elsewhere) -> None:
    snippets = blocks(page, "python")
    assert snippets
    for snippet in snippets:
        done = subprocess.run(
            [sys.executable, "-c", there(snippet, served)],
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip()


def test_commands_that_are_told_apart_are_on_a_page() -> None:
    told = {command for _, command in ALL}
    assert set(STARTS) <= told
