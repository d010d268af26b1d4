"""Clients that speak HTTP badly, slowly or not at all, over plain sockets."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from graft.gateway.rest.connection import MAX_HEAD_BYTES
from graft.testing.front import Front, running_front
from graft.testing.scripted_verify import Script

SAY = list(b"abcdefghijklmnopqrstuvwxyz")
BODY = b'{"prompt": "x", "max_tokens": 3}'


@asynccontextmanager
async def impatient(tmp_path: Path, head_timeout_s: float = 0.2) -> AsyncIterator[Front]:
    async with running_front(tmp_path, [Script(SAY)], head_timeout_s=head_timeout_s) as front:
        yield front


async def said(front: Front, *parts: bytes) -> tuple[int, bytes]:
    """Status and body of what comes until the server closes; 0 when it says nothing."""
    reader, writer = await asyncio.open_connection("127.0.0.1", front.server.port)
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
        answer = await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    return (int(head.split()[1]) if head else 0), body


def request(method: str, path: str, headers: str = "", body: bytes = b"") -> bytes:
    lines = f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{headers}"
    return lines.encode() + f"content-length: {len(body)}\r\n\r\n".encode() + body


def code_of(body: bytes) -> str:
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return str(error["code"])


async def test_headers_that_do_not_come_end_the_connection(tmp_path: Path) -> None:
    async with impatient(tmp_path) as front:
        status, body = await said(front, b"POST /v1/completions HTTP/1.1\r\nhost:")
        assert (status, code_of(body)) == (408, "request_timeout")


async def test_a_client_that_says_nothing_costs_no_descriptor(tmp_path: Path) -> None:
    async with impatient(tmp_path) as front:
        await front.complete(max_tokens=1)
        before = psutil.Process().num_fds()
        silent = [await asyncio.open_connection("127.0.0.1", front.server.port) for _ in range(50)]
        ends = await asyncio.gather(*(asyncio.wait_for(reader.read(), 10) for reader, _ in silent))
        assert set(ends) == {b""}
        for _, writer in silent:
            writer.close()
            await writer.wait_closed()
        assert psutil.Process().num_fds() <= before + 1


async def test_empty_lines_between_requests_do_not_hold_a_connection(tmp_path: Path) -> None:
    async with impatient(tmp_path) as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.server.port)
        writer.write(request("GET", "/version").replace(b"connection: close\r\n", b""))
        await reader.readuntil(b"}")
        writer.write(b"\r\n")
        answer = await asyncio.wait_for(reader.read(), 10)
        assert answer.startswith(b"HTTP/1.1 408")
        writer.close()


async def test_headers_without_end_are_refused(tmp_path: Path) -> None:
    async with impatient(tmp_path, 10) as front:
        begun = b"GET /health HTTP/1.1\r\nx: "
        endless = begun + b"a" * (MAX_HEAD_BYTES + 1 - len(begun))
        status, body = await said(front, endless[:1000], endless[1000:])
        assert (status, code_of(body)) == (431, "headers_too_large")


async def test_a_body_may_be_slower_than_the_headers(tmp_path: Path) -> None:
    async with impatient(tmp_path) as front:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.server.port)
        whole = request("POST", "/v1/completions", "content-type: application/json\r\n", BODY)
        writer.write(whole[:-5])
        await asyncio.sleep(0.5)
        writer.write(whole[-5:])
        assert (await asyncio.wait_for(reader.readline(), 10)).startswith(b"HTTP/1.1 200")
        writer.close()


@pytest.mark.parametrize(
    "garbage",
    [b"\x00\x01\r\n\r\n", b"FOO / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nno colon\r\n\r\n"],
)
async def test_what_is_no_http_gets_an_error_of_our_shape(tmp_path: Path, garbage: bytes) -> None:
    async with impatient(tmp_path) as front:
        status, body = await said(front, garbage)
        assert (status, code_of(body)) == (400, "invalid_http")


@pytest.mark.parametrize(
    "kind", ["", "content-type: application/merge-patch+json\r\n", "content-type: text/x+json\r\n"]
)
async def test_a_body_without_a_usual_type_is_read_as_json(tmp_path: Path, kind: str) -> None:
    async with impatient(tmp_path) as front:
        status, body = await said(front, request("POST", "/v1/completions", kind, BODY))
        assert status == 200, body
        assert json.loads(body)["choices"][0]["text"] == "abc"


async def test_head_is_a_get_without_its_body(tmp_path: Path) -> None:
    async with impatient(tmp_path) as front:
        for path in ("/health", "/ready", "/v1/models"):
            assert await said(front, request("HEAD", path)) == (200, b"")
        status, _ = await said(front, request("HEAD", "/v1/completions"))
        assert status == 405
