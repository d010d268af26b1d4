"""`graft up` and the drafters that come with Graft: by default, by name, and not at all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import typer

from graft.cli import models
from graft.cli.plan import Plan, UpSettings, make_plan
from graft.draft import shipped
from graft.testing.checkpoints import write_eagle3
from graft.testing.gguf_models import write_gguf
from graft.testing.models import write_tiny_model
from graft.testing.mtp_checkpoints import write_mtp

_PORTS = dict.fromkeys(("port", "grpc_port", "verify_port", "draft_port"), 0)


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRAFT_CACHE", str(tmp_path / "cache"))
    target = write_tiny_model(tmp_path / "tiny", layers=6)
    root = tmp_path / "drafters"
    write_eagle3(root / "tiny" / "eagle3", target)
    write_mtp(root / "tiny" / "mtp", target)
    (root / "tiny" / "target.json").write_text(json.dumps(shipped.identity_of(str(target))))
    results = {"chain4_T0": 2.0, "tree24_T0": 2.6}
    (root / "tiny" / "eagle3" / "card.json").write_text(json.dumps({"results": results}))
    monkeypatch.setattr(shipped, "ROOT", root)
    return target


def plan(model: Path, config: Path | None = None, **flags: Any) -> Plan:
    return make_plan(UpSettings.load(None, {"model": str(model), **_PORTS, **flags}), config)


def proposers_of(made: Plan) -> list[str]:
    """What the draft service is told, paths cut to their last folder."""
    draft = next(child for child in made.children if child.name == "draft")
    words = [word for word in draft.command if word.startswith("--proposers=")]
    if not words:
        return []
    names = words[0].removeprefix("--proposers=").split(",")
    return [name.split("=")[0] + ("=..." if "=" in name else "") for name in names]


def test_the_best_one_is_the_default(tiny: Path) -> None:
    made = plan(tiny)
    assert proposers_of(made) == ["merged=...", "eagle3=...", "ngram"]
    assert made.drafter == "eagle3, 2.60 tokens a round, merged with n-gram look-up"


def test_a_name_alone_takes_ours(tiny: Path) -> None:
    made = plan(tiny, proposers=["ngram", "mtp"])
    assert proposers_of(made) == ["ngram", "mtp=..."]
    assert made.drafter == ""


def test_a_checkpoint_by_hand_is_left_alone(tiny: Path) -> None:
    assert proposers_of(plan(tiny, draft_model_path="mine", proposers=["eagle3"])) == ["eagle3"]
    assert proposers_of(plan(tiny, proposers=["eagle3=mine"])) == ["eagle3=..."]


def test_the_file_of_settings_counts_as_chosen(tiny: Path, tmp_path: Path) -> None:
    config = tmp_path / "graft.yaml"
    config.write_text("draft:\n  proposers: [ngram]\n")
    assert proposers_of(plan(tiny, config)) == ["ngram"]


def test_it_can_be_switched_off(tiny: Path) -> None:
    assert proposers_of(plan(tiny, trained_drafter=False)) == []


def test_other_targets_draft_as_before(tiny: Path, tmp_path: Path) -> None:
    other = write_tiny_model(tmp_path / "other", layers=2)
    made = plan(other)
    assert proposers_of(made) == [] and made.drafter == ""


def test_they_are_listed(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    typer.main.get_command(models.command("models"))(["list"], standalone_mode=False)
    lines = capsys.readouterr().out.splitlines()
    assert any(
        line.startswith("tiny/eagle3  drafter, comes with Graft")
        and line.endswith("accepts 2.60 (tree24_T0)")
        for line in lines
    )
    assert any(line.startswith("tiny/mtp  drafter") for line in lines)


def words_of(made: Plan) -> set[str]:
    return set(next(child for child in made.children if child.name == "draft").command)


def test_it_runs_as_is_fastest_here_unless_told_otherwise(tiny: Path, tmp_path: Path) -> None:
    config = tmp_path / "graft.yaml"
    config.write_text("draft:\n  draft_model_quantization: none\n  eagle_topk: 2\n")
    assert {"--draft-model-quantization=q8_0", "--eagle-topk=4"} <= words_of(plan(tiny))
    assert "--num-draft-tokens=4" in words_of(plan(tiny, precision="q8_0"))
    told = words_of(plan(tiny, config))
    assert {"--num-draft-tokens=16", "--feature-window=256"} <= told
    assert not {word for word in told if word.startswith(("--draft-model-q", "--eagle-topk=4"))}
    plain = words_of(plan(tiny, trained_drafter=False))
    assert not {word for word in plain if word.startswith(("--draft-model-q", "--num-steps"))}


@pytest.mark.parametrize(
    ("flags", "tiers"),
    [
        ({}, set()),
        ({"precision": "q8_0"}, {"--tiers=fixed"}),
        ({"precision": "q8_0", "tiers": "goodput"}, {"--tiers=goodput"}),
        ({"precision": "q8_0", "trained_drafter": False}, set()),
    ],
)
def test_rounds_of_rounded_weights_are_too_short_for_tries(
    tiny: Path, flags: dict[str, Any], tiers: set[str]
) -> None:
    gateway = next(child for child in plan(tiny, **flags).children if child.name == "gateway")
    assert {word for word in gateway.command if word.startswith("--tiers")} == tiers


@pytest.fixture
def blocks(tiny: Path, tmp_path: Path) -> Path:
    return write_gguf(tiny, tmp_path / "tiny.gguf", gguf.GGMLQuantizationType.Q4_1)


def test_a_file_with_blocks_drafts_for_its_float32_self(blocks: Path) -> None:
    made = plan(blocks)
    assert proposers_of(made) == ["merged=...", "standalone=...", "ngram"]
    assert made.drafter == "the model's own Q4_1 blocks, merged with n-gram look-up"
    words = words_of(made)
    assert {"--draft-model-quantization=stored", "--feature-window=256"} <= words
    assert {
        "--tree-deadline-ms=500",
        "--tiers=field",
        "--tier-config=long_chains",
    } <= gateway_words(made)


def gateway_words(made: Plan) -> set[str]:
    return set(next(child for child in made.children if child.name == "gateway").command)


def test_tiers_by_hand_leave_the_config_alone(blocks: Path) -> None:
    words = gateway_words(plan(blocks, tiers="goodput"))
    assert "--tiers=goodput" in words
    assert not {word for word in words if word.startswith("--tier-config")}


def test_served_from_its_blocks_it_does_not(blocks: Path) -> None:
    assert proposers_of(plan(blocks, precision="q4_1")) == []


def test_blocks_without_kernels_and_files_that_cannot_be_read_do_not_count(
    tiny: Path, tmp_path: Path
) -> None:
    other = write_gguf(tiny, tmp_path / "other.gguf", gguf.GGMLQuantizationType.Q5_0)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF")
    assert proposers_of(plan(other)) == []
    assert proposers_of(plan(broken)) == []
