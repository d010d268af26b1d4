"""How the processes of one machine share its cores. Knows cores; knows no service's work.

Threads that spin while they wait take the core from the process they wait for: with three
processes on two cores a contended step then takes ten times as long. So every pool is told its
size and told to sleep.
"""

from __future__ import annotations

import os

_POOLS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")
_SLEEP = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "0",
    "KMP_BLOCKTIME": "0",
    "OMP_DYNAMIC": "FALSE",
    "TOKENIZERS_PARALLELISM": "false",
}


def cores() -> int:
    """The cores this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def pool_variables(threads: int) -> dict[str, str]:
    """The variables that give a process `threads` threads that sleep while they wait."""
    return {**{name: str(threads) for name in _POOLS}, **_SLEEP}
