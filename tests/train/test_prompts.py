"""Prompt files: what rows mean, and an order whose every part is mixed as the whole."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from graft.common.errors import InvalidArgument
from graft.train.prompts import OWN, read_slots
from graft.train.speech import whole_sentences


def _file(folder: Path, name: str, rows: list[dict[str, object]]) -> Path:
    path = folder / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_every_part_of_the_order_is_mixed_as_the_whole(tmp_path: Path) -> None:
    few = _file(tmp_path, "few.jsonl", [{"prompt": f"few {i}"} for i in range(10)])
    many = _file(tmp_path, "many.jsonl", [{"question": f"many {i}"} for i in range(40)])

    slots = read_slots([few, many], 50, seed=1)

    for start in range(0, 100, 20):
        kinds = Counter(slot.id.split("-")[0] for slot in slots[start : start + 20])
        assert kinds == {"few": 2, "many": 8, "synth": 10}


def test_openings_take_turns_by_their_weight(tmp_path: Path) -> None:
    rows = _file(tmp_path, "rows.jsonl", [{"opening": "A", "weight": 3}, {"opening": "B"}])

    slots = read_slots([rows], 12, seed=1)

    opened = Counter(slot.opening.text for slot in slots if slot.opening)
    assert opened == {"A": 9, "B": 3}
    assert all(slot.source == "synth" for slot in slots)


def test_more_synthesis_keeps_what_was_there(tmp_path: Path) -> None:
    rows = _file(tmp_path, "rows.jsonl", [{"opening": "A"}, {"opening": "B"}, {"prompt": "c"}])

    few = {slot.id: slot for slot in read_slots([rows], 5, seed=1)}
    more = {slot.id: slot for slot in read_slots([rows], 9, seed=1)}

    assert few.items() <= more.items()


def test_a_row_that_asks_nothing_is_named(tmp_path: Path) -> None:
    rows = _file(tmp_path, "rows.jsonl", [{"prompt": "a"}, {"answer": "b"}])

    with pytest.raises(InvalidArgument, match=r"rows\.jsonl line 2"):
        read_slots([rows], 0, seed=0)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"cannot read .*none\.jsonl"):
        read_slots([tmp_path / "none.jsonl"], 0, seed=0)


def test_the_projects_own_file_has_all_kinds_and_no_row_twice() -> None:
    rows = [json.loads(line) for line in OWN.read_text(encoding="utf-8").splitlines()]
    texts = [json.dumps([row.get("prompt"), row.get("turns"), row.get("opening")]) for row in rows]

    assert len(set(texts)) == len(texts) > 400
    assert {row["kind"] for row in rows} >= {
        "writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities",
        "translation", "summary", "qa", "rag",
    }  # fmt: skip
    assert len(read_slots([OWN], 100, seed=0)) == 100 + sum("opening" not in row for row in rows)


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("One. Two is cut", "One."),
        ('He said "no." And then', 'He said "no."'),
        ("It costs 3.50 and is", "It costs 3.50 and is"),
        ("nothing is whole", "nothing is whole"),
    ],
)
def test_a_text_that_was_cut_loses_its_unfinished_sentence(text: str, whole: str) -> None:
    assert whole_sentences(text) == whole
