"""`graft doctor`: what this machine has, what is missing, and what to do about it. Changes nothing.

A failed check means `graft up` cannot work; a warning means that something is slower or absent.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from graft.cli.drafters import served, startable
from graft.cli.health import trouble_at
from graft.cli.ports import check_free
from graft.cli.threads import cores
from graft.common.errors import GraftError

_PACKAGES = {
    "grpcio": "",
    "protobuf": "",
    "numpy": "",
    "uvloop": "",
    "fastapi": "gateway",
    "tokenizers": "gateway",
    "torch": "worker",
    "safetensors": "worker",
    "transformers": "worker",
    "xgrammar": "worker",
}
_PORTS = {8000: "gateway", 8001: "gateway gRPC", 7001: "verify", 7002: "draft"}
_DRAFT = "127.0.0.1:7002"
_NEEDED_BYTES = 2 << 30


class Level(Enum):
    """How a finding is meant."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    what: str
    detail: str
    level: Level = Level.OK


def command(_name: str) -> typer.Typer:
    """The command; exit code 1 when a check failed."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

    @app.command(help="Say what this machine has, what is missing, and what to do about it.")
    def doctor(
        draft: Annotated[
            str, typer.Option(help="host:port of the draft service whose proposers are listed.")
        ] = _DRAFT,
    ) -> None:
        from rich.console import Console
        from rich.text import Text

        console = Console(highlight=False, soft_wrap=True)
        styles = {Level.OK: "green", Level.WARNING: "yellow", Level.FAILED: "red"}
        failed = False
        for finding in examine(draft):
            failed = failed or finding.level is Level.FAILED
            line = Text(f"{finding.level.value:8}", style=styles[finding.level])
            line.append(f"{finding.what:12}{finding.detail}", style="default")
            console.print(line)
        if failed:
            raise typer.Exit(1)

    return app


def examine(draft: str = _DRAFT) -> Iterator[Finding]:
    """All findings, quick ones first. draft: address of a draft service."""
    checks: list[Callable[[], Iterator[Finding]]] = [
        _python,
        _packages,
        _wire,
        _machine,
        _compiler,
        _kernels,
        _gpu,
        _model,
        partial(_drafters, draft),
        _ports,
    ]
    for check in checks:
        try:
            yield from check()
        except GraftError as error:
            yield Finding(_name(check), str(error), Level.FAILED)


def _name(check: Callable[[], Iterator[Finding]]) -> str:
    inner = check.func if isinstance(check, partial) else check
    return str(getattr(inner, "__name__", "check")).strip("_")


def _python() -> Iterator[Finding]:
    graft = importlib.metadata.version("graft-serve")
    yield Finding("graft", f"{graft} in {Path(sys.prefix)}")
    good = sys.version_info >= (3, 11)
    detail = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    yield Finding("python", detail, Level.OK if good else Level.FAILED)


def _packages() -> Iterator[Finding]:
    found, missing = [], []
    for package, extra in _PACKAGES.items():
        try:
            found.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            missing.append((package, extra))
    yield Finding("packages", ", ".join(found))
    for package, extra in missing:
        wanted = f"graft-serve[{extra}]" if extra else "graft-serve"
        detail = f"{package} is missing: pip install '{wanted}'"
        yield Finding("packages", detail, Level.WARNING if extra else Level.FAILED)


def _wire() -> Iterator[Finding]:
    from google.protobuf.internal import api_implementation

    kind = api_implementation.Type()
    if kind == "upb":
        yield Finding("protobuf", "upb, the fast implementation")
    else:
        yield Finding("protobuf", f"{kind} is slow, expected upb", Level.WARNING)


def _machine() -> Iterator[Finding]:
    import psutil

    variables = [name for name in ("OMP_NUM_THREADS", "OMP_WAIT_POLICY") if name in os.environ]
    said = "".join(f", {name}={os.environ[name]}" for name in variables)
    count = cores()
    yield Finding(
        "cores", f"{count} for verify, shared with draft and gateway (1 thread each){said}"
    )
    free = psutil.virtual_memory().available
    level = Level.OK if free >= _NEEDED_BYTES else Level.WARNING
    yield Finding("memory", f"{free / 2**30:.1f} GiB available, 2 GiB for the default model", level)


def _compiler() -> Iterator[Finding]:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        detail = "no C++ compiler: the native kernels cannot be built, torch serves (slower)"
        yield Finding("compiler", detail, Level.WARNING)
        return
    said = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False)
    yield Finding("compiler", (said.stdout.splitlines() or [compiler])[0])


def _kernels() -> Iterator[Finding]:
    try:
        select = importlib.import_module("graft.kernels.cpu.select")
    except ModuleNotFoundError as error:
        yield Finding("kernels", f"{error.name} is missing", Level.WARNING)
        return
    try:
        ops = select.select_cpu(threads=1, prefer="native")
    except GraftError as error:
        yield Finding("kernels", f"torch serves, native does not: {error}", Level.WARNING)
        return
    yield Finding("kernels", f"native, {getattr(ops, 'isa', 'unknown instruction set')}")


def _gpu() -> Iterator[Finding]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield Finding("gpu", "none; the CPU serves")
        return
    query = ["--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    said = subprocess.run([tool, *query], capture_output=True, text=True, check=False)
    for line in said.stdout.splitlines():
        yield Finding("gpu", line)


def _model() -> Iterator[Finding]:
    from graft.cli.models import is_here
    from graft.common.model_files import EMBEDDED, default_cache, resolve

    folder = default_cache()
    if is_here(EMBEDDED):
        files = resolve(EMBEDDED, weights=True)
        yield Finding("model", f"{files.name} in {files.folder}")
        return
    resolve(EMBEDDED, weights=False)
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(existing).free
    level = Level.OK if free >= _NEEDED_BYTES else Level.WARNING
    detail = f"{EMBEDDED} will be converted on first use into {folder}"
    yield Finding("model", f"{detail}, {free / 2**30:.0f} GiB free", level)


def _drafters(address: str) -> Iterator[Finding]:
    """Each proposer that is served, or else each that could be started."""
    from graft.common.model_files import EMBEDDED

    lines = served(address)
    try:
        lines = lines or list(startable(EMBEDDED))
    except ModuleNotFoundError as error:
        yield Finding("drafters", f"{error.name} is missing", Level.WARNING)
        return
    for line in lines:
        yield Finding("drafter", line)


def _ports() -> Iterator[Finding]:
    for port, service in _PORTS.items():
        try:
            check_free("127.0.0.1", port, "port")
        except GraftError:
            address = f"127.0.0.1:{port}"
            if port == 8000:
                address = f"http://{address}"
            trouble = trouble_at(address, timeout_s=1.0)
            if trouble is None:
                yield Finding("ports", f"{port}: {service} is serving")
            else:
                detail = f"{port}, meant for {service}, is in use by something else ({trouble})"
                yield Finding("ports", detail, Level.WARNING)
        else:
            yield Finding("ports", f"{port} is free for {service}")
