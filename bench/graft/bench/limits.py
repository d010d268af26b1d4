"""What this machine can do at most: bytes it streams from memory, products it forms in caches.

Both are measured in the run that they are compared with. Several ways to read the same bytes take
part, ours among them, for a bound must not lie below what can be reached.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from graft.kernels.ops import Ops

_BYTES = 256 << 20
_SIDE = 512
_WIDTH = 1024


class Limits:
    """Keeps the best readings so far; torch's thread count is the caller's."""

    def __init__(self, ops: Ops, num_bytes: int = _BYTES) -> None:
        self._ops = ops
        self._buffer = torch.ones(num_bytes // 4 // _WIDTH, _WIDTH)
        self._matrix = ops.pack([self._buffer], [None])
        self._row = torch.ones(1, _WIDTH)
        self._square = torch.rand(_SIDE, _SIDE)
        self.stream_gb_s = 0.0
        self.fp32_gflop_s = 0.0

    def measure(self) -> None:
        """One reading of each: a buffer far larger than the caches, a product that fits them."""
        buffer, square = self._buffer.view(-1), self._square
        seconds = min(
            _seconds(lambda: torch.dot(buffer, buffer)),
            _seconds(buffer.max),
            _seconds(lambda: self._ops.linear(self._row, self._matrix)),
        )
        self.stream_gb_s = max(self.stream_gb_s, buffer.numel() * 4 / seconds / 1e9)
        seconds = min(_seconds(lambda: square @ square) for _ in range(3))
        self.fp32_gflop_s = max(self.fp32_gflop_s, 2 * _SIDE**3 / seconds / 1e9)


def _seconds(part: Callable[[], object]) -> float:
    start = time.perf_counter()
    part()
    return time.perf_counter() - start
