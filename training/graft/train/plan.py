"""What decides a corpus, written down once: a run goes on only with what it was begun with.

Knows settings and digests; knows no model and no text.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from graft.common.errors import InvalidArgument
from graft.train.files import digest_of, json_bytes, write_whole

DRAFT_VOCAB = 8192


@dataclass(frozen=True, slots=True)
class CorpusPlan:
    """Equal plans give equal corpora. layers: ids of hidden states, the last before the norm.

    prompts: the digest of each prompt file. held: the share of conversations never trained on.
    """

    target: str
    tokenizer_digest: str
    precision: str
    kernels: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    layers: tuple[int, ...]
    prompts: tuple[str, ...]
    synth: int
    seed: int
    answer_tokens: int
    max_prompt_tokens: int
    shard_prompts: int
    held: float

    @property
    def digest(self) -> str:
        """Names the corpus."""
        return digest_of(asdict(self))


def default_layers(num_layers: int) -> tuple[int, ...]:
    """The states that EAGLE-3, DFlash and MTP read, ascending, the last one of all included.

    EAGLE-3 reads 2, n // 2 and n - 3; DFlash 2 and others spread up to n - 3.
    """
    spread = (2, 8 * num_layers // 30, num_layers // 2, 22 * num_layers // 30, num_layers - 3)
    return tuple(sorted({min(max(layer, 0), num_layers) for layer in spread} | {num_layers}))


def digest_files(files: Sequence[Path]) -> tuple[str, ...]:
    """`name:digest` of each.

    Raises:
        InvalidArgument: a file cannot be read.
    """
    found = []
    for path in files:
        try:
            content = path.read_bytes()
        except OSError as error:
            raise InvalidArgument(
                f"cannot read {path}: {error.strerror}", field="prompts"
            ) from None
        found.append(f"{path.name}:{hashlib.sha256(content).hexdigest()[:16]}")
    return tuple(found)


def settle_plan(folder: Path, plan: CorpusPlan) -> None:
    """Writes the plan of a new corpus, or checks that it is the one in `folder`.

    Raises:
        InvalidArgument: the corpus there was begun with other settings.
    """
    path = folder / "plan.json"
    wanted = _content(plan)
    if not path.exists():
        write_whole(path, json_bytes(wanted))
        return
    there = json.loads(path.read_text(encoding="utf-8"))
    for name, value in wanted.items():
        if there.get(name) != value:
            raise InvalidArgument(
                f"{path} has {name} {there.get(name)!r}, expected {value!r}: go on with the "
                "settings it was begun with, or name another folder",
                field=name,
            )


def _content(plan: CorpusPlan) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(json.dumps(asdict(plan)))
    return {**content, "digest": plan.digest}
