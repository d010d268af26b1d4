"""A target that waits at a gate, or breaks, when a test says so; otherwise the real one."""

from __future__ import annotations

import threading
from dataclasses import replace

from torch import Tensor

from graft.common.model_cache import Progress
from graft.kernels.ops import KvCache, StepRows
from graft.models.decoder import Decoder
from graft.verify.loading import Loaded, load
from graft.verify.settings import VerifySettings


class Gate(Decoder):
    """A decoder that stops before a forward while its gate is closed, or raises when told to."""

    def __init__(self, inner: Decoder) -> None:
        super().__init__(inner.config, inner.weights, inner.ops)
        self.open = threading.Event()
        self.open.set()
        self.reached = threading.Event()
        self.broken = False

    def close(self) -> None:
        """Stops the next forward, which says so by `reached`."""
        self.reached.clear()
        self.open.clear()

    def forward(
        self, tokens: Tensor, rows: StepRows, kv: KvCache, output_rows: Tensor | None
    ) -> Tensor:
        self.reached.set()
        self.open.wait()
        if self.broken:
            raise RuntimeError("the device is gone")
        return super().forward(tokens, rows, kv, output_rows)


class Gated:
    """Loads a target behind a gate, after `begin` is set."""

    def __init__(self) -> None:
        self.gate: Gate | None = None
        self.begin = threading.Event()
        self.begin.set()

    def __call__(self, settings: VerifySettings, progress: Progress) -> Loaded:
        progress("loading weights", 0.4)
        self.begin.wait()
        loaded = load(settings, progress)
        self.gate = Gate(loaded.target.decoder)
        return replace(loaded, target=replace(loaded.target, decoder=self.gate))
