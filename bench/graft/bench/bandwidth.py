"""How fast this machine streams memory: the bound of a forward pass over few rows."""

from __future__ import annotations

import time

import torch

_BYTES = 256 << 20


class Stream:
    """Reads a buffer far larger than the caches, with as many threads as torch is set to."""

    def __init__(self, num_bytes: int = _BYTES) -> None:
        self._buffer = torch.ones(num_bytes // 4)
        self.best_gb_s = 0.0

    def measure(self) -> float:
        """GB/s of one reading, the faster of two kinds; `best_gb_s` keeps the best so far."""
        buffer = self._buffer
        seconds = []
        for read in (lambda: torch.dot(buffer, buffer), buffer.max):
            start = time.perf_counter()
            read()
            seconds.append(time.perf_counter() - start)
        found: float = buffer.numel() * 4 / min(seconds) / 1e9
        self.best_gb_s = max(self.best_gb_s, found)
        return found
