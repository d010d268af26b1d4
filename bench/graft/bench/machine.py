"""What a measurement ran on, and whether others were busy there. Measures no speed."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
from collections.abc import Mapping
from pathlib import Path

_CPU_INFO = Path("/proc/cpuinfo")
_BUSY_SHARE = 0.25


def cores() -> int:
    """The cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def facts(more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Lines for the head of a report; `more` follows them."""
    return {
        "date": datetime.datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z"),
        "machine": f"{_cpu()}, {cores()} cores, {platform.system()}",
        "load before": f"{os.getloadavg()[0]:.2f} (1 minute)",
        "graft": importlib.metadata.version("graft-serve"),
        **(more or {}),
    }


def busy_sentence() -> str | None:
    """A warning when other work has run on this machine in the last minute."""
    load = os.getloadavg()[0]
    if load < _BUSY_SHARE * cores():
        return None
    return f"the machine is busy (load {load:.1f} on {cores()} cores): times will be too long"


def _cpu() -> str:
    if _CPU_INFO.is_file():
        for line in _CPU_INFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
