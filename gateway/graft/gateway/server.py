"""The gateway process: REST by uvicorn and gRPC by grpc.aio, on one event loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn

from graft.common import log
from graft.common.channel import claim_loop, is_loopback
from graft.common.errors import InvalidArgument
from graft.common.server import GrpcServer
from graft.common.tracing import OFF, Tracing, open_tracing
from graft.gateway.core import Gateway
from graft.gateway.rest.app import build
from graft.gateway.rest.connection import ServerConfig
from graft.gateway.rpc import SERVICE_NAME, GatewayRpc
from graft.gateway.settings import GatewaySettings
from graft.v1 import gateway_pb2_grpc

_log = log.get("gateway")
_HEALTH_S = 1.0


class _Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers: the process decides when to end."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class GatewayServer:
    """Both surfaces of one gateway."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        self.port = 0
        self.grpc_port = 0
        self._gateway: Gateway | None = None
        self._uvicorn: _Uvicorn | None = None
        self._serving: asyncio.Task[None] | None = None
        self._health: asyncio.Task[None] | None = None
        self._grpc: GrpcServer | None = None
        self._tracing: Tracing = OFF

    @property
    def gateway(self) -> Gateway:
        """The gateway behind the surfaces, once started."""
        assert self._gateway is not None, "start comes first"
        return self._gateway

    async def start(self) -> int:
        """Listens on both ports; returns the one of REST. Readiness follows the replicas.

        Raises:
            GraftError: a port is in use, or the model's files are missing or broken.
        """
        claim_loop()
        settings = self.settings
        sock = _bound(settings)
        try:
            self._tracing = open_tracing(
                "gateway", settings.otlp_endpoint, share=settings.trace_share
            )
            gateway = self._gateway = Gateway(settings)
            self._grpc = GrpcServer(
                [SERVICE_NAME],
                tls=settings.tls,
                plaintext_ok=settings.insecure,
                tracing=self._tracing,
                trace_roots=True,
            )
            gateway_pb2_grpc.add_GatewayServiceServicer_to_server(
                GatewayRpc(gateway), self._grpc.server
            )
            self.grpc_port = await self._grpc.start(settings.host, settings.grpc_port)
            await self._grpc.set_serving(False)
            await gateway.start()
        except BaseException:
            sock.close()
            await self._abandon()
            raise
        self.port = int(sock.getsockname()[1])
        self._uvicorn = _Uvicorn(_config(gateway, self._tracing))
        self._serving = asyncio.create_task(self._uvicorn.serve(sockets=[sock]))
        while not self._uvicorn.started:
            await asyncio.sleep(0.005)
            if self._serving.done():
                self._serving.result()
                raise InvalidArgument("the REST server did not start", field="port")
        self._health = asyncio.create_task(self._follow_readiness())
        _log.info("gateway listens", host=settings.host, port=self.port, grpc_port=self.grpc_port)
        return self.port

    async def stop(self, grace_s: float) -> None:
        """Not ready first, then running answers end within `grace_s`, then everything closes."""
        if self._gateway is None:
            return
        self._gateway.draining = True
        if self._health is not None:
            self._health.cancel()
            await asyncio.wait({self._health})
        if self._grpc is not None:
            await self._grpc.set_serving(False)
        await self._gateway.drain(grace_s)
        if self._grpc is not None:
            await self._grpc.stop(0.1)
        if self._uvicorn is not None and self._serving is not None:
            self._uvicorn.should_exit = True
            await asyncio.wait({self._serving})
        await self._gateway.stop()
        await asyncio.to_thread(self._tracing.close)

    async def _abandon(self) -> None:
        if self._grpc is not None:
            await self._grpc.stop(0)
        if self._gateway is not None:
            await self._gateway.stop()
        await asyncio.to_thread(self._tracing.close)

    async def _follow_readiness(self) -> None:
        """Keeps gRPC health in step with readiness."""
        assert self._grpc is not None
        known: bool | None = None
        while True:
            ready = self.gateway.readiness().ready
            if ready is not known:
                await self._grpc.set_serving(ready)
                known = ready
            await self.gateway.verify.changed.wait(_HEALTH_S)


def _config(gateway: Gateway, tracing: Tracing) -> ServerConfig:
    settings = gateway.settings
    logging.getLogger("uvicorn.error").setLevel(logging.WARNING)
    return ServerConfig(
        build(gateway, tracing),
        settings.head_timeout_s,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=1,
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
        ssl_ca_certs=None if settings.tls_ca is None else str(settings.tls_ca),
    )


def _bound(settings: GatewaySettings) -> socket.socket:
    """A listening socket, bound before anything else so that a busy port is one clear error."""
    host = settings.host
    loopback = is_loopback(f"[{host}]:1" if ":" in host else f"{host}:1")
    if settings.tls is None and not settings.insecure and not loopback:
        raise InvalidArgument(
            f"{host} is reachable from outside: give TLS files, or allow plain text with "
            "--insecure on a network you trust",
            field="host",
        )
    try:
        info = socket.getaddrinfo(host, settings.port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(info[0], info[1])
    except (OSError, UnicodeError) as error:
        raise InvalidArgument(f"cannot listen on {host}: {error}", field="host") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(info[4])
        sock.listen(2048)
        sock.setblocking(False)
    except OSError as error:
        sock.close()
        raise InvalidArgument(
            f"cannot listen on {host}:{settings.port}: {error.strerror}; is the port in use?",
            field="port",
        ) from None
    return sock
