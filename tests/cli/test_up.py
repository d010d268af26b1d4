"""`graft up` with a tiny model: real processes, killed and started again; the text stays."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest

from graft.testing.checkpoints import write_eagle3
from graft.testing.models import write_tiny_model

_DEADLINE_S = 90.0
_PORTS = ("--port=0", "--grpc-port=0", "--verify-port=0", "--draft-port=0")


@dataclass
class Up:
    """A running `graft up` and what it has said so far."""

    process: subprocess.Popen[str]
    said: list[str] = field(default_factory=list)
    _lines: queue.Queue[str | None] = field(default_factory=queue.Queue)

    def read(self) -> None:
        """Collects lines until the process has closed its end; runs on its own thread."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.rstrip())
        self._lines.put(None)

    def until(self, words: str) -> str:
        """The next line that holds `words`."""
        began = time.monotonic()
        while time.monotonic() - began < _DEADLINE_S:
            line = self._lines.get(timeout=_DEADLINE_S)
            if line is None:
                break
            self.said.append(line)
            if words in line:
                return line
        raise AssertionError(f"never said {words!r}: {self.said}")

    @property
    def url(self) -> str:
        """Where the gateway is, from the line that said so."""
        line = next(line for line in self.said if line.startswith("ready on "))
        return line.split()[2]

    def pid(self, service: str) -> int:
        """The process of a service."""
        for child in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):
                if service in child.cmdline():
                    return child.pid
        raise AssertionError(f"no {service} is running")


@contextlib.contextmanager
def started(*words: str, **environment: str) -> Iterator[Up]:
    """`graft up WORDS`, ended with SIGKILL if the block has not ended it."""
    process = subprocess.Popen(
        [sys.executable, "-m", "graft.cli.main", "up", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment},
    )
    up = Up(process)
    reader = threading.Thread(target=up.read)
    reader.start()
    try:
        yield up
    finally:
        process.kill()
        process.wait()
        reader.join()
        assert process.stdout is not None
        process.stdout.close()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def up(model: Path) -> Iterator[Up]:
    with started(f"--model={model}", "--threads=1", *_PORTS) as running:
        running.until("ready on ")
        yield running


def wait_ready(url: str) -> None:
    until = time.monotonic() + _DEADLINE_S
    while time.monotonic() < until:
        with (
            contextlib.suppress(urllib.error.URLError),
            urllib.request.urlopen(f"{url}/ready", timeout=5.0),
        ):
            return
        time.sleep(0.05)
    raise AssertionError("the gateway was not ready in time")


def streamed(url: str, speculation: str, on_chunk: Callable[[int], None] | None = None) -> str:
    """The text of a streamed chat; `on_chunk` hears the number of each piece of text."""
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "one two three one two three one two"}],
        "max_tokens": 300,
        "temperature": 0.8,
        "seed": 11,
        "ignore_eos": True,
        "stream": True,
        "speculation": speculation,
    }
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    pieces: list[str] = []
    reasons: list[Any] = []
    with urllib.request.urlopen(request, timeout=_DEADLINE_S) as response:
        for raw in response:
            line = raw.decode().strip()
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                reasons.append(choice["finish_reason"])
                if text := choice["delta"].get("content"):
                    pieces.append(text)
                    if on_chunk is not None:
                        on_chunk(len(pieces))
    assert [reason for reason in reasons if reason] == ["length"]
    return "".join(pieces)


def test_it_says_where_it_serves_and_how_to_try_it(up: Up) -> None:
    assert up.url.startswith("http://127.0.0.1:")
    example = up.until("try: ")
    assert f"curl -N {up.url}/v1/chat/completions" in example
    assert '"model": "tiny"' in example


def test_the_text_is_the_same_with_and_without_speculation(up: Up) -> None:
    assert streamed(up.url, "auto") == streamed(up.url, "off")


@pytest.mark.parametrize("service", ["draft", "verify"])
def test_a_service_killed_in_mid_stream_is_started_again_and_the_text_goes_on(
    up: Up, service: str
) -> None:
    baseline = streamed(up.url, "off")
    pid = up.pid(service)

    def kill(number: int) -> None:
        if number == 3:
            os.kill(pid, signal.SIGKILL)

    assert streamed(up.url, "auto", kill) == baseline
    up.until(f"{service} died after")
    up.until(f"{service} is back after")
    assert up.pid(service) != pid
    wait_ready(up.url)  # the supervisor knows before the gateway has asked again
    assert streamed(up.url, "auto") == baseline


def test_sigterm_drains_and_exits_with_zero(model: Path) -> None:
    with started(f"--model={model}", "--threads=1", "--no-draft", *_PORTS) as running:
        assert "speculation off" in running.until("ready on ")
        children = [child.pid for child in psutil.Process(running.process.pid).children()]
        assert len(children) == 2
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(_DEADLINE_S) == 0
        assert not any(psutil.pid_exists(pid) for pid in children)


def test_a_damaged_model_ends_it_with_the_reason(model: Path, tmp_path: Path) -> None:
    broken = write_tiny_model(tmp_path / "broken")
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with started(f"--model={broken}", *_PORTS) as running:
        line = running.until("error: ")
        assert running.process.wait(_DEADLINE_S) == 2
    assert line.startswith("error: verify: it refused to start")
    assert "model.safetensors" in line


def test_a_model_that_is_not_there_ends_it_before_anything_starts() -> None:
    with started("--model=/no/such/folder", *_PORTS) as running:
        line = running.until("error: ")
        assert running.process.wait(_DEADLINE_S) == 2
    assert line == "error: there is no folder or file /no/such/folder"


def test_a_network_drafts_with_two_more_words(tmp_path: Path) -> None:
    target = write_tiny_model(tmp_path / "tiny", layers=6)
    head = write_eagle3(tmp_path / "head", target)
    words = ("--proposers=eagle3", f"--draft-model-path={head}")
    with started(f"--model={target}", "--threads=1", *words, *_PORTS) as running:
        running.until("ready on ")
        assert streamed(running.url, "eagle3") == streamed(running.url, "off")
