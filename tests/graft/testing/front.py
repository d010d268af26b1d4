"""A real gateway in front of scripted services, in the test's own loop."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import httpx

from graft.common.channel import open_channel
from graft.gateway.server import GatewayServer
from graft.gateway.settings import GatewaySettings
from graft.testing.models import write_tiny_model
from graft.testing.scripted_draft import ScriptedDraft
from graft.testing.scripted_verify import Script, ScriptedVerify

PROMPT = "Say it."
SETTINGS: dict[str, Any] = {
    "tiers": "fixed",
    "port": 0,
    "grpc_port": 0,
    "poll_s": 0.05,
    "silent_s": 1.0,
    "stall_s": 5.0,
    "replay_timeout_s": 10.0,
}


@dataclass(frozen=True, slots=True)
class Front:
    """The gateway, what is behind it, and clients of both surfaces."""

    server: GatewayServer
    verifiers: list[ScriptedVerify]
    drafters: list[ScriptedDraft]
    client: httpx.AsyncClient
    channel: grpc.aio.Channel

    @property
    def verify(self) -> ScriptedVerify:
        """The first verify replica."""
        return self.verifiers[0]

    async def complete(self, **fields: Any) -> httpx.Response:
        """POST /v1/completions."""
        return await self.client.post("/v1/completions", json={"prompt": PROMPT, **fields})

    async def chat(self, **fields: Any) -> httpx.Response:
        """POST /v1/chat/completions."""
        messages = [{"role": "user", "content": PROMPT}]
        return await self.client.post("/v1/chat/completions", json={"messages": messages, **fields})

    async def stream(self, path: str, **fields: Any) -> list[dict[str, Any]]:
        """The objects of a whole stream; it must end with [DONE] or an error object."""
        response = await self.client.post(path, json={"stream": True, **fields})
        assert response.status_code == 200, response.text
        return events(response.text)

    async def until(self, ready: bool) -> None:
        """Waits until /ready says so; the test's timeout is the limit."""
        while ((await self.client.get("/ready")).status_code == 200) is not ready:
            await self.server.gateway.verify.changed.wait(0.05)


def events(body: str) -> list[dict[str, Any]]:
    """The objects of a stream, checked byte for byte."""
    blocks = body.split("\n\n")
    assert blocks.pop() == ""
    found = []
    for block in blocks:
        if block == ": keep-alive":
            continue
        assert block.startswith("data: ") and "\n" not in block, block
        found.append(block.removeprefix("data: "))
    done = found[-1] == "[DONE]"
    objects = [json.loads(one) for one in (found[:-1] if done else found)]
    assert done is not ("error" in objects[-1])
    return objects


@asynccontextmanager
async def running_front(
    folder: Path,
    scripts: Sequence[Script],
    drafters: Sequence[ScriptedDraft] = (),
    wait: bool = True,
    **settings: Any,
) -> AsyncIterator[Front]:
    """Starts everything and waits until the gateway is ready; stops it after."""
    async with AsyncExitStack() as stack:
        verifiers = [ScriptedVerify(script) for script in scripts]
        for verify in verifiers:
            await verify.start()
            stack.push_async_callback(verify.stop)
        drafts = []
        for drafter in drafters:
            drafts.append(await drafter.start())
            stack.push_async_callback(drafter.stop)
        flags = {
            "model": str(write_tiny_model(folder / "tiny")),
            "verify": [verify.address for verify in verifiers],
            "draft": drafts,
            **SETTINGS,
            **settings,
        }
        server = GatewayServer(GatewaySettings.load(None, flags))
        port = await server.start()
        stack.push_async_callback(server.stop, 0.2)
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=30)
        )
        channel = open_channel(f"127.0.0.1:{server.grpc_port}")
        stack.push_async_callback(channel.close, None)
        front = Front(server, verifiers, list(drafters), client, channel)
        if wait:
            await front.until(True)
            while drafters and not server.gateway.attendants.connected:
                await server.gateway.drafts.changed.wait(0.05)
        yield front
