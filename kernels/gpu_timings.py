"""Times the Triton kernels at one size, beside torch-eager versions and FlashInfer.

Knows CUDA events; compares no values. The last notes set the kernels of a verify step against the
matrix products of an 8B target's forward over the same rows, timed on the same device.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_inputs import (
    Size,
    coins,
    likely_choices,
    padded_trees,
    placed,
    plain_laws,
    ragged_trees,
    random_parents,
)

WARM = 3
REPEATS = 15

Call = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Timing:
    """Median milliseconds of one operation; None where there is no such version.

    bandwidth: GB/s that the Triton kernel reached over the bytes it has to move.
    """

    name: str
    triton: float
    bandwidth: float
    eager: float | None
    flashinfer: float | None


@dataclass(frozen=True, slots=True, eq=False)
class Timed:
    """An operation in its versions, and the bytes that it has to move."""

    name: str
    num_bytes: int
    kernel: Call
    eager: Call | None = None
    flashinfer: Call | None = None


def timings(
    rng: np.random.Generator, device: torch.device, size: Size
) -> tuple[list[Timing], list[str]]:
    """Times of all operations at `size`, and notes for people."""
    notes = []
    if _flashinfer("sampling") is None:
        notes.append("FlashInfer is not installed here, so its column is empty.")
    done = []
    for group in (_choices, _walks, _coin_rules):
        for one in group(rng, device, size):
            triton = median_ms(one.kernel, device)
            done.append(
                Timing(
                    one.name,
                    triton,
                    one.num_bytes / max(triton, 1e-9) / 1e6,
                    None if one.eager is None else median_ms(one.eager, device),
                    None if one.flashinfer is None else median_ms(one.flashinfer, device),
                )
            )
        if device.type == "cuda":
            torch.cuda.empty_cache()
    step = sum(one.triton for one in done if one.name in ("choose drawn", "accept", "keep"))
    forward = target_forward_ms(device, size)
    notes.append(
        f"Choice, walk and keep of {size.sessions} sessions x {size.nodes} nodes x "
        f"V = {size.vocab}: {step:.2f} ms, {100 * step / forward:.2f} % of the {forward:.1f} ms "
        "that the matrix products of an 8B target take for those rows."
    )
    return done, notes


def median_ms(call: Call, device: torch.device) -> float:
    """Median milliseconds of a call on the device; 0 where there are no CUDA events."""
    if device.type != "cuda":
        call()
        return 0.0
    for _ in range(WARM):
        call()
    times = []
    for _ in range(REPEATS):
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        call()
        after.record()
        after.synchronize()
        times.append(before.elapsed_time(after))
    return float(statistics.median(times))


def target_forward_ms(device: torch.device, size: Size) -> float:
    """Matrix products of one forward of an 8B model (32 layers, hidden 4096) over `size.rows`."""
    if device.type != "cuda":
        return 1.0
    hidden, inner, key_value = 4096, 14336, 1024
    shapes = [
        (hidden, hidden + 2 * key_value), (hidden, hidden), (hidden, 2 * inner), (inner, hidden),
    ]  # fmt: skip
    layer = sum(_matmul_ms(device, size.rows, *shape) for shape in shapes)
    return 32 * layer + _matmul_ms(device, size.rows, hidden, size.vocab)


def _matmul_ms(device: torch.device, rows: int, inner: int, outer: int) -> float:
    x = torch.randn(rows, inner, device=device, dtype=torch.bfloat16)
    weight = torch.randn(inner, outer, device=device, dtype=torch.bfloat16)
    return median_ms(lambda: x @ weight, device)


def _flashinfer(module: str) -> Any:
    try:
        return import_module(f"flashinfer.{module}")
    except ImportError:
        return None


def _choices(rng: np.random.Generator, device: torch.device, size: Size) -> list[Timed]:
    from graft.kernels.gpu import choose as gpu

    logits = torch.randn(size.rows, size.vocab, device=device) * 2.5
    logits[:, : min(50, size.vocab)] += 8
    num_bytes = logits.numel() * 4
    drawn = placed(plain_laws(size.rows, 1.0), device)
    greedy = placed(plain_laws(size.rows, 0.0), device)
    top_k = placed(plain_laws(size.rows, 1.0, top_k=50), device)
    both = placed(plain_laws(size.rows, 0.8, top_k=50, top_p=0.9), device)
    library = _flashinfer("sampling")

    def eager_drawn() -> Tensor:
        return (logits - torch.empty_like(logits).exponential_().log()).argmax(-1)

    def eager_filtered() -> Tensor:
        z = logits / 0.8
        kept = torch.where(z < z.topk(50).values[:, -1:], -torch.inf, z)
        ordered, index = torch.softmax(kept, -1).sort(-1, descending=True)
        ordered[ordered.cumsum(-1) - ordered >= 0.9] = 0
        return index.gather(-1, torch.multinomial(ordered, 1))

    return [
        Timed("choose greedy", num_bytes, lambda: gpu.choose(logits, greedy),
              lambda: logits.argmax(-1)),
        Timed("choose drawn", num_bytes, lambda: gpu.choose(logits, drawn), eager_drawn,
              library and (lambda: library.sampling_from_logits(logits))),
        Timed("choose top_k 50", num_bytes, lambda: gpu.choose(logits, top_k), None,
              library and (lambda: library.top_k_top_p_sampling_from_logits(logits, 50, 1.0))),
        Timed("choose top_k 50 top_p 0.9", num_bytes, lambda: gpu.choose(logits, both),
              eager_filtered,
              library and (lambda: library.top_k_top_p_sampling_from_logits(
                  logits / 0.8, 50, 0.9))),
        Timed("target_probs", 2 * num_bytes, lambda: gpu.target_probs(logits, drawn),
              lambda: torch.softmax(logits, -1)),
    ]  # fmt: skip


def _walks(rng: np.random.Generator, device: torch.device, size: Size) -> list[Timed]:
    from graft.kernels.gpu import accept, build_tree, keep, masks
    from graft.kernels.ops import KvCache
    from graft.kernels.trees import MaskMode

    trees = ragged_trees(rng, size)
    chosen = likely_choices(rng, trees).to(device)
    trees = placed(trees, device)
    parents = torch.tensor([random_parents(rng, size.nodes) for _ in range(size.sessions)])
    parents = parents.to(device)
    drafts, bonus = parents[:, 1:].contiguous(), parents[:, 0].contiguous()
    lengths = torch.full((size.sessions,), 1000, device=device)
    entries = size.nodes * (1000 + size.nodes) * size.sessions
    num_bytes = -(-size.nodes * (1000 + size.nodes) // 8) * size.sessions
    visible = build_tree.visibility(parents)
    library = _flashinfer("quantization")
    flat = masks.write_mask(visible, lengths, MaskMode.FULL_MASK, entries)
    starts = torch.arange(size.sessions + 1, dtype=torch.int32, device=device)
    starts *= entries // size.sessions
    cache = torch.randn(2, 8, 2 * trees.tokens.numel(), 8, 128, device=device)
    kv = KvCache(cache[0], cache[1], 16)
    accepted, path = accept.accept(trees, chosen, width=9)
    slots = torch.arange(trees.tokens.numel(), dtype=torch.int32, device=device)
    moves = keep.keep_moves(trees.ptr, accepted, path, slots)
    real = moves[0] >= 0
    source, target = moves[0][real].long(), moves[1][real].long()

    def eager_links() -> Tensor:
        node = torch.arange(size.nodes, device=device)
        seen = node.expand_as(parents)[..., None] == node
        ancestor = parents
        while bool((ancestor >= 0).any()):
            seen = seen | (ancestor[..., None] == node)
            ancestor = torch.where(ancestor > 0, parents.gather(1, ancestor.clamp(min=0)), -1)
        return seen

    def move() -> None:
        keep.keep(kv, *keep.keep_moves(trees.ptr, accepted, path, slots))

    def eager_keep() -> None:
        kv.keys[:, target] = kv.keys[:, source]
        kv.values[:, target] = kv.values[:, source]

    return [
        Timed("accept", 16 * trees.tokens.numel(), lambda: accept.accept(trees, chosen, width=9)),
        Timed("build_tree QLEN_ONLY", parents.numel() * (56 + size.nodes),
              lambda: build_tree.build_tree(bonus, drafts, parents, lengths, MaskMode.QLEN_ONLY),
              eager_links),
        Timed("write_mask FULL_MASK", entries,
              lambda: masks.write_mask(visible, lengths, MaskMode.FULL_MASK, entries)),
        Timed("pack_flashinfer", num_bytes,
              lambda: masks.pack_flashinfer(visible, lengths, num_bytes), None,
              library and (lambda: library.segment_packbits(flat, starts, bitorder="little"))),
        Timed("keep", 2 * len(source) * 8 * 2 * 4096,
              move,
              eager_keep),
    ]  # fmt: skip


def _coin_rules(rng: np.random.Generator, device: torch.device, size: Size) -> list[Timed]:
    from graft.kernels.gpu import sample

    trees = placed(padded_trees(rng, size), device)
    steps = min(7, size.nodes - 1)
    logits = torch.randn(size.sessions, size.nodes, size.vocab, device=device) * 4
    probs = torch.softmax(logits, -1)
    drawn = (
        coins(rng, size.sessions, size.nodes).to(device),
        coins(rng, size.sessions).to(device),
    )
    target = probs[:, : steps + 1].contiguous()
    draft = torch.softmax(logits[:, :steps] * 0.9, -1).contiguous()
    drafts = draft.argmax(-1)
    counts = torch.full((size.sessions,), steps, device=device)
    chain = (drafts, counts, (drawn[0][:, :steps].contiguous(), drawn[1]), target, draft)
    row_bytes = size.sessions * size.vocab * 4
    library = _flashinfer("sampling")

    def eager_chain() -> Tensor:
        p = target[:, :steps].gather(2, drafts[..., None])[..., 0]
        q = draft.gather(2, drafts[..., None])[..., 0]
        taken = (chain[2][0] * q < p).cumprod(1).sum(1)
        rows = torch.arange(size.sessions, device=device)
        padded = torch.nn.functional.pad(draft, (0, 0, 0, 1))
        rest = (target[rows, taken] - padded[rows, taken]).clamp(min=0)
        return torch.multinomial(rest, 1)

    return [
        Timed("tree_speculative_sampling_target_only", 2 * row_bytes,
              lambda: sample.tree_speculative_sampling_target_only(
                  trees, drawn, probs, (1.0, 1.0), 9)),
        Timed("chain_speculative_sampling", 4 * row_bytes,
              lambda: sample.chain_speculative_sampling(*chain), eager_chain,
              library and (lambda: library.chain_speculative_sampling(
                  draft, drafts.int(), target))),
        Timed("block_speculative_sampling", 2 * (steps + 1) * row_bytes,
              lambda: sample.block_speculative_sampling(*chain)),
    ]  # fmt: skip
