"""Writes the projection of a drafter's checkpoint as the file that a verify service applies."""

from __future__ import annotations

from pathlib import Path

from graft.common.errors import Unsupported
from graft.common.projection import Projection, write_projection
from graft.draft.checkpoints.borrowed import borrow
from graft.draft.checkpoints.detect import Kind, open_checkpoint
from graft.draft.checkpoints.dflash import dflash_projection
from graft.draft.checkpoints.eagle3 import projection_of
from graft.draft.loading import checkpoint_folder


def write_fused(path: str, target: str, out: Path, *, allow_pickle: bool = False) -> Projection:
    """Reads the checkpoint at `path`, made for the model `target`; returns what it wrote to `out`.

    Raises:
        ModelNotFound, Mismatch: the checkpoint or its target cannot be read.
        Unsupported: such a checkpoint has no projection of hidden states of its own.
    """
    checkpoint = open_checkpoint(checkpoint_folder(path), allow_pickle=allow_pickle)
    projection = None
    if checkpoint.kind is Kind.EAGLE3:
        projection = projection_of(checkpoint, borrow(target))
    elif checkpoint.kind is Kind.DFLASH:
        projection = dflash_projection(checkpoint, borrow(target))
    if projection is None:
        raise Unsupported(
            f"{path} is an {checkpoint.kind.value} checkpoint without a projection that verify "
            "could apply; expected an eagle3 or dflash one with fc.weight"
        )
    write_projection(projection, out)
    return projection
