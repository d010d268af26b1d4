"""`graft health ADDRESS`: asks a service whether it serves, over gRPC health or GET /ready."""

from __future__ import annotations

import json
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Annotated

import typer

from graft.common.channel import Tls


def command(_name: str) -> typer.Typer:
    """The command, used as the health check of containers."""
    app = typer.Typer(add_completion=False, rich_markup_mode=None)

    @app.command(help="Exit 0 when the service at ADDRESS is serving, 1 when it is not.")
    def health(
        address: Annotated[
            str, typer.Argument(help="host:port of a gRPC service, or http://host:port.")
        ],
        timeout: Annotated[float, typer.Option(help="Seconds to wait.")] = 2.0,
        tls_ca: Annotated[
            Path | None, typer.Option(help="CA of the server (PEM); the system's by default.")
        ] = None,
        tls_certificate: Annotated[
            Path | None, typer.Option(help="Our certificate, for mTLS (PEM).")
        ] = None,
        tls_key: Annotated[Path | None, typer.Option(help="Our key, for mTLS (PEM).")] = None,
    ) -> None:
        tls = None
        if tls_ca or tls_certificate:
            tls = Tls(ca=tls_ca, certificate=tls_certificate, key=tls_key)
        trouble = trouble_at(address, timeout_s=timeout, tls=tls)
        if trouble is not None:
            print(f"{address}: {trouble}", file=sys.stderr)
            raise typer.Exit(1)
        print(f"{address}: serving")

    return app


def trouble_at(address: str, *, timeout_s: float, tls: Tls | None = None) -> str | None:
    """None when the service serves; otherwise a few words that say what it does instead."""
    if address.startswith(("http://", "https://")):
        return _trouble_over_http(address, timeout_s, tls)
    return _trouble_over_grpc(address, timeout_s, tls)


def degraded_at(url: str, *, timeout_s: float) -> bool:
    """True when the gateway serves, and says that some of its replicas are missing."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"{url.rstrip('/')}/health", timeout=timeout_s) as answer:
            return bool(json.loads(answer.read(4096)).get("status") == "degraded")
    except (OSError, ValueError):
        return False


def _trouble_over_http(url: str, timeout_s: float, tls: Tls | None) -> str | None:
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    try:
        if tls is not None:
            handlers.append(urllib.request.HTTPSHandler(context=_context(tls)))
        opener = urllib.request.build_opener(*handlers)
        with opener.open(f"{url.rstrip('/')}/ready", timeout=timeout_s):
            return None
    except urllib.error.HTTPError as error:
        with error:
            return _state(error.read(4096)) or f"HTTP {error.code}"
    except (OSError, ValueError) as error:
        return f"no answer ({getattr(error, 'reason', error)})"


def _context(tls: Tls) -> ssl.SSLContext:
    """Trusts `tls.ca` in place of the system's CAs, and shows our certificate where there is one.

    Raises:
        OSError: a file cannot be read, or is no PEM file.
    """
    context = ssl.create_default_context(cafile=None if tls.ca is None else str(tls.ca))
    if tls.certificate is not None:
        context.load_cert_chain(tls.certificate, tls.key)
    return context


def _state(body: bytes) -> str | None:
    try:
        answer = json.loads(body)
    except ValueError:
        return None
    if not isinstance(answer, dict) or "state" not in answer:
        return None
    percent = answer.get("percent")
    words = [str(answer["state"])]
    if isinstance(percent, int | float) and 0 < percent < 100:
        words.append(f"{percent:.0f} %")
    if answer.get("detail"):
        words.append(f"({answer['detail']})")
    return " ".join(words)


def _trouble_over_grpc(address: str, timeout_s: float, tls: Tls | None) -> str | None:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    options = [("grpc.enable_http_proxy", 0)]
    if tls is None:
        channel = grpc.insecure_channel(address, options)
    else:
        credentials = grpc.ssl_channel_credentials(
            root_certificates=tls.ca.read_bytes() if tls.ca else None,
            private_key=tls.key.read_bytes() if tls.key else None,
            certificate_chain=tls.certificate.read_bytes() if tls.certificate else None,
        )
        channel = grpc.secure_channel(address, credentials, options)
    with channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            code = error.code()
            return "no answer" if code is grpc.StatusCode.UNAVAILABLE else code.name.lower()
    if answer.status == health_pb2.HealthCheckResponse.SERVING:
        return None
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return name.lower().replace("_", " ")
