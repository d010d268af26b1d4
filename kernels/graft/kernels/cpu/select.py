"""Which CPU implementation serves: the native library where it was built, torch elsewhere."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from graft.common import log
from graft.common.errors import InvalidArgument, Unsupported
from graft.kernels.cpu.library import FOLDER, load
from graft.kernels.cpu.native_ops import NativeOps
from graft.kernels.cpu.torch_ops import TorchOps
from graft.kernels.ops import Ops


def select_cpu(threads: int = 1, prefer: str = "auto", folder: Path = FOLDER) -> Ops:
    """The ops of this CPU; `folder` holds the native libraries.

    Raises:
        InvalidArgument: `prefer` is none of auto, native, torch.
        Unsupported: "native" was asked for and no library was built for this CPU.
    """
    if prefer not in ("auto", "native", "torch"):
        raise InvalidArgument(
            f"kernels are {prefer!r}, expected auto, native or torch", field="kernels"
        )
    library = load(folder=folder) if prefer != "torch" else None
    if library is not None:
        isa, functions = library
        return NativeOps(functions, isa, threads)
    if prefer == "native":
        raise Unsupported(f"no native library for this processor, expected one in {folder}")
    if prefer == "auto":
        _say_fallback(folder)
    return TorchOps(threads)


@cache
def _say_fallback(folder: Path) -> None:
    log.get("kernels").warning("native kernels not found, torch serves", folder=str(folder))
