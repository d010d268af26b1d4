"""The tiny target run one token at a time over one long page: what every text is compared with.

Knows the decoder and the reference rule of choice; knows no scheduler, no tree and no sharing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from graft.common.model_files import resolve
from graft.common.sampling import Sampling
from graft.common.tree import FloatArray, root_only
from graft.kernels.ops import KvCache, Ops, StepRows, select
from graft.kernels.reference.choose import choose
from graft.kernels.reference.history import History, adjust_rows
from graft.kernels.rows import Law, choice_rows
from graft.models.decoder import Capture
from graft.models.load import Target, load_target

GREEDY = Sampling()


@dataclass(frozen=True, slots=True, eq=False)
class Plain:
    """A loaded target and the ops it runs on."""

    target: Target
    ops: Ops

    @classmethod
    def load(cls, folder: Path) -> Plain:
        """The model of a folder, on one thread."""
        ops = select("cpu", 1, "auto")
        return cls(load_target(resolve(str(folder), weights=True), ops), ops)

    def new_kv(self, num_slots: int, page_tokens: int) -> KvCache:
        """An empty cache; its garbage is NaN, so that reading it shows."""
        config = self.target.config
        shape = (config.num_layers, num_slots, config.num_kv_heads, config.head_dim)
        nan = float("nan")
        return KvCache(torch.full(shape, nan), torch.full(shape, nan), page_tokens)

    def text(
        self,
        prompt: Sequence[int],
        count: int,
        sampling: Sampling = GREEDY,
        forbidden: Sequence[int] = (),
        min_tokens: int = 0,
    ) -> list[int]:
        """The next `count` tokens; `forbidden` ones cannot be among the first min_tokens."""
        kv = self.new_kv(1024, 1024)
        tokens = list(prompt)
        logits = self._forward(kv, tokens, 0)
        for generated in range(count):
            history = History(
                frozenset(prompt),
                Counter(tokens[len(prompt) :]),
                tuple(forbidden),
                max(0, min_tokens - generated),
            )
            tree = root_only(tokens[-1])
            law = Law(sampling, tree, len(tokens), adjust_rows(sampling, history, tree))
            tokens.append(int(choose(logits, choice_rows([law], logits.shape[1]))[0]))
            logits = self._forward(kv, tokens, len(tokens) - 1)
        return tokens[len(prompt) :]

    def log_probs(self, tokens: Sequence[int]) -> Tensor:
        """[len(tokens), vocab], float64: log-softmax after every token."""
        rows = self._run(self.new_kv(1024, 1024), tokens, 0, None)
        return torch.log_softmax(rows.double(), dim=-1)

    def states(
        self, tokens: Sequence[int], layers: tuple[int, ...], final_norm: bool = True
    ) -> FloatArray:
        """[len(tokens), len(layers) * hidden]: hidden states of one forward over all tokens."""
        rows = _chain_rows(0, len(tokens))
        run = torch.tensor(tokens, dtype=torch.int32)
        capture = Capture(layers, torch.arange(len(tokens)), final_norm)
        with torch.inference_mode():
            _, captured = self.target.decoder.forward_capturing(
                run, rows, self.new_kv(2048, 2048), torch.zeros(1, dtype=torch.int64), capture
            )
        states: FloatArray = captured.flatten(1).numpy()
        return states

    def _forward(self, kv: KvCache, tokens: Sequence[int], start: int) -> Tensor:
        return self._run(kv, tokens, start, torch.tensor([len(tokens) - start - 1]))

    def _run(self, kv: KvCache, tokens: Sequence[int], start: int, wanted: Tensor | None) -> Tensor:
        rows = _chain_rows(start, len(tokens))
        decoder = self.target.decoder
        run = torch.tensor(tokens[start:], dtype=torch.int32)
        with torch.inference_mode():
            return decoder.logits(decoder.forward(run, rows, kv, wanted))


def _chain_rows(start: int, stop: int) -> StepRows:
    """Rows of one sequence on one long page."""
    positions = torch.arange(start, stop, dtype=torch.int32)
    return StepRows(
        positions=positions,
        write_slots=positions.clone(),
        sequence=torch.zeros(len(positions), dtype=torch.int32),
        page_table=torch.zeros(1, 1, dtype=torch.int32),
        prefix_len=positions + 1,
        extra_ptr=torch.zeros(len(positions) + 1, dtype=torch.int32),
        extra_slots=torch.zeros(0, dtype=torch.int32),
    )
