"""Turns the folder of a checkpoint into a proposer that is ready to draft.

The one file that knows every kind; what a kind needs is in the file of its name.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path

from torch import Tensor

from graft.common.errors import InvalidArgument, Mismatch, Unsupported
from graft.common.model_files import resolve, weight_files
from graft.draft.checkpoints.borrowed import Borrowed, borrow
from graft.draft.checkpoints.detect import Kind, open_checkpoint
from graft.draft.checkpoints.eagle import load_eagle, read_token_map
from graft.draft.checkpoints.eagle3 import load_eagle3
from graft.draft.loading import checkpoint_folder, default_tier, hub_file
from graft.draft.nets.base import DraftNet
from graft.draft.nets.decoder import DecoderNet
from graft.draft.proposers.base import Proposer
from graft.draft.proposers.model import ModelOptions, ModelProposer
from graft.draft.proposers.standalone import StandaloneProposer
from graft.draft.settings import DraftSettings
from graft.kernels.ops import Ops, select
from graft.models.load import load_target


class Workshop:
    """What the proposers of one service share while they are made: device, settings, target."""

    def __init__(self, settings: DraftSettings) -> None:
        self._settings = settings

    def load(self, name: str, path: str) -> Proposer:
        """The proposer `name` from the checkpoint at `path`.

        Raises:
            InvalidArgument: a setting is missing, or the checkpoint is for another proposer.
            ModelNotFound, Unsupported, Mismatch: the checkpoint cannot be used.
        """
        kind = Kind(name)
        if kind is Kind.STANDALONE:
            return self._standalone(path)
        return self._eagle(kind, self._folder(path))

    @cached_property
    def ops(self) -> Ops:
        """Proposers take turns on one thread, so they share one pool of workers."""
        return select("cpu", self._settings.threads, self._settings.kernels)

    @cached_property
    def target(self) -> Borrowed:
        """The target that the settings name."""
        if not self._settings.model:
            raise InvalidArgument(
                "the drafter borrows its target's embedding: model names the target",
                field="model",
            )
        return borrow(self._settings.model)

    def _folder(self, path: str) -> Path:
        return checkpoint_folder(path, self._settings.draft_model_revision)

    def _standalone(self, path: str) -> Proposer:
        """Any model that could be a target, by any of its names."""
        if self._settings.draft_model_revision:
            path = str(self._folder(path))
        if weight_files(Path(path)):
            _check_kind(Kind.STANDALONE, open_checkpoint(Path(path)).kind, path)
        files = resolve(path, weights=True)
        model = load_target(files, self.ops)
        if self._settings.model and self.target.tokenizer_digest != model.tokenizer_digest:
            raise Mismatch(
                f"drafter {files.name} has another tokenizer than the target {self.target.name}"
            )
        detail = f"{files.name}, a decoder of {model.config.num_layers} layers"
        options = self._options(Kind.STANDALONE, "", detail, model.tokenizer_digest)
        return StandaloneProposer(Kind.STANDALONE.value, DecoderNet(model), self.ops, options)

    def _eagle(self, kind: Kind, folder: Path) -> Proposer:
        checkpoint = open_checkpoint(folder, allow_pickle=self._settings.allow_pickle)
        _check_kind(kind, checkpoint.kind, str(folder))
        target = self.target
        net: DraftNet
        if kind is Kind.EAGLE3:
            net = load_eagle3(checkpoint, target, self.ops)
        else:
            net = load_eagle(checkpoint, target, self.ops, self._token_map())
        detail = f"{folder.resolve().name} for {target.name}"
        options = self._options(kind, target.config.architecture, detail, target.tokenizer_digest)
        return ModelProposer(kind.value, net, self.ops, options)

    def _options(self, kind: Kind, architecture: str, detail: str, digest: str) -> ModelOptions:
        return ModelOptions(
            tier=default_tier(self._settings, kind.value, architecture),
            kv_tokens=self._settings.kv_tokens,
            detail=detail,
            tokenizer_digest=digest,
        )

    def _token_map(self) -> Tensor | None:
        path = self._settings.token_map
        if not path:
            return None
        if not self._settings.allow_pickle:
            raise Unsupported(
                f"token_map {path} is a pickle file:"
                " allow_pickle reads such files, without running code in them"
            )
        return read_token_map(hub_file(path), self.target.config.vocab_size)


def _check_kind(wanted: Kind, found: Kind, path: str) -> None:
    if wanted is not found:
        raise InvalidArgument(
            f"{path} is a checkpoint for proposer {found.value}, not {wanted.value}",
            field="proposers",
        )
