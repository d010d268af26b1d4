"""Other people's clients, in their own environments, against a gateway with a scripted model."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from graft.testing.actor import actor
from graft.testing.front import Front, running_front
from graft.testing.outside import node_with, python_of, run

PROGRAMS = Path(__file__).parent / "programs"
OPENAI = {"openai": "7.59.0"}
AI_SDK = {
    "ai": "7.0.173",
    "@ai-sdk/openai": "4.0.118",
    "@ai-sdk/openai-compatible": "3.0.92",
    "zod": "4.1.12",
}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.fixture
async def front(tmp_path: Path) -> AsyncIterator[Front]:
    async with running_front(tmp_path, [actor()], silent_s=20.0) as running:
        yield running


def url(front: Front) -> str:
    return str(front.client.base_url).rstrip("/")


async def test_litellm(front: Front) -> None:
    python = await python_of("clients")
    program = PROGRAMS / "with_litellm.py"
    assert "content" in await run([str(python), str(program)], url(front))


async def test_the_standard_suite_of_langchain(front: Front) -> None:
    python = await python_of("clients")
    program = PROGRAMS / "with_langchain.py"
    flags = ["-q", "-p", "no:cacheprovider", "--import-mode=importlib", "-o", "asyncio_mode=auto"]
    flags += ["-c", os.devnull, "--rootdir", str(PROGRAMS), "-p", "no:codspeed"]
    flags += ["-o", "asyncio_default_test_loop_scope=session"]
    output = await run([str(python), "-m", "pytest", *flags, str(program)], url(front))
    assert " passed" in output and "failed" not in output


@pytest.mark.node
async def test_openai_for_node(front: Front) -> None:
    command = await node_with(OPENAI, PROGRAMS / "with_openai.mjs")
    assert "content" in await run(command, url(front))


@pytest.mark.node
async def test_the_ai_sdk(front: Front) -> None:
    command = await node_with(AI_SDK, PROGRAMS / "with_ai_sdk.mjs")
    assert "content" in await run(command, url(front))
