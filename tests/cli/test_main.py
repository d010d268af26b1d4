"""The command line as a whole, in processes of its own: exit codes and single-line errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def graft(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs `graft WORDS` and returns what it printed."""
    import os

    return subprocess.run(
        [sys.executable, "-m", "graft.cli.main", *words],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, **environment},
    )


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The one line of a refused command; fails when there is more than that, or less."""
    assert done.returncode == 2, done
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("error: ")
    return lines[0].removeprefix("error: ")


def test_help_names_every_command_without_loading_a_service() -> None:
    script = (
        "import sys; from graft.cli.main import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'grpc', 'torch', 'numpy', 'fastapi', 'pydantic'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    for name in ("up", "gateway", "verify", "draft", "chat", "complete", "models", "doctor"):
        assert f"\n  {name} " in done.stdout


def test_version() -> None:
    assert graft("--version").stdout.startswith("graft ")


def test_an_unknown_flag_is_told_with_the_ones_that_are_near() -> None:
    done = graft("gateway", "--prt", "1")
    assert done.returncode == 2
    assert "No such option: --prt" in done.stderr and "--port" in done.stderr


def test_a_wrong_value_is_one_line() -> None:
    assert "gateway.port" in refused(graft("gateway", "--port", "seventy"))


def test_an_unknown_variable_is_one_line_with_a_suggestion() -> None:
    sentence = refused(graft("verify", GRAFT_VERIFY_THREDS="2"))
    assert "GRAFT_VERIFY_THREDS" in sentence and "threads" in sentence


def test_an_unknown_key_of_the_file_is_one_line_with_a_suggestion(tmp_path: Path) -> None:
    file = tmp_path / "graft.yaml"
    file.write_text("draft: {prot: 1}\n")
    sentence = refused(graft("draft", "--config", str(file)))
    assert "unknown setting prot of draft; did you mean port?" in sentence


def test_a_missing_file_is_one_line(tmp_path: Path) -> None:
    assert "cannot read" in refused(graft("draft", "--config", str(tmp_path / "no.yaml")))


def test_an_unknown_model_is_one_line(tmp_path: Path) -> None:
    sentence = refused(graft("models", "check", "nosuchmodel", GRAFT_CACHE=str(tmp_path)))
    assert "there is no model nosuchmodel" in sentence


def test_a_chat_without_a_gateway_is_one_line() -> None:
    sentence = refused(graft("chat", "hello", "--url", "http://127.0.0.1:9"))
    assert "no gateway answers at http://127.0.0.1:9" in sentence


def test_up_refuses_a_port_in_use_before_anything_starts() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        done = graft("up", "--port", str(port), "--verify-port=0", "--draft-port=0")
    assert f"port {port} on 127.0.0.1 is in use; choose another with --port" in refused(done)


def test_up_refuses_one_port_for_two_services() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    words = ("up", f"--port={port}", f"--grpc-port={port}", "--verify-port=0", "--draft-port=0")
    assert f"port {port} is wanted by two services" in refused(graft(*words))


@pytest.mark.parametrize("service", ["gateway", "verify", "draft", "up"])
def test_every_flag_has_a_description(service: str) -> None:
    from graft.cli.plan import UpSettings
    from graft.cli.service import settings_of

    settings = UpSettings if service == "up" else settings_of(service)
    silent = [name for name, field in settings.model_fields.items() if not field.description]
    assert silent == []
