"""Ports of this machine: which are free. Holds none of them."""

from __future__ import annotations

import errno
import socket

from graft.common.errors import InvalidArgument


def check_free(host: str, port: int, setting: str) -> None:
    """Checks that a server could listen on host and port.

    Raises:
        InvalidArgument: the port is in use, or the host is not an address of this machine.
    """
    try:
        with _bound(host, port):
            pass
    except PermissionError:
        raise InvalidArgument(
            f"port {port} needs more rights than this user has; choose another with --{setting}",
            field=setting,
        ) from None
    except OSError:
        raise InvalidArgument(
            f"port {port} on {host} is in use; choose another with --{setting}", field=setting
        ) from None


def free_port(host: str) -> int:
    """A port that was free a moment ago.

    Raises:
        InvalidArgument: the host is not an address of this machine.
    """
    with _bound(host, 0) as listener:
        port: int = listener.getsockname()[1]
        return port


def _bound(host: str, port: int) -> socket.socket:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except (socket.gaierror, UnicodeError):
        raise InvalidArgument(f"{host} is not a host name or address", field="host") from None
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(1)
    except BaseException as error:
        listener.close()
        if isinstance(error, OSError) and error.errno == errno.EADDRNOTAVAIL:
            raise InvalidArgument(
                f"{host} is not an address of this machine", field="host"
            ) from None
        raise
    return listener
