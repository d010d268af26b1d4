"""Which CPU implementation serves: the native library where it was built, torch elsewhere."""

from __future__ import annotations

from functools import cache

from graft.common import log
from graft.common.errors import InvalidArgument, Unsupported
from graft.kernels.cpu.torch_ops import TorchOps
from graft.kernels.ops import Ops


def select_cpu(threads: int = 1, prefer: str = "auto") -> Ops:
    """The ops of this CPU.

    Raises:
        InvalidArgument: `prefer` is none of auto, native, torch.
        Unsupported: "native" was asked for and no library was built for this CPU.
    """
    if prefer not in ("auto", "native", "torch"):
        raise InvalidArgument(
            f"kernels are {prefer!r}, expected auto, native or torch", field="kernels"
        )
    if prefer == "native":
        raise Unsupported("no native library was built, expected one beside graft.kernels.cpu")
    if prefer == "auto":
        _say_fallback()
    return TorchOps(threads)


@cache
def _say_fallback() -> None:
    log.get("kernels").warning("native kernels not found, torch serves")
