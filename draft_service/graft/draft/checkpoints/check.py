"""Says which proposer a checkpoint is for and whether it fits a target, by loading it for real."""

from __future__ import annotations

from pathlib import Path

from graft.draft.checkpoints.detect import Kind, open_checkpoint
from graft.draft.checkpoints.load import Workshop
from graft.draft.checkpoints.lora import adapter_folder
from graft.draft.checkpoints.mtp import has_own_layers
from graft.draft.loading import checkpoint_folder
from graft.draft.proposers.base import ProposerInfo
from graft.draft.settings import DraftSettings


def kind_of(path: str, *, allow_pickle: bool = False) -> Kind:
    """What the checkpoint at `path` is for; a model that is no folder can only be a decoder.

    Raises:
        ModelNotFound: there is no such checkpoint, or nothing that is known here.
        Unsupported: it is a pickle file, and those are not allowed.
    """
    if not Path(path).expanduser().is_dir() and path.count("/") != 1:
        return Kind.STANDALONE
    folder = adapter_folder(checkpoint_folder(path))
    return open_checkpoint(folder, allow_pickle=allow_pickle).kind


def fit(path: str, target: str, *, allow_pickle: bool = False) -> ProposerInfo:
    """What a draft service would tell of the checkpoint beside `target`.

    Raises:
        ModelNotFound, Mismatch, Unsupported, InvalidArgument: what is missing or does not fit.
    """
    kind = kind_of(path, allow_pickle=allow_pickle)
    flags = {"proposers": [kind.value], "model": target, "allow_pickle": allow_pickle}
    flags |= dict.fromkeys(switches(path, allow_pickle=allow_pickle), True)
    return Workshop(DraftSettings.load(None, flags)).load(kind.value, path).describe()


def switches(path: str, *, allow_pickle: bool = False) -> list[str]:
    """Names of the settings that have to be on for the checkpoint to run.

    Raises:
        ModelNotFound, Unsupported: as `kind_of`.
    """
    if kind_of(path, allow_pickle=allow_pickle) is not Kind.MTP:
        return []
    checkpoint = open_checkpoint(checkpoint_folder(path), allow_pickle=allow_pickle)
    return ["enable_multi_layer_eagle"] if has_own_layers(checkpoint) else []
