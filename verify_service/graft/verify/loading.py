"""Brings a target up: files, memory plan, weights, KV pool. Runs on a thread of its own."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from graft.common import log
from graft.common.errors import InvalidArgument, Mismatch
from graft.common.model_cache import Progress
from graft.common.projection import Projection, read_projection
from graft.kernels.ops import KvCache, Ops, select
from graft.models.config import DecoderConfig
from graft.models.load import (
    MemoryEstimate,
    Target,
    estimate_memory,
    load_target,
    read_config,
)
from graft.models.storage import Precision, resolve_for, storage_of
from graft.verify.memory import Demand, MemoryPlan, ModelSizes, available_bytes, plan_memory
from graft.verify.pages import PagePool
from graft.verify.settings import VerifySettings

_log = log.get("loading")


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """A target ready to run, and the KV pool beside it.

    folder: where its tokenizer lies; without one no text is held to a grammar.
    """

    target: Target
    ops: Ops
    kv: KvCache
    plan: MemoryPlan
    projections: tuple[Projection, ...] = ()
    folder: Path | None = None

    def new_pool(self) -> PagePool:
        """The bookkeeping of an empty KV pool."""
        page_tokens = self.kv.page_tokens
        return PagePool(self.plan.kv_tokens // page_tokens, page_tokens)


def load(settings: VerifySettings, progress: Progress) -> Loaded:
    """Resolves, plans, loads; nothing large is allocated before the plan holds.

    Raises:
        InvalidArgument: a limit contradicts the model, or the memory does not suffice.
        Mismatch: the projection in fused_features was made for another target.
        ModelNotFound, Unsupported: as `resolve_for`, `storage_of`, `select` and `load_target`.
    """
    ops = select(settings.device, settings.threads, settings.kernels)
    precision = Precision(settings.precision)
    files = resolve_for(settings.model, precision, progress)
    config = read_config(files)
    storage = storage_of(files, config, precision)
    context = settings.context_length or config.context_length
    if context > config.context_length:
        raise InvalidArgument(
            f"context_length is {context}, model {files.name} has {config.context_length}",
            field="context_length",
        )
    budget = available_bytes(settings.memory_gb)
    estimate = estimate_memory(config, storage, ops, context)
    plan = plan_memory(_sizes(config, estimate, context), _demand(settings), budget)
    _log.info(
        "memory planned", model=files.name, precision=storage.summary, kv_tokens=plan.kv_tokens
    )
    for line in plan.lines():
        _log.info("memory share", **line)
    if storage.unpacked:
        _log.warning("some blocks unpacked", types=storage.unpacked, held_as="fp32")
    if plan.kv_tokens < context:
        _log.warning(
            "context shortened", asked=context, served=plan.kv_tokens, reason="the KV budget"
        )
        context = plan.kv_tokens
    target = load_target(files, ops, progress, context, storage)
    kv = _kv_cache(config, plan, settings.page_tokens, ops)
    return Loaded(target, ops, kv, plan, _projections(settings, config), files.folder)


def _projections(settings: VerifySettings, config: DecoderConfig) -> tuple[Projection, ...]:
    if settings.fused_features is None:
        return ()
    projection = read_projection(settings.fused_features)
    highest = max(projection.layers)
    if projection.hidden_size != config.hidden_size or highest > config.num_layers:
        raise Mismatch(
            f"{settings.fused_features} takes states of {projection.hidden_size} values up to "
            f"number {highest}, the target has {config.hidden_size} and {config.num_layers}",
            field="fused_features",
        )
    return (projection,)


def _kv_cache(config: DecoderConfig, plan: MemoryPlan, page_tokens: int, ops: Ops) -> KvCache:
    shape = (config.num_layers, plan.kv_tokens, config.num_kv_heads, config.head_dim)
    return KvCache(
        keys=torch.zeros(shape, device=ops.device),
        values=torch.zeros(shape, device=ops.device),
        page_tokens=page_tokens,
    )


def _sizes(config: DecoderConfig, estimate: MemoryEstimate, context: int) -> ModelSizes:
    return ModelSizes(
        weight_bytes=estimate.weight_bytes,
        kv_bytes_per_token=estimate.kv_bytes_per_token,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        widest=max(2 * config.intermediate_size, config.query_width + 2 * config.kv_width),
        context_length=context,
    )


def _demand(settings: VerifySettings) -> Demand:
    return Demand(
        kv_tokens=settings.kv_tokens,
        page_tokens=settings.page_tokens,
        max_step_rows=settings.max_step_rows,
        max_nodes=settings.max_nodes,
        max_trees=settings.max_trees,
        max_running=settings.max_running,
        feature_bytes=settings.feature_memory_mb << 20,
    )
