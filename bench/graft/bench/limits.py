"""What this machine can do at most: bytes it streams from memory, products it forms in caches.

Both are measured, by torch's own kernels, in the run that they are compared with.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_BYTES = 256 << 20
_SIDE = 512


class Limits:
    """Keeps the best readings so far; torch's thread count is the caller's."""

    def __init__(self, num_bytes: int = _BYTES) -> None:
        self._buffer = torch.ones(num_bytes // 4)
        self._square = torch.rand(_SIDE, _SIDE)
        self.stream_gb_s = 0.0
        self.fp32_gflop_s = 0.0

    def measure(self) -> None:
        """One reading of each: a buffer far larger than the caches, a product that fits them."""
        buffer, square = self._buffer, self._square
        seconds = min(_seconds(lambda: torch.dot(buffer, buffer)), _seconds(buffer.max))
        self.stream_gb_s = max(self.stream_gb_s, buffer.numel() * 4 / seconds / 1e9)
        seconds = min(_seconds(lambda: square @ square) for _ in range(3))
        self.fp32_gflop_s = max(self.fp32_gflop_s, 2 * _SIDE**3 / seconds / 1e9)


def _seconds(part: Callable[[], object]) -> float:
    start = time.perf_counter()
    part()
    return time.perf_counter() - start
