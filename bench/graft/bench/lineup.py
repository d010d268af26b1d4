"""Brings up the systems of a comparison, and says of each one left out why.

Knows which systems there are and how they start; measures nothing.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from graft.bench.ask import Client
from graft.bench.peers.catalog import Peer, default_folder, install, interpreter_of, peer_of
from graft.bench.services import Setup, running
from graft.bench.systems import Gateway, PeerProcess, PeerRun, System
from graft.common.errors import GraftError
from graft.common.model_cache import Progress
from graft.common.model_files import ModelFiles, resolve
from graft.models.load import read_config
from graft.models.storage import Precision, resolve_for, storage_of


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which systems to compare.

    installs: peers that get an environment of their own when they have none.
    eagle3: a checkpoint for vLLM's EAGLE-3, or empty.
    """

    model: str
    precisions: Sequence[Precision]
    peers: Sequence[str]
    threads: int
    installs: Sequence[str] = ()
    eagle3: str = ""
    config: Path | None = None
    peers_folder: Path | None = None


@dataclass(frozen=True, slots=True)
class Lineup:
    """Systems that are up, a client to tokenize with, and lines about those that are not."""

    systems: tuple[System, ...]
    client: Client
    skipped: tuple[str, ...]


@asynccontextmanager
async def lineup(wanted: Wanted, progress: Progress) -> AsyncIterator[Lineup]:
    """Starts all that can be started; ends it after.

    Raises:
        GraftError: none of our own services could be started.
    """
    async with AsyncExitStack() as stack:
        systems: list[System] = []
        skipped: list[str] = []
        clients: list[Client] = []
        for precision in wanted.precisions:
            name = f"graft {precision}"
            if trouble := _trouble(wanted.model, precision):
                skipped.append(f"{name}: skipped, {trouble}")
                continue
            progress(f"starting {name}", 0.0)
            setup = Setup(wanted.model, precision.value, wanted.threads, wanted.config)
            addresses = await stack.enter_async_context(running(setup))
            client = await stack.enter_async_context(Client(addresses.url))
            clients.append(client)
            systems += [
                Gateway(f"{name} plain", client, "off"),
                Gateway(f"{name} speculative", client, "auto"),
            ]
        if not clients:
            raise GraftError("; ".join(skipped) or "no precision to serve was named")
        for name in wanted.peers:
            peer = peer_of(name)
            folder = wanted.peers_folder or default_folder()
            python = interpreter_of(peer, folder)
            if python is None and name in wanted.installs:
                try:
                    python = await install(peer, folder, progress)
                except GraftError as error:
                    skipped.append(f"{name}: skipped, {error}")
                    continue
            if python is None:
                skipped.append(f"{name}: skipped, not installed (--install {name} installs it)")
                continue
            for title, mode in _modes(peer, wanted.eagle3).items():
                progress(f"starting {title}", 0.0)
                try:
                    system = await _start(title, mode, peer, python, wanted)
                except GraftError as error:
                    skipped.append(f"{title}: skipped, {error}")
                    continue
                stack.push_async_callback(system.close)
                systems.append(system)
        yield Lineup(tuple(systems), clients[0], tuple(skipped))


def _trouble(model: str, precision: Precision) -> str:
    """Why the model cannot be served so, or nothing."""
    try:
        files = resolve_for(model, precision)
        storage_of(files, read_config(files), precision)
    except GraftError as error:
        return str(error)
    return ""


def _modes(peer: Peer, eagle3: str) -> dict[str, str]:
    if peer.name == "vllm" and eagle3:
        return {**peer.modes, "vllm eagle3": f"eagle3={eagle3}"}
    return peer.modes


async def _start(title: str, mode: str, peer: Peer, python: Path, wanted: Wanted) -> PeerProcess:
    files: ModelFiles = resolve(wanted.model, weights=not peer.gguf)
    if peer.gguf and files.gguf is None:
        raise GraftError(f"model {files.name} has no GGUF file")
    model = files.gguf if peer.gguf and files.gguf is not None else files.folder
    return await PeerProcess.start(title, PeerRun(peer, python, mode, model, wanted.threads))
