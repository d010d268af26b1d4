"""Says which proposer a checkpoint is for, from its config.json and the names of its tensors.

Architecture names alone do not tell: published EAGLE heads call themselves LlamaForCausalLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from graft.common.errors import ModelNotFound
from graft.common.model_files import read_json
from graft.draft.checkpoints.tensors import Tensors, open_tensors


class Kind(Enum):
    """Proposers that checkpoints are published for, by their names here."""

    STANDALONE = "standalone"
    EAGLE = "eagle"
    EAGLE3 = "eagle3"
    MTP = "mtp"
    DFLASH = "dflash"
    UNO = "uno"


@dataclass(frozen=True, slots=True, eq=False)
class Checkpoint:
    """A draft checkpoint, opened and recognised. config: config.json as it stands."""

    folder: Path
    kind: Kind
    config: Mapping[str, Any]
    tensors: Tensors


def open_checkpoint(folder: Path, *, allow_pickle: bool = False) -> Checkpoint:
    """Opens a folder and says what it holds.

    Raises:
        ModelNotFound: files are missing or damaged, or nothing that is known here.
        Unsupported: the weights are a pickle file, and those are not allowed.
    """
    if (folder / "adapter_config.json").is_file():
        config = read_json(folder / "adapter_config.json")
        adapter = folder / "adapter_model.safetensors"
        if not adapter.is_file():
            raise ModelNotFound(f"{folder} has no {adapter.name}")
        return Checkpoint(folder, Kind.UNO, config, open_tensors(folder))
    config = read_json(folder / "config.json")
    tensors = open_tensors(folder, allow_pickle=allow_pickle)
    kind = detect(config, set(tensors.shapes))
    if kind is None:
        raise ModelNotFound(
            f"{folder} is no drafter that is known here: expected a small decoder, or an EAGLE,"
            " EAGLE-3, MTP, DFlash or UNO checkpoint"
        )
    return Checkpoint(folder, kind, config, tensors)


def detect(config: Mapping[str, Any], names: set[str]) -> Kind | None:
    """The kind that config and tensor names speak for; None when they speak for none."""
    stated = str(config.get("speculators_model_type") or "").lower()
    if stated in ("eagle3", "eagle", "mtp", "dflash"):
        return Kind(stated)
    bare = {name.removeprefix("model.") for name in names}
    architecture = " ".join(config.get("architectures") or ())
    if "dflash_config" in config or "DFlash" in architecture:
        return Kind.DFLASH
    if _is_eagle3(bare):
        return Kind.EAGLE3
    if _is_mtp(architecture, bare):
        return Kind.MTP
    if "fc.weight" in bare:
        return Kind.EAGLE
    if "embed_tokens.weight" in bare and "norm.weight" in bare:
        return Kind.STANDALONE
    return None


def _is_eagle3(bare: set[str]) -> bool:
    marks = ("midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight")
    return "d2t" in bare or any(mark in bare for mark in marks)


def _is_mtp(architecture: str, bare: set[str]) -> bool:
    if "MTP" in architecture or "NextN" in architecture:
        return True
    parts = ("eh_proj.weight", "input_proj.weight")
    return any(name.startswith(("mtp.", "mtp_layers.")) or name.endswith(parts) for name in bare)
