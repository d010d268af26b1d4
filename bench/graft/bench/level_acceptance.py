"""Level acceptance: how often one of k children is the target's own token.

Coupled children are the k best of q under the very noise that picks the target's token. Fixed
children are the k likeliest of q, as drafters without noise offer them. Both are exact rules; the
difference is how often a level is accepted.

    python -m graft.bench.level_acceptance

Knows logits of a target and a drafter, row by row; what made them is the caller's.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from graft.common.model_files import resolve
from graft.common.noise import gumbel
from graft.kernels.cpu.choose import choose
from graft.kernels.ops import ChoiceRows, KvCache, StepRows, select
from graft.models.decoder import Decoder
from graft.models.load import Target, load_target

Doubles = npt.NDArray[np.float64]

WIDTH = 4
_QUADRATURE = 48
_MODEL = "smollm2-135m-instruct"
_PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class LevelAcceptance:
    """Shares of rows and draws in which a level was accepted; spread is the standard error."""

    coupled: float
    coupled_spread: float
    fixed: float
    fixed_spread: float

    @property
    def ratio(self) -> float:
        """Coupled over fixed."""
        return self.coupled / self.fixed

    @property
    def ratio_spread(self) -> float:
        """Standard error of the ratio, as if both errors were independent."""
        parts = (self.coupled_spread / self.coupled, self.fixed_spread / self.fixed)
        return self.ratio * float(np.hypot(*parts))


def closed_form_coupled(p: Doubles, q: Doubles, width: int = WIDTH) -> float:
    """Probability that the target's token is among the `width` best of q under shared noise.

    The target takes the token v with the smallest E_v / p_v, the E_w being independent unit
    exponentials; call that value t, which has a unit exponential law of its own, whatever v is.
    Given v and t every other E_w is above p_w t, and w stands before v in the drafter's order iff
    E_w < q_w p_v t / q_v. So w does with probability 1 - exp(-c_w t), independently, where
    c_w = max(q_w p_v / q_v - p_w, 0), and

        P = sum_v p_v  integral_0^inf e^-t  P(fewer than `width` of these w)  dt.

    For width 1 the integral is 1 / (1 + sum_w c_w), the known overlap of Gumbel coupling. Fixed
    children are accepted with the sum of p over the `width` likeliest of q.

    p, q: [vocab], probabilities, q above 0 wherever p is. Cost grows with vocab^2.
    """
    nodes, weights = np.polynomial.laguerre.laggauss(_QUADRATURE)
    total = 0.0
    for v in np.flatnonzero(p > 0):
        rate = np.maximum(q * (p[v] / q[v]) - p, 0.0)
        rate[v] = 0.0
        before = -np.expm1(-np.outer(rate[rate > 0], nodes))  # [others, t]
        exactly = np.zeros((width, len(nodes)))
        exactly[0] = 1.0
        for share in before:
            exactly[1:] = exactly[1:] * (1 - share) + exactly[:-1] * share
            exactly[0] *= 1 - share
        total += float(p[v] * (weights * exactly.sum(axis=0)).sum())
    return total


def measure(
    target: Tensor, draft: Tensor, draws: int, width: int = WIDTH, temperature: float = 1.0
) -> LevelAcceptance:
    """Level acceptance over rows of logits, `draws` seeds each.

    target, draft: [rows, vocab], float32.
    """
    rows, vocab = target.shape
    coupled = np.zeros(rows)
    for seed in range(draws):
        positions = torch.arange(rows, dtype=torch.int32)
        chosen = choose(target, _law(rows, temperature, seed, positions)).numpy()
        for row in range(rows):
            scores = draft[row].numpy() / np.float32(temperature) + gumbel(seed, row, vocab)
            coupled[row] += chosen[row] in np.argpartition(scores, -width)[-width:]
    children = torch.topk(draft, width, dim=1).indices
    fixed = torch.softmax(target.double() / temperature, dim=1).gather(1, children).sum(dim=1)
    coupled /= draws
    return LevelAcceptance(
        coupled=float(coupled.mean()),
        coupled_spread=float(coupled.std() / np.sqrt(rows)),
        fixed=float(fixed.mean()),
        fixed_spread=float(fixed.std()) / float(np.sqrt(rows)),
    )


def damaged(target: Target, dropped: Sequence[int]) -> Decoder:
    """The target without some of its layers; it shares the weights that are left."""
    whole = target.decoder
    kept = [i for i in range(target.config.num_layers) if i not in set(dropped)]
    config = dataclasses.replace(
        target.config,
        num_layers=len(kept),
        windows=tuple(target.config.windows[i] for i in kept),
    )
    layers = tuple(whole.weights.layers[i] for i in kept)
    return Decoder(config, dataclasses.replace(whole.weights, layers=layers), whole.ops)


def logits_of(decoder: Decoder, tokens: Sequence[int]) -> Tensor:
    """[tokens, vocab]: what follows every position of a text, in one prefill."""
    count, config = len(tokens), decoder.config
    pages = (count + _PAGE_TOKENS - 1) // _PAGE_TOKENS
    places = torch.arange(count, dtype=torch.int32)
    rows = StepRows(
        positions=places,
        write_slots=places,
        sequence=torch.zeros_like(places),
        page_table=torch.arange(pages, dtype=torch.int32).unsqueeze(0),
        prefix_len=places + 1,
        extra_ptr=torch.zeros(count + 1, dtype=torch.int32),
        extra_slots=torch.zeros(0, dtype=torch.int32),
    )
    shape = (config.num_layers, pages * _PAGE_TOKENS, config.num_kv_heads, config.head_dim)
    kv = KvCache(torch.zeros(shape), torch.zeros(shape), _PAGE_TOKENS)
    hidden = decoder.forward(torch.tensor(tokens, dtype=torch.int32), rows, kv, None)
    return decoder.logits(hidden)


def compare_embedded(
    texts: Sequence[str], dropped: Sequence[int], draws: int, threads: int = 1
) -> LevelAcceptance:
    """Level acceptance of SmolLM2 and a copy of it without some layers, over all positions."""
    from tokenizers import Tokenizer

    files = resolve(_MODEL, weights=True)
    target = load_target(files, select("cpu", threads), context_length=512)
    drafter = damaged(target, dropped)
    tokenizer = Tokenizer.from_file(str(files.folder / "tokenizer.json"))
    encoded = [tokenizer.encode(text).ids for text in texts]
    return measure(
        torch.cat([logits_of(target.decoder, tokens)[1:] for tokens in encoded]),
        torch.cat([logits_of(drafter, tokens)[1:] for tokens in encoded]),
        draws,
    )


def _law(rows: int, temperature: float, seed: int, positions: Tensor) -> ChoiceRows:
    return ChoiceRows(
        temperature=torch.full((rows,), temperature),
        top_k=torch.zeros(rows, dtype=torch.int32),
        top_p=torch.ones(rows),
        min_p=torch.zeros(rows),
        seed=torch.full((rows,), seed, dtype=torch.int64),
        position=positions,
    )


def main() -> None:
    """Prints a line for each number of dropped layers."""
    from graft.bench.prompts import read

    texts = [prompt.text for prompt in read(limit=8)]
    for dropped in ([14], [10, 14, 18], [8, 11, 14, 17, 20]):
        level = compare_embedded(texts, dropped, draws=4)
        sys.stdout.write(
            f"{len(dropped)} of 30 layers dropped, {WIDTH} children, T = 1: "
            f"coupled {level.coupled:.3f} +- {level.coupled_spread:.3f}, "
            f"fixed {level.fixed:.3f} +- {level.fixed_spread:.3f}, "
            f"ratio {level.ratio:.2f} +- {level.ratio_spread:.2f}\n"
        )


if __name__ == "__main__":
    main()
