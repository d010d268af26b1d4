"""`graft health` against real gRPC and HTTP servers."""

from __future__ import annotations

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from graft.cli.health import trouble_at
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
