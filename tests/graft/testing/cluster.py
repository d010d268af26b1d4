"""A whole Graft cluster inside the test's own loop: real servers, real sockets, a tiny model.

Knows how the services are started; knows nothing of what a test asks them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from tenacity import AsyncRetrying, retry_if_result, stop_after_delay, wait_fixed

from graft.common.relay import Relay
from graft.draft.proposers.base import Proposer
from graft.draft.server import DraftServer
from graft.draft.settings import DraftSettings
from graft.gateway.server import GatewayServer
from graft.gateway.settings import GatewaySettings
from graft.verify.server import VerifyServer
from graft.verify.settings import VerifySettings

VERIFY: dict[str, Any] = {
    "kv_tokens": 8192,
    "threads": 1,
    "max_running": 8,
    "chunk_tokens": 32,
    "page_tokens": 16,
}
# A busy machine is no failure; what hangs is ended by the test's own timeout.
PATIENCE_S = 600


@dataclass(frozen=True, slots=True)
class Cluster:
    """The running services and a client of the gateway."""

    gateway: GatewayServer
    verifiers: list[VerifyServer]
    drafters: list[DraftServer]
    verify_addresses: list[str]
    draft_addresses: list[str]
    client: httpx.AsyncClient
    model: str
    relays: list[Relay]

    @property
    def url(self) -> str:
        """Base URL of the REST surface."""
        return str(self.client.base_url).rstrip("/")

    async def chat(self, text: str, **fields: Any) -> dict[str, Any]:
        """The body of one chat completion."""
        return await self._post("/v1/chat/completions", messages=[_user(text)], **fields)

    async def complete(self, prompt: str | list[int], **fields: Any) -> dict[str, Any]:
        """The body of one text completion."""
        return await self._post("/v1/completions", prompt=prompt, **fields)

    async def _post(self, path: str, **fields: Any) -> dict[str, Any]:
        response = await self.client.post(path, json={"model": self.model, **fields})
        assert response.status_code == 200, response.text
        body: dict[str, Any] = response.json()
        return body


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@asynccontextmanager
async def running_cluster(
    model: Path,
    *,
    proposers: Sequence[Proposer] | None = None,
    num_verify: int = 1,
    num_draft: int = 1,
    verify: dict[str, Any] | None = None,
    draft: dict[str, Any] | None = None,
    gateway: dict[str, Any] | None = None,
    relayed: bool = False,
) -> AsyncIterator[Cluster]:
    """Starts verify replicas, then drafters, then a gateway in front of them; stops them after.

    relayed: gateway and drafters reach each verify replica through a relay of its own.
    """
    async with AsyncExitStack() as stack:
        verifiers, verify_addresses, relays = [], [], []
        for _ in range(num_verify):
            flags = {"model": str(model), "port": 0, **VERIFY, **(verify or {})}
            server = VerifyServer(VerifySettings.load(None, flags))
            verify_addresses.append(f"127.0.0.1:{await server.start()}")
            stack.push_async_callback(server.stop, 0.5)
            verifiers.append(server)
            if relayed:
                relays.append(Relay(verify_addresses[-1]))
                verify_addresses[-1] = await relays[-1].start()
                stack.push_async_callback(relays[-1].stop)
        drafters, draft_addresses = [], []
        for _ in range(num_draft):
            drafter = DraftServer(
                DraftSettings.load(None, {"port": 0, **(draft or {})}), proposers=proposers
            )
            draft_addresses.append(f"127.0.0.1:{await drafter.start()}")
            stack.push_async_callback(drafter.stop, 0.5)
            drafters.append(drafter)
        front = GatewayServer(
            GatewaySettings.load(
                None,
                {
                    "model": str(model),
                    "port": 0,
                    "grpc_port": 0,
                    "verify": verify_addresses,
                    "draft": draft_addresses,
                    "tree_deadline_ms": 2000,
                    "tiers": "fixed",
                    **(gateway or {}),
                },
            )
        )
        port = await front.start()
        stack.push_async_callback(front.stop, 0.5)
        client = await stack.enter_async_context(
            httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE_S)
        )
        await _until_ready(client)
        if num_verify > 1:
            await _until_up(client, num_verify)
        listed = (await client.get("/v1/models")).json()
        yield Cluster(
            front,
            verifiers,
            drafters,
            verify_addresses,
            draft_addresses,
            client,
            listed["data"][0]["id"],
            relays,
        )


async def _until_up(client: httpx.AsyncClient, count: int) -> None:
    """Ready is said at the first replica; who loses one wants the others to be there."""
    async with asyncio.timeout(30):
        while True:
            told = (await client.get("/server_info")).json()["verify"]
            if sum(replica["state"] == "up" for replica in told) >= count:
                return
            await asyncio.sleep(0.02)


async def _until_ready(client: httpx.AsyncClient) -> None:
    """Asks /ready until it says yes."""
    asking = AsyncRetrying(
        wait=wait_fixed(0.02), stop=stop_after_delay(30), retry=retry_if_result(_not_ready)
    )
    await asking(client.get, "/ready")


def _not_ready(response: httpx.Response) -> bool:
    return response.status_code != 200
