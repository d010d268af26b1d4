"""gRPC channels and the options both sides agree on. One event loop a process touches grpc.aio."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

import grpc
import grpc.aio

from graft.common.errors import InvalidArgument

PROTOCOL_REVISION = 1
VERIFY_MESSAGE_BYTES = 16 << 20
DRAFT_MESSAGE_BYTES = 4 << 20

_KEEPALIVE_MS = 20_000
_KEEPALIVE_TIMEOUT_MS = 5_000
_MIN_PING_INTERVAL_MS = 10_000
_LOOPBACK = ("127.", "localhost", "[::1]", "ipv4:127.", "ipv6:[::1]", "unix:")

_owner: tuple[int, asyncio.AbstractEventLoop] | None = None


@dataclass(frozen=True, slots=True)
class Tls:
    """Paths of PEM files. `ca` checks the peer; `certificate` and `key` are our own (mTLS)."""

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None


def claim_loop() -> None:
    """Asserts that this process uses grpc.aio from one loop only, and was not forked after it did.

    Raises:
        RuntimeError: a second loop, or a forked child, creates grpc.aio objects.
    """
    global _owner
    pid, loop = os.getpid(), asyncio.get_running_loop()
    if _owner is not None:
        if _owner[0] != pid:
            raise RuntimeError("grpc was used before this process was forked; start it with spawn")
        if _owner[1] is not loop and not _owner[1].is_closed():
            raise RuntimeError("another event loop of this process already uses grpc.aio")
    _owner = (pid, loop)


def client_options(message_bytes: int = VERIFY_MESSAGE_BYTES) -> list[tuple[str, int]]:
    """Channel options of every client: keepalive, bounded back-off, message caps."""
    return [
        ("grpc.max_send_message_length", message_bytes),
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", 1_000),
    ]


def server_options(message_bytes: int = VERIFY_MESSAGE_BYTES) -> list[tuple[str, int]]:
    """Server options that agree with `client_options`; a busy port is an error, never shared."""
    return [
        ("grpc.max_send_message_length", message_bytes),
        ("grpc.max_receive_message_length", message_bytes),
        ("grpc.keepalive_time_ms", _KEEPALIVE_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", _MIN_PING_INTERVAL_MS),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.so_reuseport", 0),
    ]


def is_loopback(address: str) -> bool:
    """True when `address` can only be reached from this machine."""
    return address.removeprefix("dns:///").startswith(_LOOPBACK)


def open_channel(
    address: str,
    *,
    tls: Tls | None = None,
    plaintext_ok: bool = False,
    message_bytes: int = VERIFY_MESSAGE_BYTES,
    server_name: str | None = None,
) -> grpc.aio.Channel:
    """A channel to one peer; it connects and reconnects by itself.

    `server_name` is the name in the peer's certificate, where `address` is a number behind it.

    Raises:
        InvalidArgument: plain text to an address that is not loopback, unless it was asked for.
    """
    claim_loop()
    options: list[tuple[str, int | str]] = [*client_options(message_bytes)]
    if tls is not None:
        if server_name is not None:
            options = [*options, ("grpc.ssl_target_name_override", server_name)]
        return grpc.aio.secure_channel(address, _channel_credentials(tls), options)
    if not (plaintext_ok or is_loopback(address)):
        raise InvalidArgument(
            f"{address} is not on this machine: give TLS files, or allow plain text with "
            "--insecure on a network you trust",
            field="address",
        )
    return grpc.aio.insecure_channel(address, options)


def _channel_credentials(tls: Tls) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        root_certificates=tls.ca.read_bytes() if tls.ca else None,
        private_key=tls.key.read_bytes() if tls.key else None,
        certificate_chain=tls.certificate.read_bytes() if tls.certificate else None,
    )


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """Credentials of a server; with `ca` set, clients must show a certificate (mTLS).

    Raises:
        InvalidArgument: certificate or key is missing.
    """
    if tls.certificate is None or tls.key is None:
        raise InvalidArgument("TLS needs both a certificate and a key", field="tls")
    return grpc.ssl_server_credentials(
        [(tls.key.read_bytes(), tls.certificate.read_bytes())],
        root_certificates=tls.ca.read_bytes() if tls.ca else None,
        require_client_auth=tls.ca is not None,
    )
