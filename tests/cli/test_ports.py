"""Ports that are checked before anything starts."""

from __future__ import annotations

import socket

import pytest

from graft.cli.ports import check_free, free_port
from graft.common.errors import InvalidArgument


def test_a_port_in_use_is_one_sentence_that_names_the_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        expected = f"port {port} on 127.0.0.1 is in use; choose another with --grpc-port"
        with pytest.raises(InvalidArgument, match=expected):
            check_free("127.0.0.1", port, "grpc-port")


def test_a_free_port_is_free() -> None:
    check_free("127.0.0.1", free_port("127.0.0.1"), "port")


def test_a_port_just_left_by_a_server_counts_as_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as client:
            accepted, _ = server.accept()
            accepted.close()
            client.recv(1)
    check_free("127.0.0.1", port, "port")


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"192\.0\.2\.1 is not an address of this machine"):
        check_free("192.0.2.1", 0, "port")
    with pytest.raises(InvalidArgument, match=r"192\.0\.2\.1 is not an address of this machine"):
        free_port("192.0.2.1")


@pytest.mark.parametrize("host", ["no such host", "x" * 64, "a..b"])
def test_a_host_that_does_not_exist_is_refused(host: str) -> None:
    with pytest.raises(InvalidArgument, match="is not a host name or address"):
        check_free(host, 0, "port")
    with pytest.raises(InvalidArgument, match="is not a host name or address"):
        free_port(host)
