"""The page's files: served with the right types and headers, open, whole, and off when asked."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from graft.gateway.rest.page import FOLDER, INDEX, read_files
from graft.testing.front import running_front
from graft.testing.scripted_verify import Script

SCRIPT = Script(list(b"abc" * 20))
TYPES = {
    "/": "text/html; charset=utf-8",
    "/ui/main.js": "text/javascript; charset=utf-8",
    "/ui/page.css": "text/css; charset=utf-8",
    "/ui/graft.svg": "image/svg+xml",
}


def policy(header: str) -> dict[str, str]:
    parts = (part.strip().partition(" ") for part in header.split(";"))
    return {name: value for name, _, value in parts}


async def test_files_come_with_their_types_and_a_policy_that_keeps_them_home(
    tmp_path: Path,
) -> None:
    async with running_front(tmp_path, [SCRIPT]) as front:
        for path, media_type in TYPES.items():
            answer = await front.client.get(path)
            assert (answer.status_code, answer.headers["content-type"]) == (200, media_type)
            found = policy(answer.headers["content-security-policy"])
            assert found["default-src"] == "'none'"
            assert found["script-src"] == found["style-src"] == found["connect-src"] == "'self'"
            assert found["frame-ancestors"] == "'none'"
            assert "unsafe" not in answer.headers["content-security-policy"]
            assert answer.headers["x-content-type-options"] == "nosniff"


async def test_a_file_that_is_known_is_not_sent_again(tmp_path: Path) -> None:
    async with running_front(tmp_path, [SCRIPT]) as front:
        first = await front.client.get("/ui/main.js")
        assert first.headers["cache-control"] == "no-cache"
        tag = first.headers["etag"]
        for known in (tag, f"W/{tag}", f'"other", {tag}'):
            again = await front.client.get("/ui/main.js", headers={"if-none-match": known})
            assert (again.status_code, again.content) == (304, b"")
        other = await front.client.get("/ui/main.js", headers={"if-none-match": '"other"'})
        assert other.status_code == 200


async def test_every_file_the_page_names_is_there(tmp_path: Path) -> None:
    names = set(re.findall(r'(?:src|href)="ui/([^"]+)"', (FOLDER / INDEX).read_text()))
    for script in FOLDER.glob("*.js"):
        names |= set(re.findall(r'from "\./([^"]+)"', script.read_text()))
    async with running_front(tmp_path, [SCRIPT]) as front:
        for name in names:
            assert (await front.client.get(f"/ui/{name}")).status_code == 200, name
    assert names == set(read_files()) - {INDEX}, "a file is served that nothing uses"


@pytest.mark.parametrize("path", ["/ui/none.js", "/ui/index.html", "/ui/..%2Fsettings.py", "/ui"])
async def test_nothing_else_is_served(tmp_path: Path, path: str) -> None:
    async with running_front(tmp_path, [SCRIPT]) as front:
        assert (await front.client.get(path)).status_code == 404


async def test_the_page_loads_nothing_from_elsewhere() -> None:
    for name, file in read_files().items():
        found = re.findall(r"https?://[^\s\"']+", file.content.decode())
        assert set(found) <= {"http://www.w3.org/2000/svg"}, name


async def test_with_keys_the_page_loads_and_the_api_does_not(tmp_path: Path) -> None:
    async with running_front(tmp_path, [SCRIPT], api_keys=["sesame"]) as front:
        for path in TYPES:
            assert (await front.client.get(path)).status_code == 200
        assert (await front.client.get("/server_info")).status_code == 401
        assert (await front.client.get("/ui/none.js")).status_code == 401
        with_key = {"authorization": "Bearer sesame"}
        assert (await front.client.get("/server_info", headers=with_key)).status_code == 200


async def test_off_means_off(tmp_path: Path) -> None:
    async with running_front(tmp_path, [SCRIPT], ui=False) as front:
        for path in TYPES:
            assert (await front.client.get(path)).status_code == 404
        assert (await front.client.get("/health")).status_code == 200


def test_the_wheel_holds_every_file() -> None:
    project = Path(__file__).parents[2]
    packed = {one.distribution_path for one in WheelBuilder(str(project)).recurse_included_files()}
    assert {f"graft/gateway/ui/{name}" for name in read_files()} <= packed


def test_modules_are_small() -> None:
    sizes = {path.name: len(path.read_text().splitlines()) for path in FOLDER.glob("*.js")}
    assert max(sizes.values()) < 300, sizes
