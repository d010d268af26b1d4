"""Settings of MTP, DFlash and UNO: what they become, and sentences for those that do not fit."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from graft.common.errors import GraftError
from graft.common.tier import Tier
from graft.draft.checkpoints.check import fit, switches
from graft.draft.loading import MODEL_PROPOSERS
from graft.draft.proposers.base import Proposer
from graft.draft.proposers.branching import BranchingProposer
from graft.draft.proposers.dflash import DflashProposer
from graft.draft.proposers.multi_layer import MultiLayerProposer
from graft.draft.proposers.uno import UnoProposer
from graft.draft.server import make_proposers
from graft.draft.settings import DraftSettings
from graft.testing.adapters import write_adapter
from graft.testing.dflash_checkpoints import write_dflash
from graft.testing.models import write_tiny_model
from graft.testing.mtp_checkpoints import write_mtp

MULTI = {"enable_multi_layer_eagle": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target and one checkpoint of each kind."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("checkpoints")
    target = write_tiny_model(root / "target", layers=6)
    write_dflash(root / "dflash", target)
    write_mtp(root / "mtp", target)
    write_mtp(root / "steps", target, "mimo_v2", steps=3)
    write_adapter(root / "uno" / "adapter", target)
    return root


def made(folder: Path, name: str, checkpoint: str, **flags: Any) -> Proposer:
    word = f"{name}={folder / checkpoint}"
    given = {"proposers": [word], "model": str(folder / "target"), **flags}
    (proposer,) = make_proposers(DraftSettings.load(None, given))
    return proposer


TIERS: dict[str, tuple[str, str, Mapping[str, Any], type, Tier]] = {
    "dflash": ("dflash", "dflash", {}, DflashProposer, Tier("dflash", 5, 1, 6)),
    "dflash of 4": (
        "dflash", "dflash", {"dflash_block_size": 4}, DflashProposer, Tier("dflash", 3, 1, 4),
    ),
    "mtp": ("mtp", "mtp", {}, BranchingProposer, Tier("mtp", 5, 4, 8)),
    "mtp in chains": (
        "mtp", "mtp", {"num_steps": 2, "eagle_topk": 1}, BranchingProposer, Tier("mtp", 2, 1, 3),
    ),
    "multi-layer": ("mtp", "steps", MULTI, MultiLayerProposer, Tier("mtp", 3, 1, 4)),
    "two layers": (
        "mtp", "steps", {**MULTI, "num_steps": 2}, MultiLayerProposer, Tier("mtp", 2, 1, 3),
    ),
    "uno": ("uno", "uno", {}, UnoProposer, Tier("uno", 8, 1, 9)),
    "uno in trees": (
        "uno",
        "uno",
        {"num_steps": 7, "eagle_topk": 32, "num_draft_tokens": 8},
        UnoProposer,
        Tier("uno", 8, 32, 9),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name,checkpoint,flags,kind,tier", TIERS.values(), ids=TIERS.keys())
def test_settings_become_a_proposer_and_its_tier(
    folder: Path, name: str, checkpoint: str, flags: Mapping[str, Any], kind: type, tier: Tier
) -> None:
    proposer = made(folder, name, checkpoint, **flags)
    info = proposer.describe()
    assert type(proposer) is kind
    assert (proposer.name, info.default_tier) == (name, tier)
    assert info.tokenizer_digest and info.vocab_size == 320
    assert (info.needs is None) == (name == "uno")
    if kind is not BranchingProposer:
        assert (info.max_depth, info.max_nodes) == (tier.num_steps, tier.num_draft_tokens)


REFUSED: dict[str, tuple[str, str, Mapping[str, Any], str]] = {
    "another kind": ("mtp", "dflash", {}, r"is a checkpoint for proposer dflash, not mtp"),
    "a window below the block": (
        "dflash", "dflash", {"draft_window_size": 5}, r"draft_window_size 5 is below the block",
    ),
    "bushes of several layers": (
        "mtp", "steps", {**MULTI, "eagle_topk": 2}, r"eagle_topk 2 does not go with",
    ),
    "nodes of several layers": (
        "mtp", "steps", {**MULTI, "num_draft_tokens": 9}, r"num_draft_tokens 9 does not go with 3",
    ),
    "layers that need the switch": ("mtp", "steps", {}, r"enable_multi_layer_eagle runs it"),
    "mask without id": ("uno", "uno", {"uno_noise": "mask"}, r"needs uno_mask_token_id"),
    "mask outside": ("uno", "uno", {"uno_mask_token_id": 320}, r"320 is no id below 320"),
    "tree of uno": (
        "uno", "uno", {"num_steps": 9, "eagle_topk": 2, "num_draft_tokens": 4}, r"the 10 rows",
    ),
    "no target": ("dflash", "dflash", {"model": ""}, r"model names the target"),
}  # fmt: skip


@pytest.mark.parametrize("name,checkpoint,flags,message", REFUSED.values(), ids=REFUSED.keys())
def test_settings_that_do_not_go_together_are_refused(
    folder: Path, name: str, checkpoint: str, flags: Mapping[str, Any], message: str
) -> None:
    with pytest.raises(GraftError, match=message):
        made(folder, name, checkpoint, **flags)


@pytest.mark.parametrize("name", MODEL_PROPOSERS)
def test_a_proposer_without_checkpoint_names_its_setting(name: str) -> None:
    setting = "uno_lora_path" if name == "uno" else "draft_model_path"
    with pytest.raises(GraftError, match=rf"{name} needs a checkpoint: {setting} names it"):
        make_proposers(DraftSettings.load(None, {"proposers": [name]}))


def test_several_proposers_share_a_service(folder: Path) -> None:
    words = ["ngram", *(f"{name}={folder / name}" for name in ("mtp", "dflash", "uno"))]
    settings = DraftSettings.load(None, {"proposers": words, "model": str(folder / "target")})
    assert [one.name for one in make_proposers(settings)] == ["ngram", "mtp", "dflash", "uno"]


def test_a_window_asks_for_no_more_states_than_it_sees(folder: Path) -> None:
    needs = made(folder, "dflash", "dflash", draft_window_size=40).describe().needs
    assert needs is not None and needs.window_tokens == 40


@pytest.mark.parametrize("checkpoint,layers", [("mtp", 5), ("steps", 3)])
def test_a_checked_checkpoint_is_run_the_way_it_can_be(
    folder: Path, checkpoint: str, layers: int
) -> None:
    info = fit(str(folder / checkpoint), str(folder / "target"))
    assert info.default_tier.num_steps == layers
    assert bool(switches(str(folder / checkpoint))) == (checkpoint == "steps")
