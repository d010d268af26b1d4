"""Checks every Triton kernel against the reference on one GPU, then times it.

Fresh random inputs each run, from a seed that it prints. Times stand beside a torch-eager version
and beside FlashInfer where that has the same operation. Writes gpu_check.json and gpu_check.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / folder) for folder in ("protos", "common", "kernels")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from gpu_inputs import (  # noqa: E402
    Size,
    coins,
    damage,
    likely_choices,
    mixed_laws,
    padded_trees,
    peaked_logits,
    placed,
    probabilities,
    ragged_trees,
    random_parents,
)

Outputs = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison with the reference; differing counts unequal entries."""

    name: str
    entries: int
    differing: int
    seconds: float


def checks(rng: np.random.Generator, device: torch.device, size: Size) -> Iterator[Check]:
    """Every kernel against the reference, bit for bit."""
    for name, kernel, reference in _pairs(rng, device, size):
        started = time.perf_counter()
        got, expected = kernel(), reference()
        entries = differing = 0
        for left, right in zip(got, expected, strict=True):
            there = left.cpu()
            assert there.shape == right.shape, f"{name}: {there.shape}, expected {right.shape}"
            unequal = there.view(-1).numpy() != right.reshape(-1).numpy()
            entries += unequal.size
            differing += int(unequal.sum())
        yield Check(name, entries, differing, time.perf_counter() - started)


def _pairs(
    rng: np.random.Generator, device: torch.device, size: Size
) -> Iterator[tuple[str, Callable[[], Outputs], Callable[[], Outputs]]]:
    yield from _choice_pairs(rng, device, size)
    yield from _tree_pairs(rng, device, size)
    yield from _coin_pairs(rng, device, size)


def _choice_pairs(
    rng: np.random.Generator, device: torch.device, size: Size
) -> Iterator[tuple[str, Callable[[], Outputs], Callable[[], Outputs]]]:
    from graft.kernels.gpu import choose as gpu
    from graft.kernels.reference import choose as reference

    logits = damage(rng, peaked_logits(rng, size.rows, size.vocab))
    laws = mixed_laws(rng, size.rows, size.vocab)
    there, laws_there = logits.to(device), placed(laws, device)
    yield (
        "choose",
        lambda: (gpu.choose(there, laws_there),),
        lambda: (reference.choose(logits, laws),),
    )
    yield (
        "target_probs",
        lambda: (gpu.target_probs(there, laws_there),),
        lambda: (reference.target_probs(logits, laws),),
    )


def _tree_pairs(
    rng: np.random.Generator, device: torch.device, size: Size
) -> Iterator[tuple[str, Callable[[], Outputs], Callable[[], Outputs]]]:
    from graft.kernels.gpu import accept as gpu_accept
    from graft.kernels.gpu import build_tree as gpu_build
    from graft.kernels.gpu import keep as gpu_keep
    from graft.kernels.gpu import masks as gpu_masks
    from graft.kernels.ops import KvCache
    from graft.kernels.reference import accept, build_tree, keep
    from graft.kernels.trees import MaskMode

    ragged = ragged_trees(rng, size)
    chosen = likely_choices(rng, ragged)
    walked, path = accept.accept(ragged, chosen)
    ragged_there, chosen_there = placed(ragged, device), chosen.to(device)
    yield (
        "accept",
        lambda: gpu_accept.accept(ragged_there, chosen_there, width=path.shape[1]),
        lambda: (walked, path),
    )
    padded = padded_trees(rng, size)
    predict = padded.candidates[:, torch.from_numpy(rng.permutation(size.nodes))].contiguous()
    padded_there, predict_there = placed(padded, device), predict.to(device)
    yield (
        "verify_tree_greedy",
        lambda: gpu_accept.verify_tree_greedy(padded_there, predict_there, 9),
        lambda: accept.verify_tree_greedy(padded, predict, 9),
    )
    parents = torch.tensor([random_parents(rng, size.nodes) for _ in range(size.sessions)])
    drafts = torch.from_numpy(rng.integers(0, size.vocab, (size.sessions, size.nodes - 1)))
    bonus = torch.from_numpy(rng.integers(0, size.vocab, size.sessions))
    lengths = torch.from_numpy(rng.integers(0, 300, size.sessions))
    inputs = (bonus, drafts, parents, lengths)
    inputs_there = (bonus.to(device), drafts.to(device), parents.to(device), lengths.to(device))
    for mode in (MaskMode.FULL_MASK, MaskMode.QLEN_ONLY):
        yield (
            f"build_tree {mode.name}",
            partial(gpu_build.build_tree, *inputs_there, mode),
            partial(build_tree.build_tree, *inputs, mode),
        )
    visible = build_tree.visibility(parents)
    narrow = visible[:, :32, :32].contiguous()
    narrow_there, visible_there = narrow.to(device), visible.to(device)
    packed = MaskMode.QLEN_ONLY_BITPACKING
    yield (
        "write_mask QLEN_ONLY_BITPACKING",
        lambda: (gpu_masks.write_mask(narrow_there, inputs_there[3], packed),),
        lambda: (build_tree.write_mask(narrow, lengths, packed),),
    )
    yield (
        "pack_flashinfer",
        lambda: gpu_masks.pack_flashinfer(visible_there, inputs_there[3]),
        lambda: build_tree.pack_flashinfer(visible, lengths),
    )
    slots = torch.from_numpy(rng.permutation(2 * size.rows).astype(np.int32))[: len(chosen)]
    keys = torch.from_numpy(rng.standard_normal((2, 2 * size.rows, 2, 64), dtype=np.float32))
    kv = KvCache(keys.clone(), -keys, 16)
    kv_there = KvCache(keys.to(device), -keys.to(device), 16)

    def keep_there() -> Outputs:
        moves = gpu_keep.keep_moves(
            ragged_there.ptr, walked.to(device), path.to(device), slots.to(device)
        )
        gpu_keep.keep(kv_there, *moves)
        return kv_there.keys, kv_there.values

    def keep_here() -> Outputs:
        keep.keep(kv, *keep.keep_moves(ragged.ptr, walked, path, slots))
        return kv.keys, kv.values

    yield "keep", keep_there, keep_here


def _coin_pairs(
    rng: np.random.Generator, device: torch.device, size: Size
) -> Iterator[tuple[str, Callable[[], Outputs], Callable[[], Outputs]]]:
    from graft.kernels.gpu import sample as gpu
    from graft.kernels.gpu import simulate as gpu_simulate
    from graft.kernels.reference import sample, simulate

    trees = padded_trees(rng, size)
    drawn = (coins(rng, size.sessions, size.nodes), coins(rng, size.sessions))
    probs = probabilities(rng, size.sessions, size.nodes, size.vocab)
    trees_there, probs_there = placed(trees, device), probs.to(device)
    drawn_there = (drawn[0].to(device), drawn[1].to(device))
    yield (
        "tree_speculative_sampling_target_only",
        lambda: gpu.tree_speculative_sampling_target_only(
            trees_there, drawn_there, probs_there, (0.9, 0.8), 9
        ),
        lambda: sample.tree_speculative_sampling_target_only(trees, drawn, probs, (0.9, 0.8), 9),
    )
    steps = min(7, size.nodes - 1)
    target = probs[:, : steps + 1].contiguous()
    draft = ((target[:, :steps] + probabilities(rng, size.sessions, steps, size.vocab)) / 2).float()
    chain = (
        draft.argmax(-1),
        torch.from_numpy(rng.integers(0, steps + 1, size.sessions)),
        (drawn[0][:, :steps].contiguous(), drawn[1]),
        target,
        draft.contiguous(),
    )
    there = (
        chain[0].to(device),
        chain[1].to(device),
        (chain[2][0].to(device), drawn_there[1]),
        target.to(device),
        chain[4].to(device),
    )
    for name in ("chain_speculative_sampling", "block_speculative_sampling"):
        yield (
            name,
            partial(getattr(gpu, name), *there),
            partial(getattr(sample, name), *chain),
        )
    seeds = torch.from_numpy(rng.integers(-(2**63), 2**63 - 1, 256))
    places = torch.arange(256, dtype=torch.int32)

    def lengths_there(law: simulate.Simulation) -> Outputs:
        return (gpu_simulate.simulated_lengths(law, seeds.to(device), places.to(device), 6),)

    def lengths_here(law: simulate.Simulation) -> Outputs:
        return (simulate.simulated_lengths(law, seeds, places, 6),)

    for method in simulate.SimulatedMethod:
        law = simulate.Simulation(2.7, method)
        yield (
            f"simulated_lengths {method.value}",
            partial(lengths_there, law),
            partial(lengths_here, law),
        )
    lengths = torch.from_numpy(rng.integers(1, size.nodes + 1, size.sessions).astype(np.int32))
    law = simulate.Simulation(2.0, tokens=simulate.SimulatedTokens.REAL_DRAFT_TOKEN)
    yield (
        "simulate_accept",
        lambda: gpu_simulate.simulate_accept(
            law, trees_there, trees_there.candidates, lengths.to(device), size.nodes
        ),
        lambda: simulate.simulate_accept(law, trees, trees.candidates, lengths, size.nodes),
    )


def machine() -> dict[str, str]:
    """What ran: device, driver-side versions, Python."""
    import triton

    return {
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }


def report(results: dict[str, Any]) -> str:
    """The markdown page of the results."""
    about = ", ".join(f"{name} {value}" for name, value in results["machine"].items())
    lines = [
        "# Triton kernels on a GPU",
        "",
        f"Written by `make gpu-check`: {about}; seed {results['seed']}.",
        "",
        "| checked against the reference | entries | differing |",
        "|---|---:|---:|",
    ]
    lines += [f"| {c['name']} | {c['entries']} | {c['differing']} |" for c in results["checks"]]
    lines += [
        "",
        "Median time in ms; GB/s counts the bytes that the kernel has to move.",
        "",
        "| timed | Triton | GB/s | torch eager | FlashInfer |",
        "|---|---:|---:|---:|---:|",
    ]
    for t in results["timings"]:
        others = " | ".join("" if t[k] is None else f"{t[k]:.3f}" for k in ("eager", "flashinfer"))
        lines.append(f"| {t['name']} | {t['triton']:.3f} | {t['bandwidth']:.0f} | {others} |")
    lines += ["", *results["notes"], ""]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Checks, times, writes; 1 when a kernel differs from the reference, 2 without a device."""
    parser = argparse.ArgumentParser(description="Check and time the Triton kernels on one GPU.")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "gpu")
    parser.add_argument("--seed", type=int, default=None, help="repeat the inputs of a run")
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--nodes", type=int, default=64)
    parser.add_argument("--vocab", type=int, default=128256)
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(
            "gpu-check needs a CUDA device and torch sees none; `make gpu-compile` needs none.",
            file=sys.stderr,
        )
        return 2
    from gpu_timings import timings

    device = torch.device("cuda")
    seed = secrets.randbits(32) if given.seed is None else given.seed
    print(f"seed {seed}", flush=True)
    done = []
    for small in (Size(8, 8, given.vocab), Size(16, 33, 1000), Size(3, 128, 260)):
        for check in checks(np.random.default_rng(seed), device, small):
            done.append(asdict(check) | {"name": f"{check.name} {_shown(small)}"})
            print(json.dumps(done[-1]), flush=True)
    size = Size(given.sessions, given.nodes, given.vocab)
    timed, notes = timings(np.random.default_rng(seed), device, size)
    results = {
        "machine": machine(),
        "seed": seed,
        "checks": done,
        "timings": [asdict(one) for one in timed],
        "notes": notes,
    }
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "gpu_check.json").write_text(json.dumps(results, indent=2) + "\n")
    (given.out / "gpu_check.md").write_text(report(results))
    print(report(results))
    wrong = [check["name"] for check in done if check["differing"]]
    if wrong:
        print(f"differ from the reference: {', '.join(wrong)}", file=sys.stderr)
    return 1 if wrong else 0


def _shown(size: Size) -> str:
    return f"{size.sessions} x {size.nodes} x {size.vocab}"


if __name__ == "__main__":
    sys.exit(main())
