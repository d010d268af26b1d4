"""Reads the map of a drafter's cut vocabulary. Knows tensors d2t and t2d, and no network."""

from __future__ import annotations

import torch
from torch import Tensor

from graft.common.errors import ModelNotFound
from graft.draft.checkpoints.tensors import Tensors


def draft_token_ids(tensors: Tensors, size: int | None, vocab_size: int) -> Tensor | None:
    """[size], int64: the target's id of each column; d2t holds offsets to the column's number.

    size: of the cut vocabulary; None is a head that is shared with the target.
    returns: None where columns are ids.

    Raises:
        ModelNotFound: ids outside the vocabulary, twice, or at odds with t2d.
    """
    if size is None or ("d2t" not in tensors and size == vocab_size):
        return None
    ids = tensors.raw("d2t", size).to(torch.int64) + torch.arange(size)
    name = tensors.name
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise ModelNotFound(f"draft checkpoint {name}: d2t leads outside 0..{vocab_size - 1}")
    if len(ids.unique()) != size:
        raise ModelNotFound(f"draft checkpoint {name}: d2t leads to one token twice")
    if "t2d" in tensors:
        kept = tensors.raw("t2d", vocab_size).to(torch.bool)
        if int(kept.sum()) != size or not bool(kept[ids].all()):
            raise ModelNotFound(f"draft checkpoint {name}: t2d and d2t name different tokens")
    return ids
