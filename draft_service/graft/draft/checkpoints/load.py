"""Turns the folder of a checkpoint into a proposer that is ready to draft.

The one file that knows every kind; what a kind needs is in the file of its name.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path

from torch import Tensor

from graft.common import log
from graft.common.errors import InvalidArgument, Mismatch, Unsupported
from graft.common.model_files import resolve, weight_files
from graft.common.tier import Tier
from graft.draft.checkpoints.borrowed import Borrowed, borrow
from graft.draft.checkpoints.compiled import compile_step
from graft.draft.checkpoints.detect import Checkpoint, Kind, open_checkpoint
from graft.draft.checkpoints.dflash import load_dflash
from graft.draft.checkpoints.eagle import load_eagle, read_token_map
from graft.draft.checkpoints.eagle3 import load_eagle3
from graft.draft.checkpoints.held import quantised
from graft.draft.checkpoints.lora import adapter_folder, read_adapters
from graft.draft.checkpoints.mtp import load_mtp, load_multi_layer
from graft.draft.loading import checkpoint_folder, default_tier, hub_file
from graft.draft.nets.base import DraftNet
from graft.draft.nets.decoder import DecoderNet
from graft.draft.nets.uno import UnoNet
from graft.draft.proposers.base import Proposer
from graft.draft.proposers.branching import BranchingProposer
from graft.draft.proposers.dflash import DflashProposer
from graft.draft.proposers.model import ModelOptions
from graft.draft.proposers.multi_layer import MultiLayerProposer
from graft.draft.proposers.standalone import StandaloneProposer
from graft.draft.proposers.uno import NoiseTokens, UnoProposer, uno_shape
from graft.draft.settings import DraftSettings
from graft.kernels.ops import Ops, select
from graft.models.load import load_target, read_config
from graft.models.storage import Precision, resolve_for, storage_of

_log = log.get("loading")

# Rows that a drafter reads at once; commits are looked at between.
_CHUNK_OF_A_HEAD, _CHUNK_OF_A_MODEL = 256, 64


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
        folder = adapter_folder(self._folder(path))
        checkpoint = open_checkpoint(folder, allow_pickle=self._settings.allow_pickle)
        _check_kind(kind, checkpoint.kind, str(folder))
        match kind:
            case Kind.MTP:
                return self._mtp(checkpoint)
            case Kind.DFLASH:
                return self._dflash(checkpoint)
            case Kind.UNO:
                return self._uno(checkpoint)
        return self._eagle(checkpoint)

    @cached_property
    def exact_ops(self) -> Ops:
        """Proposers take turns on one thread, so they share one pool of workers."""
        return select("cpu", self._settings.threads, self._settings.kernels)

    @cached_property
    def ops(self) -> Ops:
        """As the settings want a drafter's matrices held."""
        if self._settings.draft_model_quantization == "none":
            return self.exact_ops
        if not self.exact_ops.keeps_blocks:
            _log.warning(
                "setting is inactive",
                setting="draft_model_quantization",
                reason="torch kernels hold float32",
            )
        return quantised(self.exact_ops)

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
        stored = self._settings.draft_model_quantization == "stored"
        precision = Precision.AUTO if stored else Precision.FP32
        files = resolve_for(path, precision)
        storage = storage_of(files, read_config(files), precision)
        model = load_target(files, self.ops, storage=storage)
        if self._settings.model and self.target.tokenizer_digest != model.tokenizer_digest:
            raise Mismatch(
                f"drafter {files.name} has another tokenizer than the target {self.target.name}"
            )
        layers = model.config.num_layers
        detail = f"{files.name}, a decoder of {layers} layers, {model.precision}"
        name = Kind.STANDALONE.value
        tier = default_tier(self._settings, name, itself=stored and path == self._settings.model)
        options = self._options(tier, detail, model.tokenizer_digest, _CHUNK_OF_A_MODEL)
        return StandaloneProposer(name, self._stepped(DecoderNet(model)), self.ops, options)

    def _eagle(self, checkpoint: Checkpoint) -> Proposer:
        net: DraftNet
        if checkpoint.kind is Kind.EAGLE3:
            net = load_eagle3(checkpoint, self.target, self.ops)
        else:
            net = load_eagle(checkpoint, self.target, self.ops, self._token_map())
        options = self._options_of(checkpoint)
        return BranchingProposer(checkpoint.kind.value, self._stepped(net), self.ops, options)

    def _stepped(self, net: DraftNet) -> DraftNet:
        """The network with its step compiled, where that is wanted and can be."""
        if self._settings.torch_compile:
            if self.exact_ops.name == "torch":
                compile_step(net)
            else:
                _log.warning(
                    "setting is inactive", setting="torch_compile", reason="native kernels serve"
                )
        return net

    def _mtp(self, checkpoint: Checkpoint) -> Proposer:
        name, settings = checkpoint.kind.value, self._settings
        if not settings.enable_multi_layer_eagle:
            net = load_mtp(checkpoint, self.target, self.ops)
            options = self._options_of(checkpoint)
            return BranchingProposer(name, self._stepped(net), self.ops, options)
        if settings.eagle_topk not in (None, 1):
            raise InvalidArgument(
                f"eagle_topk {settings.eagle_topk} does not go with enable_multi_layer_eagle,"
                " which drafts chains: expected 1",
                field="eagle_topk",
            )
        steps = load_multi_layer(checkpoint, self.target, self.ops, settings.num_steps)
        count = steps.num_steps
        if settings.num_draft_tokens not in (None, count + 1):
            raise InvalidArgument(
                f"num_draft_tokens {settings.num_draft_tokens} does not go with {count} steps,"
                f" expected {count + 1}",
                field="num_draft_tokens",
            )
        options = self._options_of(checkpoint, Tier(name, count, 1, count + 1))
        return MultiLayerProposer(name, steps, self.ops, options)

    def _dflash(self, checkpoint: Checkpoint) -> Proposer:
        name, settings = checkpoint.kind.value, self._settings
        net = load_dflash(
            checkpoint,
            self.target,
            self.ops,
            block_size=settings.dflash_block_size or settings.num_draft_tokens or 0,
            pickle=settings.allow_pickle,
        )
        count, window = net.block.num_drafted, settings.draft_window_size
        if window is not None and window < net.block.size:
            raise InvalidArgument(
                f"draft_window_size {window} is below the block of {net.block.size}",
                field="draft_window_size",
            )
        options = self._options_of(checkpoint, Tier(name, count, 1, count + 1))
        return DflashProposer(name, net, self.ops, options, window or 0)

    def _uno(self, checkpoint: Checkpoint) -> Proposer:
        name, settings = checkpoint.kind.value, self._settings
        shape = uno_shape(settings.num_steps, settings.eagle_topk, settings.num_draft_tokens)
        target = self.target
        vocab, mask = target.config.vocab_size, settings.uno_mask_token_id
        if mask is None and settings.uno_noise == "mask":
            raise InvalidArgument(
                "uno_noise mask needs uno_mask_token_id", field="uno_mask_token_id"
            )
        if mask is not None and mask >= vocab:
            raise InvalidArgument(
                f"uno_mask_token_id {mask} is no id below {vocab}", field="uno_mask_token_id"
            )
        ops = self.exact_ops
        adapters = read_adapters(checkpoint.config, checkpoint.tensors, target.config, ops)
        model = load_target(resolve(settings.model, weights=True), ops)
        tokens = NoiseTokens(
            first=0 if mask is None else 1,
            stop=max(2, mask or vocab),
            seed=settings.uno_noise_seed,
            mask=mask if mask is not None and settings.uno_noise == "mask" else -1,
        )
        options = self._options_of(checkpoint, shape.tier(name))
        options = replace(options, chunk_rows=_CHUNK_OF_A_MODEL)
        return UnoProposer(name, UnoNet(model, adapters), ops, options, tokens)

    def _options_of(self, checkpoint: Checkpoint, tier: Tier | None = None) -> ModelOptions:
        """Options of a drafter that borrows of the target. tier: None is that of the field."""
        target, name = self.target, checkpoint.kind.value
        if tier is None:
            tier = default_tier(self._settings, name, target.config.architecture)
        detail = f"{checkpoint.folder.resolve().name} for {target.name}"
        return self._options(tier, detail, target.tokenizer_digest)

    def _options(
        self, tier: Tier, detail: str, digest: str, chunk_rows: int = _CHUNK_OF_A_HEAD
    ) -> ModelOptions:
        return ModelOptions(
            tier=tier,
            chunk_rows=chunk_rows,
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
