from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from graft.common.tier import Tier
from graft.gateway.metrics import Metrics, RoundStages
from graft.gateway.record import SpeculationRecord

STAGES = RoundStages(draft=1000, wire=100, verify=5000, commit=10)


@st.composite
def rounds(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """(drafted, accepted, kept) of some rounds."""
    found = []
    for _ in range(draw(st.integers(0, 12))):
        drafted = draw(st.integers(0, 8))
        accepted = draw(st.integers(0, drafted))
        found.append((drafted, accepted, draw(st.integers(0, accepted + 1))))
    return found


@given(rounds(), rounds())
def test_records_and_metrics_count_the_same(
    one: list[tuple[int, int, int]], two: list[tuple[int, int, int]]
) -> None:
    metrics, merged = Metrics(), SpeculationRecord()
    for part in (one, two):
        record = SpeculationRecord(Tier("ngram", 8, 1, 9))
        for drafted, accepted, kept in part:
            record.add_round(drafted=drafted, accepted=accepted, kept=kept)
            metrics.round(
                tier="ngram", drafted=drafted, accepted=accepted, kept=kept, stages=STAGES
            )
        merged.merge(record)
    body = merged.as_body()
    assert 0 <= body["draft_acceptance_rate"] <= 1
    assert (metrics.num_drafted, metrics.num_accepted) == (
        body["num_draft_tokens"],
        body["num_accepted_draft_tokens"],
    )
    assert sum(body["acceptance_histogram"].values()) == body["num_spec_steps"]
    assert sum(body["accepted_per_position"]) == body["num_accepted_draft_tokens"]
    assert body["num_rounds"] == len(one) + len(two) == metrics.num_rounds


def test_a_perfect_drafter_has_rate_one_and_a_wrong_one_zero() -> None:
    perfect, wrong = SpeculationRecord(), SpeculationRecord()
    for _ in range(3):
        perfect.add_round(drafted=4, accepted=4, kept=5)
        wrong.add_round(drafted=4, accepted=0, kept=1)
    assert (perfect.acceptance_rate, perfect.mean_acceptance_length) == (1.0, 5.0)
    assert (wrong.acceptance_rate, wrong.mean_acceptance_length) == (0.0, 1.0)
    assert (perfect.accept_length, wrong.accept_length) == (5.0, 1.0)


def test_what_was_cut_off_is_not_accepted() -> None:
    record = SpeculationRecord()
    record.add_round(drafted=6, accepted=5, kept=2)
    assert (record.num_accepted, record.by_position) == (2, [1, 1])


def test_metrics_hold_no_created_lines_for_the_aliases() -> None:
    metrics = Metrics()
    metrics.round(tier="ngram", drafted=3, accepted=2, kept=3, stages=STAGES)
    lines = metrics.exposition().decode().splitlines()
    aliases = [line for line in lines if line.startswith("vllm:")]
    assert len(aliases) == 5
    assert all("_total" in line for line in aliases)
