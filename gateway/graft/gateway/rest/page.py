"""The page at /: static files read once, with the headers that keep it to itself.

Knows no gateway: the page speaks to the API like any other client, with a key where one is asked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

FOLDER = Path(__file__).parent.parent / "ui"
INDEX = "index.html"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
}
_POLICY = "; ".join(
    [
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self'",
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    ]
)
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": _POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


@dataclass(frozen=True, slots=True)
class _File:
    """One file: its bytes, its type, and the tag of both."""

    content: bytes
    media_type: str
    tag: str


def read_files(folder: Path = FOLDER) -> Mapping[str, _File]:
    """The page's files by name; only types the page uses."""
    found = {}
    for path in sorted(folder.iterdir()):
        media_type = _TYPES.get(path.suffix)
        if media_type is not None:
            content = path.read_bytes()
            tag = f'"{hashlib.sha256(content).hexdigest()[:20]}"'
            found[path.name] = _File(content, media_type, tag)
    return found


def page_paths(files: Mapping[str, _File]) -> frozenset[str]:
    """The paths that are served without a key: the page has to load before it can ask for one."""
    return frozenset({"/", *(f"/ui/{name}" for name in files if name != INDEX)})


def page_router(files: Mapping[str, _File]) -> APIRouter:
    """The routes of the page. Every load asks whether a file is new, and gets 304 if not."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def show_page(request: Request) -> Response:
        return _answer(files[INDEX], request)

    @router.get("/ui/{name}")
    async def show_file(name: str, request: Request) -> Response:
        if name not in files or name == INDEX:
            raise HTTPException(404)
        return _answer(files[name], request)

    return router


def _answer(file: _File, request: Request) -> Response:
    headers = {**_HEADERS, "etag": file.tag}
    known = [tag.strip() for tag in request.headers.get("if-none-match", "").split(",")]
    if file.tag in known or f"W/{file.tag}" in known:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)
