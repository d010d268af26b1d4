"""Addresses of replicas: ``host:port`` as written, ``dns:///name:port`` as its many hosts."""

from __future__ import annotations

import asyncio
import socket

from graft.common.errors import InvalidArgument

_DNS = "dns:///"
_TIMEOUT_S = 5.0


def host_and_port(address: str) -> tuple[str, int]:
    """Splits an address.

    Raises:
        InvalidArgument: it has no port, or one out of range.
    """
    host, colon, port = address.removeprefix(_DNS).rpartition(":")
    named = bool(host) and _can_be_looked_up(host)
    if not colon or not named or not port.isdigit() or not 0 < int(port) <= 65535:
        raise InvalidArgument(
            f"{address} is not an address: expected host:port or dns:///name:port",
            field="address",
        )
    return host.strip("[]"), int(port)


def _can_be_looked_up(host: str) -> bool:
    try:
        return bool(host.encode("idna"))
    except UnicodeError:
        return False


def is_name(address: str) -> bool:
    """True when the address stands for several replicas."""
    return address.startswith(_DNS)


async def resolve(address: str) -> list[str]:
    """The replicas behind an address, in a stable order.

    Where a name has IPv4 and IPv6 addresses, only the former are used: they are the same hosts.

    Raises:
        OSError: the name cannot be resolved now.
    """
    if not is_name(address):
        return [address]
    host, port = host_and_port(address)
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(_TIMEOUT_S):
        found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    four = sorted({info[4][0] for info in found if info[0] == socket.AF_INET})
    six = sorted({info[4][0] for info in found if info[0] == socket.AF_INET6})
    return [f"{ip}:{port}" for ip in four] or [f"[{ip}]:{port}" for ip in six]
