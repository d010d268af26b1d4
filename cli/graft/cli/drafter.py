"""What `graft up` drafts with when nobody says: proposers, and the settings they are fastest with.

Knows files and flags; loads no weights and starts nothing.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from math import prod
from typing import Any

from graft.common.errors import GraftError
from graft.common.gguf_file import GgufFile
from graft.common.model_files import EMBEDDED, resolve
from graft.draft.shipped import Shipped, shipped_for

_EXACT = "fp32"
_BLOCKS = frozenset({"Q8_0", "Q4_1"})
_HEADS = frozenset({"eagle", "eagle3", "mtp"})

# A drafter of one layer: bytes of weights bound its step, and old states bring little. Sixteen rows
# of a float32 target cost hardly more than one; rounded weights bear four.
_TRAINED: dict[str, Any] = {"draft_model_quantization": "q8_0", "feature_window": 256}
_TREE = {"num_steps": 4, "eagle_topk": 4, "num_draft_tokens": 16}
_TREE_BESIDE_ROUNDED = {"num_steps": 3, "eagle_topk": 2, "num_draft_tokens": 4}

# The target itself from its file's blocks is hardly ever wrong, so it drafts long chains, and these
# take longer than a tree is usually waited for. Long prompts are left to the head, if there is one.
_ITSELF: dict[str, Any] = {"draft_model_quantization": "stored", "feature_window": 256}
_BESIDE_ITSELF: dict[str, Any] = {
    "tree_deadline_ms": 500,
    "tiers": "field",
    "tier_config": "long_chains",
}


@dataclass(frozen=True, slots=True)
class Drafter:
    """Proposers of the draft service, and settings where the user has set none.

    proposers: None leaves them as they are. said: a line for people; "" where they chose it
    themselves.
    """

    proposers: list[str] | None
    said: str = ""
    draft: dict[str, Any] = field(default_factory=dict)
    gateway: dict[str, Any] = field(default_factory=dict)

    @property
    def ours(self) -> bool:
        """True where nobody has chosen."""
        return bool(self.said)


def drafter_for(model: str, precision: str, chosen: list[str]) -> Drafter:
    """The best there is for a target; names that were chosen get the checkpoints that are ours."""
    trained = shipped_for(model)
    ours = {one.proposer: f"{one.proposer}={one.folder}" for one in trained}
    if chosen:
        return Drafter([ours.get(word, word) for word in chosen] if trained else chosen)
    if precision == _EXACT and (blocks := _blocks_of(model)):
        heads = [one for one in trained if one.proposer in _HEADS][:1]
        sources = ["standalone", *(one.proposer for one in heads), "ngram"]
        return Drafter(
            [
                f"merged={'+'.join(sources)}",
                f"standalone={model}",
                *(ours[one.proposer] for one in heads),
                "ngram",
            ],
            f"the model's own {blocks} blocks, merged with n-gram look-up",
            _ITSELF,
            _BESIDE_ITSELF,
        )
    if not trained:
        return Drafter(None)
    return _shipped(trained[0], precision)


def _shipped(best: Shipped, precision: str) -> Drafter:
    length = f", {best.accept_length:.2f} tokens a round" if best.accept_length else ""
    exact = precision == _EXACT
    return Drafter(
        [f"merged={best.proposer}+ngram", f"{best.proposer}={best.folder}", "ngram"],
        f"{best.proposer}{length}, merged with n-gram look-up",
        {**_TRAINED, **(_TREE if exact else _TREE_BESIDE_ROUNDED)},
        # Rounds are so short beside rounded weights that tries cost more than they find.
        {} if exact else {"tiers": "fixed"},
    )


def _blocks_of(model: str) -> str:
    """The block type of most weights of a GGUF file's layers, where kernels take it; else "".

    Files that cannot be read have none: whoever serves them says what is wrong.
    """
    if model != EMBEDDED and not model.endswith(".gguf"):
        return ""
    try:
        path = resolve(model, weights=False).gguf
        found = GgufFile(path) if path is not None else None
    except GraftError:
        return ""
    if found is None:
        return ""
    weights: Counter[str] = Counter()
    for name, tensor in found.tensors.items():
        if name.startswith("blk."):
            weights[tensor.type_name] += prod(tensor.shape)
    main = weights.most_common(1)[0][0] if weights else ""
    return main if main in _BLOCKS else ""
