#!/usr/bin/env python3
"""Tries the compose file with a real Docker engine: build, chat, scale, kill, down.

Needs only Python, docker and compose. Environment:
    DOCKER       the docker command (docker)
    COMPOSE      the compose command (docker compose, or docker-compose where that is missing)
    BASE_IMAGE   the image to build on (the Dockerfile's own)
    BUILD_FLAGS  further words for docker build, for example --network host --secret ...
    SKIP_BUILD   1 uses the images of the last run
"""

from __future__ import annotations

import http.client
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
IMAGES = {"gateway": "graft-gateway:test", "worker-cpu": "graft-worker-cpu:test"}
PROJECT = f"graft-test-{os.getpid()}"
START_S = 300.0
ANSWER_S = 300.0
STORY = "Write a long story about a lighthouse keeper and her dog. Then tell it once more."


class Engine:
    """The docker and compose commands, and the port the gateway is published on."""

    def __init__(self) -> None:
        self.docker_words = shlex.split(os.environ.get("DOCKER", "docker"))
        self.compose_words = self._compose_words()
        self.port = free_port()
        self.environment = {
            **os.environ,
            "GRAFT_GATEWAY_IMAGE": IMAGES["gateway"],
            "GRAFT_WORKER_IMAGE": IMAGES["worker-cpu"],
            "GRAFT_PORT": str(self.port),
            "GRAFT_GRPC_PORT": str(free_port()),
        }

    def docker(self, *words: str) -> str:
        """Runs docker and returns what it printed."""
        return self._run([*self.docker_words, *words])

    def compose(self, *words: str) -> str:
        """Runs compose on this test's own project."""
        base = [*self.compose_words, "-p", PROJECT, "--profile", "cpu"]
        return self._run([*base, *words])

    def containers(self, service: str) -> list[str]:
        """The ids of a service's running containers."""
        return self.compose("ps", "-q", service).split()

    def health(self, container: str) -> str:
        """healthy, unhealthy or starting; the state of a container without a health check."""
        return self.docker("inspect", "-f", "{{.State.Health.Status}}", container).strip()

    def num_restarts(self, container: str) -> int:
        """How often the engine has started a container again."""
        return int(self.docker("inspect", "-f", "{{.RestartCount}}", container))

    def crash(self, container: str) -> None:
        """Kills the service inside a container with SIGKILL, as a crash would."""
        script = (
            "import os, signal\n"
            "for name in filter(str.isdigit, os.listdir('/proc')):\n"
            "    words = open(f'/proc/{name}/cmdline').read().split('\\0')\n"
            "    if any(word.endswith('/graft') for word in words[:2]) and int(name) > 1:\n"
            "        os.kill(int(name), signal.SIGKILL)\n"
        )
        self.docker("exec", container, "python3", "-c", script)

    def _compose_words(self) -> list[str]:
        if os.environ.get("COMPOSE"):
            return shlex.split(os.environ["COMPOSE"])
        plugin = [*self.docker_words, "compose"]
        if subprocess.run([*plugin, "version"], capture_output=True, check=False).returncode == 0:
            return plugin
        if shutil.which("docker-compose"):
            return ["docker-compose"]
        sys.exit("error: neither 'docker compose' nor docker-compose is installed")

    def _run(self, words: list[str]) -> str:
        done = subprocess.run(
            words, cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False
        )
        if done.returncode:
            sys.exit(f"error: {shlex.join(words)} failed\n{done.stdout}{done.stderr}")
        return done.stdout


def main() -> None:
    """Runs every step; the first that fails ends the test with exit code 1."""
    engine = Engine()
    step("engine", lambda: engine.docker("info"))
    if os.environ.get("SKIP_BUILD") != "1":
        for target, image in IMAGES.items():
            step(f"build {target}", partial(build, engine, target, image))
    try:
        step("up", lambda: start(engine))
        baseline = step("chat without speculation", lambda: chat(engine, STORY, "off"))
        speculated = step("chat with speculation", lambda: chat(engine, STORY, "auto"))
        same(speculated, baseline)
        step("two drafters", lambda: scale(engine, 2))
        for text in step("three chats at a time", lambda: chat_together(engine, 3)):
            same(text, baseline)
        text = step("kill a drafter in mid-stream", lambda: interrupted(engine, "draft"))
        same(text, baseline)
        text = step("kill verify in mid-stream", lambda: interrupted(engine, "verify"))
        same(text, baseline)
    except BaseException:
        subprocess.run(
            [*engine.compose_words, "-p", PROJECT, "--profile", "cpu", "logs", "--tail=60"],
            cwd=ROOT,
            env=engine.environment,
            check=False,
        )
        raise
    finally:
        step("down", lambda: engine.compose("down", "--volumes", "--remove-orphans", "-t", "20"))
    left = engine.docker("ps", "-aq", "--filter", f"label=com.docker.compose.project={PROJECT}")
    if left.split():
        sys.exit(f"error: containers are left: {left}")
    print("compose test passed")


def build(engine: Engine, target: str, image: str) -> None:
    """Builds one image with BuildKit; its output goes to the terminal."""
    words = [*engine.docker_words, "build", "--target", target, "-t", image]
    if os.environ.get("BASE_IMAGE"):
        words += ["--build-arg", f"BASE_IMAGE={os.environ['BASE_IMAGE']}"]
    words += [*shlex.split(os.environ.get("BUILD_FLAGS", "")), "."]
    environment = {**engine.environment, "DOCKER_BUILDKIT": "1"}
    if subprocess.run(words, cwd=ROOT, env=environment, check=False).returncode:
        sys.exit(f"error: {shlex.join(words)} failed")


def start(engine: Engine) -> None:
    """Brings everything up and waits until the gateway can serve."""
    engine.compose("up", "-d", "--no-build")
    until(lambda: ready(engine), START_S, "the gateway is ready")


def scale(engine: Engine, count: int) -> None:
    """Runs `count` drafters and waits until all are healthy."""
    engine.compose("up", "-d", "--no-build", "--no-recreate", "--scale", f"draft={count}")
    until(
        lambda: (
            len(found := engine.containers("draft")) == count
            and all(engine.health(container) == "healthy" for container in found)
        ),
        START_S,
        f"{count} drafters are healthy",
    )


def chat(engine: Engine, words: str, speculation: str) -> str:
    """The text of one streamed answer, greedy."""
    return "".join(stream(engine, words, speculation))


def chat_together(engine: Engine, count: int) -> list[str]:
    """The texts of several answers asked for at once."""
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda _: chat(engine, STORY, "auto"), range(count)))


def interrupted(engine: Engine, service: str) -> str:
    """The text of an answer during which every container of a service crashed once."""
    parts: list[str] = []
    containers = engine.containers(service)
    before = [engine.num_restarts(container) for container in containers]
    for part in stream(engine, STORY, "auto"):
        parts.append(part)
        if len(parts) == 5:
            for container in containers:
                engine.crash(container)
    until(
        lambda: (
            [engine.num_restarts(container) for container in containers]
            == [count + 1 for count in before]
        ),
        START_S,
        f"every container of {service} was started again",
    )
    return "".join(parts)


def stream(engine: Engine, words: str, speculation: str) -> Iterator[str]:
    """The pieces of a streamed answer; an error, or a stream without its end, fails the test."""
    body = {
        "messages": [{"role": "user", "content": words}],
        "max_tokens": 160,
        "temperature": 0,
        "stream": True,
        "speculation": speculation,
        "model": model(engine),
    }
    finish_reasons: list[str] = []
    with connection(engine) as client:
        client.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"}
        )
        response = client.getresponse()
        if response.status != 200:
            sys.exit(f"error: HTTP {response.status}: {response.read(4096)!r}")
        for line in response:
            event = line.decode().strip().removeprefix("data: ")
            if not event or event.startswith(":"):
                continue
            if event == "[DONE]":
                break
            chunk = json.loads(event)
            if "error" in chunk:
                sys.exit(f"error: the stream failed: {chunk['error']}")
            for choice in chunk["choices"]:
                if choice.get("finish_reason"):
                    finish_reasons.append(choice["finish_reason"])
                if choice["delta"].get("content"):
                    yield choice["delta"]["content"]
        else:
            sys.exit("error: the stream ended without [DONE]")
    if len(finish_reasons) != 1:
        sys.exit(f"error: expected one finish_reason, got {finish_reasons}")


def model(engine: Engine) -> str:
    """The id of the served model."""
    with connection(engine) as client:
        client.request("GET", "/v1/models")
        listed: dict[str, Any] = json.load(client.getresponse())
    return str(listed["data"][0]["id"])


def ready(engine: Engine) -> bool:
    """True when the gateway says that it can serve."""
    try:
        with connection(engine) as client:
            client.request("GET", "/ready")
            return client.getresponse().status == 200
    except OSError:
        return False


@contextmanager
def connection(engine: Engine) -> Iterator[http.client.HTTPConnection]:
    """A connection to the published port of the gateway."""
    client = http.client.HTTPConnection("127.0.0.1", engine.port, timeout=ANSWER_S)
    try:
        yield client
    finally:
        client.close()


def same(text: str, baseline: str) -> None:
    """Ends the test when two texts differ."""
    if text != baseline:
        sys.exit(f"error: the text differs\nexpected: {baseline!r}\ngot:      {text!r}")


def until(true: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Asks every half second until `true` says so."""
    began = time.monotonic()
    while not true():
        if time.monotonic() - began > timeout_s:
            sys.exit(f"error: waited {timeout_s:.0f} s until {what}")
        time.sleep(0.5)


def step(name: str, run: Callable[[], Any]) -> Any:
    """Runs one step and says how long it took."""
    began = time.monotonic()
    result = run()
    print(f"ok {name} ({time.monotonic() - began:.1f} s)", flush=True)
    return result


def free_port() -> int:
    """A port of this machine that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


if __name__ == "__main__":
    main()
