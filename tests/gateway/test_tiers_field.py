"""The field's policy against its golden decisions, and its config files as they are."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graft.common.errors import InvalidArgument
from graft.common.tier import Tier
from graft.gateway.tiers.field import AdaptiveSteps, Slot, at_depth
from graft.gateway.tiers.field_config import PRESETS, SlotConfig, load, parse

CHAIN = Tier("eagle", num_steps=5, topk=1, num_draft_tokens=6)


def test_the_default_follows_the_golden_trace_down_to_one_step_and_up_to_seven() -> None:
    slot = Slot(load("default").slots[1], 5)
    assert slot.ema == 4.0
    seen = []
    for batch in range(60):
        correct = int(batch % 5 == 0) if batch < 25 else min(7, slot.steps)
        before = slot.steps
        slot.update([correct])
        if batch >= 14 and batch % 5 == 4:
            seen.append((batch + 1, round(slot.ema, 4), before, slot.steps))
    assert seen == [
        (15, 0.2583, 5, 3),
        (20, 0.1666, 3, 1),
        (25, 0.1365, 1, 1),
        (30, 0.7170, 1, 3),
        (35, 2.2519, 3, 3),
        (40, 2.7549, 3, 5),
        (45, 4.2643, 5, 5),
        (50, 4.7589, 5, 7),
        (55, 6.2656, 7, 7),
        (60, 6.7594, 7, 7),
    ]


def test_depth_zero_is_reached_left_and_measured_as_in_the_golden_trace() -> None:
    config = SlotConfig((0, 1, 3), update_interval=1, warmup_batches=0, down_hysteresis=0.0)
    slot = Slot(config, 3)
    seen = []
    for _ in range(7):
        slot.update([0])
        seen.append((round(slot.ema, 4), slot.steps))
    assert seen == [
        (1.6, 3), (1.28, 3), (1.024, 3), (0.8192, 3), (0.6554, 3), (0.5243, 3), (0.4194, 0),
    ]  # fmt: skip
    slot.update([0])
    assert (round(slot.ema, 4), slot.steps) == (0.4194, 1)
    slot.update([1])
    assert (round(slot.ema, 4), slot.steps) == (0.5355, 3)


def test_an_empty_batch_is_no_batch() -> None:
    slot = Slot(SlotConfig((1, 3), update_interval=1, warmup_batches=0), 3)
    assert not slot.update([]) and slot.ema == 2.0


def test_a_ceiling_walks_down_and_never_stops_a_rise() -> None:
    config = SlotConfig((1, 3, 7), 1.0, 1, 0, 0.0, -9.0, ceiling_coeff=1.5)
    slot = Slot(config, 7)
    slot.update([2])
    assert slot.steps == 3
    slot.update([3])
    assert slot.steps == 7


def test_each_range_of_batch_sizes_has_its_own_depth() -> None:
    params = AdaptiveSteps(load("default"), 3)
    assert [params.steps(size) for size in (1, 7, 8, 31, 32, 64, 1000)] == [3, 3, 3, 3, 1, 0, 0]
    for _ in range(40):
        params.update([0] * 8)
    assert params.steps(8) in (0, 1) and params.steps(1) == 3


def test_a_padded_batch_is_looked_up_by_what_it_is_padded_to() -> None:
    params = AdaptiveSteps(load("default"), 3, padded=[1, 8, 16])
    assert params.slot(5) is params.slot(8)
    assert params.slot(1) is not params.slot(8)


@pytest.mark.parametrize("name", PRESETS)
def test_presets_load(name: str) -> None:
    config = load(name)
    assert min(config.slots) == 1 and config.middle_steps in config.steps


def test_the_first_depth_is_the_middle_of_all() -> None:
    assert load("default").middle_steps == 3
    with pytest.raises(InvalidArgument, match="first depth is 4"):
        AdaptiveSteps(load("default"), 4)


DOCUMENTED = """{
  "ema_alpha": 0.2, "warmup_batches": 10, "update_interval": 5,
  "1": {"candidate_steps": [1, 3, 7], "up_hysteresis": 0.0, "down_hysteresis": -0.25},
  "8": {"candidate_steps": [1], "up_hysteresis": 0.0, "down_hysteresis": 0.0, "ceiling_coeff": 0}
}"""
FLAT = '{"candidate_steps": [1, 3, 7], "ema_alpha": 0.2, "warmup_batches": 4}'


def test_a_documented_file_loads_unchanged(tmp_path: Path) -> None:
    file = tmp_path / "adaptive.json"
    file.write_text(DOCUMENTED)
    slots = load(str(file)).slots
    assert list(slots) == [1, 8]
    assert slots[1].candidate_steps == (1, 3, 7) and slots[1].down_hysteresis == -0.25
    assert slots[8].candidate_steps == (1,) and slots[8].warmup_batches == 10


def test_a_file_without_slots_is_one_slot_for_every_batch() -> None:
    slots = parse(FLAT).slots
    assert list(slots) == [1] and slots[1].warmup_batches == 4


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{", "not JSON"),
        ("[]", "expected a JSON object"),
        ("{}", "no batch-size slot"),
        ('{"1": {"candidate_steps": []}}', "candidate_steps"),
        ('{"1": {"candidate_steps": [-1]}}', "candidate_steps"),
        ('{"1": {"candidate_steps": [true]}}', "candidate_steps"),
        ('{"1": {}}', "candidate_steps"),
        ('{"1": {"candidate_steps": [1], "speed": 3}}', "unknown keys"),
        ('{"1": {"candidate_steps": [1], "ema_alpha": "x"}}', "expected a number"),
        ('{"1": {"candidate_steps": [1], "update_interval": 0}}', "update_interval"),
    ],
)
def test_a_broken_file_is_refused_with_a_reason(text: str, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        parse(text)


def test_a_chain_keeps_one_node_a_level() -> None:
    assert at_depth(CHAIN, 3) == Tier("eagle", 3, 1, 4)
    assert at_depth(CHAIN, 7) == Tier("eagle", 7, 1, 8)
    assert at_depth(CHAIN, 0).off and at_depth(CHAIN, 0).proposer == "eagle"


def test_a_tree_keeps_its_width_and_its_nodes_a_level() -> None:
    base = Tier("ngram", num_steps=4, topk=2, num_draft_tokens=13)
    assert at_depth(base, 2) == Tier("ngram", 2, 2, 7)
    assert at_depth(base, 4) == base


@given(st.lists(st.integers(0, 7), max_size=200), st.sampled_from(PRESETS))
def test_the_depth_is_always_a_candidate(counts: list[int], preset: str) -> None:
    config = load(preset).slots[max(load(preset).slots)]
    slot = Slot(config, 3)
    for count in counts:
        slot.update([min(count, slot.steps)])
        assert slot.steps in config.candidate_steps
