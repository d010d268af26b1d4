"""`graft health` against real gRPC and HTTP servers."""

from __future__ import annotations

import asyncio
import json
import shutil
import ssl
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from graft.cli.health import trouble_at
from graft.cli.plan import GatewayProbe
from graft.common.channel import Tls
from graft.common.server import GrpcServer


async def asked(address: str) -> str | None:
    return await asyncio.to_thread(trouble_at, address, timeout_s=5.0)


async def test_a_grpc_service_is_serving_only_when_it_says_so() -> None:
    server = GrpcServer(["graft.v1.VerifyService"])
    address = f"127.0.0.1:{await server.start('127.0.0.1', 0)}"
    try:
        await server.set_serving(False)
        assert await asked(address) == "not serving"
        await server.set_serving(True)
        assert await asked(address) is None
    finally:
        await server.stop(0.0)
    assert await asked(address) == "no answer"


async def test_a_gateway_that_starts_says_how_far_it_is() -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state = {"state": "starting", "percent": 40, "detail": "verify is loading"}
            assert self.path == "/ready"
            self.send_response(503)
            self.end_headers()
            self.wfile.write(json.dumps(state).encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        address = f"http://127.0.0.1:{server.server_address[1]}"
        assert await asked(address) == "starting 40 % (verify is loading)"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
    assert (await asked(address) or "").startswith("no answer")


class Answering(BaseHTTPRequestHandler):
    """Ready, and degraded for as long as `missing` says."""

    missing = 0

    def do_GET(self) -> None:
        body = {"state": "ready", "percent": 100, "detail": ""}
        if self.path == "/health":
            body = {"status": "degraded" if Answering.missing else "ok", "detail": ""}
            Answering.missing = max(0, Answering.missing - 1)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def answering(context: ssl.SSLContext | None = None) -> Iterator[int]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_gateway_that_has_not_seen_its_drafters_is_not_announced_yet() -> None:
    with answering() as port:
        Answering.missing = 2
        probe = GatewayProbe(f"http://127.0.0.1:{port}")
        assert [probe() for _ in range(3)] == ["waiting for the drafter"] * 2 + [None]


def test_it_is_announced_without_them_when_they_take_too_long() -> None:
    with answering() as port:
        Answering.missing = 1000
        assert GatewayProbe(f"http://127.0.0.1:{port}", patience_s=0.0)() is None
        Answering.missing = 0


@pytest.mark.skipif(not shutil.which("openssl"), reason="openssl makes the certificate")
def test_a_gateway_with_a_certificate_of_our_own_is_asked_with_its_ca(tmp_path: Path) -> None:
    certificate, key = tmp_path / "own.pem", tmp_path / "own.key"
    words = f"req -x509 -nodes -days 2 -subj /CN=localhost -keyout {key} -out {certificate}"
    words += " -newkey ec -pkeyopt ec_paramgen_curve:prime256v1"
    words += " -addext subjectAltName=IP:127.0.0.1"
    subprocess.run(["openssl", *words.split()], check=True, capture_output=True)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate, key)
    with answering(context) as port:
        url = f"https://127.0.0.1:{port}"
        assert trouble_at(url, timeout_s=5.0, tls=Tls(ca=certificate)) is None
        assert "certificate verify failed" in (trouble_at(url, timeout_s=5.0) or "")
        gone = Tls(ca=tmp_path / "gone.pem")
        assert (trouble_at(url, timeout_s=5.0, tls=gone) or "").startswith("no answer")
