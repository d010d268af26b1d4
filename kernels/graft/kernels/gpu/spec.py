"""What a Triton kernel is compiled and launched with, and the checks that every launcher makes.

Knows Triton's conventions; knows no kernel. Kernels are built without fused multiply-add: a
contracted product has other bits than numpy's, and the outputs are compared bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class KernelSpec:
    """One compiled form of a kernel: what `make gpu-compile` builds and reports.

    name: the form's name in the table.
    kernel: the `triton.jit` function.
    arguments: Triton types of the arguments that are no constants, in order ("*fp32 i32 ...").
    constants: values of the `tl.constexpr` arguments, as the launcher passes them.
    num_warps: warps per program, as the launcher passes them.
    """

    name: str
    kernel: Any
    arguments: str
    constants: dict[str, Any] = field(default_factory=dict)
    num_warps: int = 4


def check_tensor(
    name: str, tensor: Tensor, dtype: torch.dtype | tuple[torch.dtype, ...], shape: tuple[int, ...]
) -> None:
    """Refuses a tensor that a kernel would misread; -1 in `shape` stands for any extent.

    Raises:
        ValueError: wrong dtype or shape, or not contiguous.
    """
    allowed = dtype if isinstance(dtype, tuple) else (dtype,)
    if tensor.dtype not in allowed:
        expected = " or ".join(str(one) for one in allowed)
        raise ValueError(f"{name} is {tensor.dtype}, expected {expected}")
    actual = tuple(tensor.shape)
    if len(actual) != len(shape) or any(
        want not in (-1, got) for want, got in zip(shape, actual, strict=True)
    ):
        raise ValueError(f"{name} has shape {list(actual)}, expected {list(shape)}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} is not contiguous")


def check_device(**tensors: Tensor | None) -> torch.device:
    """The one device that all given tensors live on.

    Raises:
        ValueError: they live on several.
    """
    devices = {name: tensor.device for name, tensor in tensors.items() if tensor is not None}
    found = set(devices.values())
    if len(found) != 1:
        places = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ValueError(f"expected all tensors on one device, got {places}")
    return found.pop()


def power_of_two(count: int) -> int:
    """The smallest power of two that is at least `count`, and at least 1."""
    return 1 << max(count - 1, 0).bit_length()
