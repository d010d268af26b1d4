"""Accept length of drafters: the sums, and a whole run against a tiny cluster."""

from __future__ import annotations

from pathlib import Path

import pytest

from graft.bench import prompts
from graft.bench.accept_length import Counted, Measured, Way, measure
from graft.bench.prompts import Prompt, from_all_categories
from graft.common.errors import GraftError
from graft.testing.checkpoints import write_eagle3
from graft.testing.cluster import running_cluster
from graft.testing.dflash_checkpoints import write_dflash
from graft.testing.models import write_tiny_model

QUESTIONS = [Prompt("a b c a b c a b c a b", "letters"), Prompt("Count to ten.", "numbers")]
CHAIN = {"num_steps": 4, "topk": 1, "num_draft_tokens": 5}


def test_rounds_of_all_answers_weigh_alike() -> None:
    one = Counted("a", 10, 10, 30, 40, (10, 6, 4))
    two = Counted("b", 30, 20, 30, 80, (0, 0, 0))
    measured = Measured("eagle3", "chain4_T0", (one, two))
    assert measured.accept_length == 60 / 40
    assert measured.num_plain_rounds == 10
    assert measured.per_position == [round(10 / 30, 4), 0.2, round(4 / 30, 4)]
    assert (measured.within("a"), measured.within("b")) == (3.0, 1.0)
    assert measured.within("c") is None
    assert measured.spread == pytest.approx(((30 - 15) ** 2 * 4) ** 0.5 / 40)


def test_a_way_is_named_by_what_is_in_force() -> None:
    assert Way("eagle3", {}).name({**CHAIN, "proposer": "eagle3"}) == "chain4_T0"
    tree = {"num_steps": 7, "topk": 8, "num_draft_tokens": 24}
    assert Way("eagle3", {}, 1.0).name(tree) == "tree24_T1"


def test_a_limit_takes_as_many_of_every_category() -> None:
    rows = [Prompt(f"{i}", "few") for i in range(2)] + [Prompt(f"{i}", "many") for i in range(98)]
    taken = from_all_categories(rows, 10)
    assert [one.category for one in taken] == ["few"] * 2 + ["many"] * 8
    assert [one.text for one in taken[2:4]] == ["0", "12"]
    assert from_all_categories(rows, None) == rows
    assert len(from_all_categories(prompts.read(), 7)) == 7


async def test_every_way_is_counted_by_the_services(tmp_path: Path) -> None:
    target = write_tiny_model(tmp_path / "tiny", layers=6)
    eagle3 = write_eagle3(tmp_path / "eagle3", target)
    dflash = write_dflash(tmp_path / "dflash", target)
    draft = {
        "model": str(target),
        "proposers": ["ngram", f"eagle3={eagle3}", f"dflash={dflash}"],
    }
    ways = [
        Way("eagle3", CHAIN),
        Way("eagle3", {"num_steps": 3, "topk": 4, "num_draft_tokens": 9}, 1.0),
        Way("dflash", {}),
        Way("ngram", {}),
    ]
    untouched = {"trim_trees": False}  # else a busy machine has most of them cut to nothing
    slow = {"tree_deadline_ms": 10_000}
    async with running_cluster(target, verify=untouched, draft=draft, gateway=slow) as up:
        found = await measure(
            up.url, ways, QUESTIONS, max_tokens=16, clients=2, absent={"mtp": "not here"}
        )
    answer = found.as_json()
    assert list(answer) == ["eagle3", "mtp", "dflash", "ngram", "merged"]
    assert list(answer["eagle3"]) == ["chain4_T0", "tree9_T1", "per_position", "spread"]
    assert answer["mtp"] == {"absent": "not here"}
    assert answer["merged"] == {"absent": "not asked for"}
    for one in found.measured:
        assert one.accept_length >= 1.0
        assert sum(answer.num_tokens for answer in one.answers) <= 2 * 15
    # Only the round that may give one token has nothing to draft, and one before a drafter joined.
    assert found.measured[0].num_plain_rounds <= 2 * len(QUESTIONS) + 2
    page = found.page({})
    assert [len(table.rows) for table in page.tables] == [4, 4, 4]
    assert page.notes == ("mtp is left out: not here",)


async def test_a_drafter_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    async with running_cluster(write_tiny_model(tmp_path / "tiny")) as up:
        with pytest.raises(GraftError, match="no draft replica has the proposer 'eagle3'"):
            await measure(up.url, [Way("eagle3", CHAIN)], QUESTIONS, max_tokens=4, clients=2)
