"""What a drafter borrows of its target: embedding, head, and the numbers it has to fit.

These are large and static, so they come from the target's own files and never over the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from graft.common.model_files import ModelFiles, read_json, resolve, token_ids, tokenizer_digest
from graft.kernels.ops import Linear, Ops
from graft.models.config import DecoderConfig
from graft.models.load import read_config
from graft.models.weights import EMBEDDING, HEAD, WeightSource, open_weights


@dataclass(frozen=True, slots=True, eq=False)
class Borrowed:
    """A target's files, opened. raw: config.json as it stands."""

    name: str
    folder: Path
    config: DecoderConfig
    raw: dict[str, Any]
    tokenizer_digest: str
    source: WeightSource

    @property
    def num_layers(self) -> int:
        """Layers of the target; its last hidden state has this number."""
        return self.config.num_layers

    def token_id(self, token: str) -> int | None:
        """The id of a token by its spelling; None where the tokenizer has no such token."""
        return token_ids(self.folder).get(token)

    def embedding(self) -> Tensor:
        """[vocab, hidden], float32."""
        return self.source.read(EMBEDDING)

    def head_weight(self) -> Tensor:
        """[vocab, hidden], float32."""
        return self.source.read(EMBEDDING if self.config.tied_embeddings else HEAD)

    def head(self, ops: Ops, tokens: Sequence[int] | Tensor | None = None) -> Linear:
        """The target's head, or its rows of `tokens` only, in that order."""
        weight = self.head_weight()
        if tokens is not None:
            weight = weight[tokens]
        return ops.pack([weight], [None])


def borrow(model: str) -> Borrowed:
    """Opens the target `model`, checking its tensors as for serving.

    Raises:
        ModelNotFound, Unsupported: as for a target that is to be served.
    """
    return borrow_files(resolve(model, weights=True))


def borrow_files(files: ModelFiles) -> Borrowed:
    """As `borrow`, from files that are known already."""
    config = read_config(files)
    return Borrowed(
        name=files.name,
        folder=files.folder,
        config=config,
        raw=read_json(files.folder / "config.json"),
        tokenizer_digest=tokenizer_digest(files.folder),
        source=open_weights(files, config),
    )
