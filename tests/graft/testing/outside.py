"""Client programs in environments of their own, against a server in the test's loop.

Their packages are those of an extra of pyproject.toml, or of npm; they are installed once into a
cache folder and never into the environment of the tests. Where they cannot be, the test is skipped.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

_ROOT = Path(__file__).resolve().parents[3]
_INSTALL_S = 900.0
_RUN_S = 600.0


async def python_of(extra: str) -> Path:
    """The Python of an environment with an extra's packages."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())
    packages = project["project"]["optional-dependencies"][extra]
    folder = _folder(extra, [sys.version, *packages])
    python = folder / "bin" / "python"
    if not (folder / ".ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        await _install([sys.executable, "-m", "venv", str(folder)], _ROOT)
        await _install([str(python), "-m", "pip", "install", "-q", *packages], _ROOT)
        (folder / ".ready").touch()
    return python


async def node_with(packages: Mapping[str, str], program: Path) -> list[str]:
    """The command that runs a Node program with packages of npm."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("Node is not installed")
    folder = _folder("node", [json.dumps(packages, sort_keys=True)])
    if not (folder / ".ready").exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        content = {"private": True, "type": "module", "dependencies": dict(packages)}
        (folder / "package.json").write_text(json.dumps(content))
        await _install([npm, "install", "--no-audit", "--no-fund", "--silent"], folder)
        (folder / ".ready").touch()
    placed = folder / program.name
    shutil.copyfile(program, placed)
    return [node, str(placed)]


async def run(command: Sequence[str], url: str, **variables: str) -> str:
    """Runs a client program against a server; its output, once it ended well."""
    environment = {**os.environ, "GRAFT_URL": url, "OPENAI_API_KEY": "none", **variables}
    environment.pop("PYTHONPATH", None)
    with tempfile.TemporaryDirectory() as folder:
        code, output = await _finish(command, Path(folder), environment, _RUN_S)
    assert code == 0, output[-8000:]
    return output


def _folder(name: str, what: Sequence[str]) -> Path:
    """A folder of the cache for exactly these packages."""
    digest = hashlib.sha256("\n".join(what).encode()).hexdigest()[:12]
    cache = Path(os.environ.get("GRAFT_CLIENTS") or Path.home() / ".cache" / "graft" / "clients")
    return cache / f"{name}-{digest}"


async def _install(command: Sequence[str], folder: Path) -> None:
    code, output = await _finish(command, folder, {**os.environ}, _INSTALL_S)
    if code:
        pytest.skip(f"{command[0]} could not install the client: {output[-300:]}")


async def _finish(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], limit_s: float
) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=dict(environment),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(limit_s):
            output, _ = await process.communicate()
    except TimeoutError:
        return 124, f"it ran longer than {limit_s:g} s"
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode or 0, output.decode(errors="replace")
