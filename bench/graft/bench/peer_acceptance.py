"""Accept length of our EAGLE-3 checkpoint in vLLM: the same questions, another engine.

Counts as `graft.bench.accept_length` does, so that the two lengths can be held side by side; where
they differ by more than a few questions explain, one of the two reads the checkpoint wrongly.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from graft.bench.accept_length import Counted, Measured
from graft.bench.peers.catalog import default_folder, interpreter_of, peer_of
from graft.bench.systems import Job, PeerProcess, PeerRun, Written
from graft.common.errors import GraftError
from graft.common.model_files import resolve

VLLM_EAGLE3 = "vllm eagle3"

_CHAIN = "chain4_T0"
_CHAIN_LENGTH = 4


@dataclass(frozen=True, slots=True)
class Asked:
    """A question in token ids, and its category."""

    tokens: list[int]
    category: str


def vllm_run(model: str, eagle3: str, threads: int, folder: Path | None = None) -> PeerRun:
    """vLLM in float32 with an EAGLE-3 checkpoint that drafts chains of four.

    Raises:
        GraftError: vLLM is not installed, or there is no such model.
    """
    peer = peer_of("vllm")
    python = interpreter_of(peer, folder or default_folder())
    if python is None:
        raise GraftError("vllm is not installed (graft bench compare --install vllm installs it)")
    head = str(Path(eagle3).expanduser().resolve())
    weights = resolve(model, weights=True).folder
    return PeerRun(peer, python, f"eagle3={head}", weights, threads)


async def measure_vllm(
    run: PeerRun,
    asked: Sequence[Asked],
    *,
    max_tokens: int,
    seed: int = 0,
    on_answer: Callable[[], None] | None = None,
) -> Measured:
    """Greedy answers, as many at once as the peer takes.

    Raises:
        GraftError: it did not start, or ended.
    """
    process = await PeerProcess.start(VLLM_EAGLE3, run)
    answers: list[Counted] = []
    try:
        for start in range(0, len(asked), process.most_clients):
            block = asked[start : start + process.most_clients]
            jobs = [Job(one.tokens, max_tokens, 0.0, seed) for one in block]
            written = await process.write(jobs, "")
            for one, answer in zip(block, written, strict=True):
                answers.append(_counted(one.category, answer))
                if on_answer is not None:
                    on_answer()
    finally:
        await process.close()
    return Measured(VLLM_EAGLE3, _CHAIN, tuple(answers))


def _counted(category: str, answer: Written) -> Counted:
    """The first token is the prompt's, and a chain is drafted for every round."""
    return Counted(
        category,
        answer.num_rounds,
        answer.num_rounds,
        answer.num_tokens - 1,
        answer.num_rounds * _CHAIN_LENGTH,
        answer.per_position,
    )
