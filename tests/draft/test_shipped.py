"""Drafters that come with Graft: whose they are, and which one is best."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from graft.draft.shipped import ROOT, all_shipped, identity_of, shipped_for
from graft.testing.checkpoints import write_eagle3
from graft.testing.models import write_tiny_model
from graft.testing.mtp_checkpoints import write_mtp

_LIMIT_BYTES, _LIMIT_ALL_BYTES = 24_000_000, 64_000_000


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "Tiny", layers=6)


@pytest.fixture
def root(tmp_path: Path, tiny: Path) -> Path:
    folder = tmp_path / "drafters" / "tiny"
    write_eagle3(folder / "eagle3", tiny)
    write_mtp(folder / "mtp", tiny)
    (folder / "target.json").write_text(json.dumps(identity_of(str(tiny))))
    card(folder / "eagle3", {"chain4_T0": 2.0, "tree24_T0": 2.6, "tree24_T1": 2.9})
    card(folder / "mtp", {"chain4_T0": 2.1})
    return folder.parent


def card(folder: Path, results: dict[str, float]) -> None:
    (folder / "card.json").write_text(json.dumps({"results": {**results, "per_position": [0.5]}}))


def test_the_longest_greedy_accept_length_is_best(tiny: Path, root: Path) -> None:
    found = shipped_for(str(tiny), root)
    assert [(one.proposer, one.way, one.accept_length) for one in found] == [
        ("eagle3", "tree24_T0", 2.6),
        ("mtp", "chain4_T0", 2.1),
    ]
    assert found == all_shipped(root)
    assert found[0].num_bytes > 0


def test_another_model_of_the_same_name_gets_none(tmp_path: Path, tiny: Path, root: Path) -> None:
    same = tmp_path / "elsewhere" / "tiny"
    shutil.copytree(tiny, same)
    assert shipped_for(str(same), root)
    wider = write_tiny_model(tmp_path / "wider" / "tiny", layers=6, vocab_size=330)
    assert not shipped_for(str(wider), root)
    deeper = write_tiny_model(tmp_path / "deeper" / "tiny", layers=7)
    assert not shipped_for(str(deeper), root)


def test_a_model_of_another_name_is_not_even_looked_at(root: Path) -> None:
    assert shipped_for("owner/name-that-no-hub-has", root) == []
    assert shipped_for("/nowhere/tiny", root) == []


def test_a_drafter_without_a_card_or_weights(tiny: Path, root: Path) -> None:
    (root / "tiny" / "mtp" / "card.json").unlink()
    (root / "tiny" / "eagle3" / "model.safetensors").unlink()
    (found,) = shipped_for(str(tiny), root)
    assert (found.proposer, found.accept_length, found.way) == ("mtp", 0.0, "")


def test_what_is_shipped_keeps_the_limits() -> None:
    sizes = [one.num_bytes for one in all_shipped(ROOT)]
    assert all(size <= _LIMIT_BYTES for size in sizes)
    assert sum(sizes) <= _LIMIT_ALL_BYTES
