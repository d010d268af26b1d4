"""Cards of trained drafters: counts of the corpus, tables, plots, and what is missing."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import typer

from graft.bench.card import Card, read_run, write_card
from graft.cli import models
from graft.common.errors import InvalidArgument
from graft.draft.shipped import shipped_for
from graft.testing.checkpoints import write_eagle3
from graft.testing.models import write_tiny_model

RESULTS = {
    "chain4_T0": 2.13,
    "tree24_T0": 2.61,
    "per_position": [0.6, 0.3, 0.15],
    "spread": {"chain4_T0": 0.04},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """What a short training leaves behind."""
    target = write_tiny_model(tmp_path / "tiny", layers=6)
    folder = write_eagle3(tmp_path / "out" / "eagle3", target)
    corpus = tmp_path / "out" / "corpus"
    corpus.mkdir()
    answers = [
        {"id": i, "tokens": list(range(10 + i)), "prompt_len": 4, "temperature": 0.7 * (i % 2)}
        for i in range(4)
    ]
    (corpus / "answers-00000.jsonl").write_text("\n".join(map(json.dumps, answers)) + "\n")
    (corpus / "plan.json").write_text(json.dumps({"seed": 3, "synth": 100, "layers": [2, 3, 6]}))
    (corpus / "draft_vocab.json").write_text(json.dumps({"ids": [1, 2, 3], "coverage": 0.913}))
    plan = {"steps": 200, "accumulate": 2, "window": 64, "windows": 4, "rows": 51_200, "seed": 7}
    (folder / "plan.json").write_text(json.dumps(plan))
    speed = {"rows_per_s": 102_400 / 90}
    steps = [{"step": i + 1, "held": False, "loss": 4.0 - i / 100, **speed} for i in range(200)]
    looks = [
        {"step": step, "held": True, "agree_1": 0.2 + step / 1000, "accept_length": 1.2}
        for step in (100, 200)
    ]
    lines = [*steps, *looks]
    (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    return folder


def test_a_card_tells_data_training_and_results(tmp_path: Path, run: Path) -> None:
    out = tmp_path / "tiny" / "eagle3"
    card = Card("eagle3", "tiny", read_run(run), RESULTS, ["A note."])
    written = {path.name for path in write_card(card, out)}
    assert written == {path.name for path in out.iterdir()}
    told = json.loads((out / "card.json").read_text())
    assert told["results"]["tree24_T0"] == 2.61
    assert told["training"]["steps"] == 200
    assert told["training"]["rows"] == 102_400
    assert told["training"]["times_through_the_corpus"] == 2.0
    assert told["training"]["minutes"] == 1.5
    assert told["corpus"]["tokens"] == 10 + 11 + 12 + 13
    assert told["corpus"]["tokens_of_answers"] == 46 - 16
    assert told["corpus"]["share_written_greedily"] == 0.5
    text = (out / "README.md").read_text()
    assert "| `chain4_T0` | 2.13 | 0.04 |" in text
    assert "| 2 | 30.0% | 50.0% |" in text
    assert "| share of answers in it | 0.913 |" in text
    assert "| agree_1 | 0.300 | 0.400 |" in text
    assert text.endswith("A note.\n")
    for plot in ("loss.svg", "acceptance.svg"):
        assert f"({plot})" in text
        assert ElementTree.parse(out / plot).getroot().tag == "{http://www.w3.org/2000/svg}svg"
    # 200 steps are thinned to means of four.
    assert (out / "loss.svg").read_text().count("<circle") == 50


def test_a_run_without_a_log_or_results_has_a_shorter_card(tmp_path: Path, run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    out = tmp_path / "short"
    write_card(Card("eagle3", "tiny", read_run(run), {}), out)
    text = (out / "README.md").read_text()
    assert "Loss" not in text and "What it accepts" not in text
    assert not list(out.glob("*.svg"))


def test_a_folder_without_a_checkpoint_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"has no config\.json, expected a run"):
        read_run(tmp_path)


def test_what_the_command_writes_is_found_as_shipped(tmp_path: Path, run: Path) -> None:
    results = tmp_path / "results.txt"
    results.write_text(f"some table\n{json.dumps({'eagle3': RESULTS})}\n")
    out, target = tmp_path / "drafters" / "tiny" / "eagle3", tmp_path / "tiny"
    words = ["card", str(run), str(out), f"--results={results}", f"--model={target}"]
    typer.main.get_command(models.command("models"))(words, standalone_mode=False)
    (found,) = shipped_for(str(target), tmp_path / "drafters")
    assert (found.proposer, found.way, found.accept_length) == ("eagle3", "tree24_T0", 2.61)


def test_results_of_another_drafter_are_one_sentence(tmp_path: Path, run: Path) -> None:
    results = tmp_path / "results.json"
    results.write_text(json.dumps({"eagle3": {"absent": "not asked for"}}))
    words = ["card", str(run), str(tmp_path / "x"), f"--results={results}"]
    with pytest.raises(InvalidArgument, match="eagle3 was left out: not asked for"):
        typer.main.get_command(models.command("models"))(words, standalone_mode=False)
