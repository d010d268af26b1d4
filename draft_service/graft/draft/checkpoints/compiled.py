"""A draft network whose step torch.compile has been asked to fuse.

It pays where torch runs the step. Native kernels are no torch operators, so there is nothing in
them to fuse; the loader says so and leaves the network as it is.
"""

from __future__ import annotations

from typing import Any

import torch

from graft.draft.nets.base import DraftNet


def compile_step(net: DraftNet) -> None:
    """In place: `forward` and `logits` are compiled at their first call, for any number of rows.

    Loops over sessions in attention stay Python between compiled pieces.
    """
    made: Any = net
    made.forward = torch.compile(net.forward, dynamic=True)
    made.logits = torch.compile(net.logits, dynamic=True)
