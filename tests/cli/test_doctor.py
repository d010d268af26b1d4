"""What `graft doctor` says about drafting; a service that runs is asked in the end-to-end tests."""

from __future__ import annotations

from pathlib import Path

from graft.cli.doctor import examine
from graft.cli.drafters import served, startable
from graft.common.model_files import EMBEDDED
from graft.draft.server import PROPOSERS
from graft.draft.shipped import shipped_for


def test_every_proposer_is_named_with_what_it_takes() -> None:
    lines = dict(line.split(": ", 1) for line in startable(EMBEDDED))
    assert list(lines) == list(PROPOSERS)
    assert lines["ngram"] == "needs no checkpoint"
    ours = {one.proposer: str(one.folder) for one in shipped_for(EMBEDDED)}
    for name in set(PROPOSERS) - {"ngram", "merged"}:
        assert ours.get(name, f"--proposers {name}=PATH") in lines[name]


def test_a_target_without_drafters_of_its_own_needs_them_named(tmp_path: Path) -> None:
    lines = dict(line.split(": ", 1) for line in startable(str(tmp_path / "nowhere")))
    assert lines["eagle3"] == "needs a checkpoint, --proposers eagle3=PATH"


def test_where_no_draft_service_answers_the_report_says_what_could_be_started() -> None:
    assert served("127.0.0.1:1") == []
    found = [one.detail for one in examine("127.0.0.1:1") if one.what == "drafter"]
    assert found == list(startable(EMBEDDED))
