"""One replica as a process: it says when it is ready, drains on SIGTERM, exits 0."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import sys
from graft.verify.main import run
from graft.verify.settings import VerifySettings
run(VerifySettings.load(None, {"model": sys.argv[1], "port": 0, "threads": 1,
                               "kv_tokens": 512, "log_format": "json"}))
"""


def started(model: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(model)], stderr=subprocess.PIPE, text=True
    )


def events(process: subprocess.Popen[str], until: str) -> list[dict[str, object]]:
    assert process.stderr is not None
    heard = []
    for line in process.stderr:
        if line.startswith("{"):
            heard.append(json.loads(line))
            if heard[-1]["event"] == until:
                return heard
    raise AssertionError(f"the process ended before it said {until!r}")


def test_a_replica_drains_and_exits_well_on_sigterm(tiny_model: Path) -> None:
    process = started(tiny_model)
    try:
        ready = events(process, "ready")[-1]
        assert ready["kv_tokens"] == 512
        assert ready["service"] == "verify"
        process.send_signal(signal.SIGTERM)
        assert events(process, "stopped")
        assert process.wait(20) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_replica_without_a_model_ends_with_its_reason(tmp_path: Path) -> None:
    process = started(tmp_path / "nowhere")
    _, said = process.communicate(timeout=60)
    assert process.returncode != 0
    assert "ModelNotFound" in said and "nowhere" in said
