"""Drafters that come with Graft, by the target they were trained for.

    drafters/<target>/target.json       who the target is
    drafters/<target>/<proposer>/       a checkpoint, its card.json and README.md

A target is known by the name of its weights, its tokenizer and its size; that of a name alone
would do for a fine-tuned model in a folder of the same name. Knows files; loads no weights.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from graft.common.errors import GraftError
from graft.common.model_files import read_json, resolve, tokenizer_digest

ROOT = Path(__file__).parent / "drafters"
TARGET_FILE, CARD_FILE = "target.json", "card.json"

_SIZES = ("hidden_size", "num_hidden_layers", "vocab_size")


@dataclass(frozen=True, slots=True)
class Shipped:
    """One drafter. accept_length: the best of its card's greedy results; 0 where it has none."""

    target: str
    proposer: str
    folder: Path
    accept_length: float
    way: str

    @property
    def num_bytes(self) -> int:
        """Of its weights."""
        return (self.folder / "model.safetensors").stat().st_size


def shipped_for(model: str, root: Path | None = None) -> list[Shipped]:
    """Drafters for a target, the one with the longest accept length first; empty for others.

    A model whose name is not that of a target costs no look at its files.
    """
    root = root or ROOT
    for folder in _targets(root):
        identity = read_json(folder / TARGET_FILE)
        if _name(model) in identity["names"] and _fits(model, identity):
            found = _drafters(folder)
            return sorted(found, key=lambda one: (-one.accept_length, one.proposer))
    return []


def all_shipped(root: Path | None = None) -> list[Shipped]:
    """Every drafter, by target and proposer."""
    return [one for folder in _targets(root or ROOT) for one in _drafters(folder)]


def identity_of(model: str) -> dict[str, Any]:
    """What target.json has to hold for drafters of `model`.

    Raises:
        ModelNotFound: there is no such model.
    """
    files = resolve(model, weights=False)
    config = read_json(files.folder / "config.json")
    return {
        "names": sorted({_name(model), _name(files.name)}),
        "tokenizer_digest": tokenizer_digest(files.folder),
        **{key: config.get(key) for key in _SIZES},
    }


def _targets(root: Path) -> list[Path]:
    return sorted(path.parent for path in root.glob(f"*/{TARGET_FILE}"))


def _drafters(target: Path) -> list[Shipped]:
    found = []
    for config in sorted(target.glob("*/config.json")):
        folder = config.parent
        if not (folder / "model.safetensors").is_file():
            continue
        way, accept_length = _best_greedy(folder)
        found.append(Shipped(target.name, folder.name, folder, accept_length, way))
    return found


def _best_greedy(folder: Path) -> tuple[str, float]:
    if not (folder / CARD_FILE).is_file():
        return "", 0.0
    results = read_json(folder / CARD_FILE).get("results") or {}
    greedy = [
        (float(length), way)
        for way, length in results.items()
        if way.endswith("_T0") and isinstance(length, int | float)
    ]
    length, way = max(greedy, default=(0.0, ""))
    return way, length


def _name(model: str) -> str:
    """The last part of a path or hub id, as names are compared."""
    path = Path(model).expanduser()
    name = path.resolve().name if path.is_dir() else Path(model.strip()).name
    return name.removesuffix(".gguf").lower()


def _fits(model: str, identity: dict[str, Any]) -> bool:
    """False also for files that cannot be read: whoever serves them says what is wrong."""
    try:
        other = identity_of(model)
    except GraftError:
        return False
    return all(other[key] == identity.get(key) for key in ("tokenizer_digest", *_SIZES))
