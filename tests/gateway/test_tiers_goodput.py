"""The parts of the goodput policy: gauges, costs, survival, growth, changes, and decisions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graft.common.tier import Tier
from graft.gateway.tiers.change import Change
from graft.gateway.tiers.choose import Load, Offer, best, plain, rate
from graft.gateway.tiers.costs import Costs, VerifyTable
from graft.gateway.tiers.gauge import Gauge
from graft.gateway.tiers.goodput import Goodput
from graft.gateway.tiers.grow import best_nodes, expected_accepted
from graft.gateway.tiers.ledger import Ledger
from graft.gateway.tiers.replica import Replica
from graft.gateway.tiers.seen import EMPTY, LATE, Seen, sentence, word
from graft.gateway.tiers.starts import Starts
from graft.gateway.tiers.survival import Chances, Survival

CHAIN = Tier("eagle", 4, 1, 5)
OFFER = Offer(CHAIN, 16, 8)
LOAD = Load(1, 100)


def seen(accepted: int = 2, **fields: object) -> Seen:
    """A round of a chain of 4: 2 ms of drafting, 1 ms of wire, 20 ms of forward."""
    usual = Seen(accepted, 4, 4, 0.002, 0.003, 0.0, 0.020, 0.001, 5)
    return replace(usual, **fields)  # type: ignore[arg-type]


PLAIN = seen(0, num_drafted=0, depth=0, draft_s=0.0, wait_s=0.0, num_rows=1, missing="off")


def test_a_gauge_shrugs_at_one_outlier_and_follows_two() -> None:
    gauge = Gauge(0.001)
    for _ in range(5):
        gauge.add(0.010)
    assert not gauge.add(0.100) and gauge.get(0) < 0.02
    gauge.add(0.010)
    assert not gauge.add(0.100)
    assert gauge.add(0.100) and gauge.get(0) == pytest.approx(0.100)


def test_verify_times_between_two_sizes_are_on_a_line_and_follow_the_context() -> None:
    table = VerifyTable()
    table.add(1, 0, 0.020)
    table.add(5, 0, 0.028)
    curve = table.curve(1, 8, 0)
    assert curve is not None
    assert curve[3] == pytest.approx(0.024)
    assert curve[8] == pytest.approx(0.034)
    for _ in range(400):
        table.add(1, 3000, 0.030)
    longer = table.curve(1, 8, 3000)
    assert longer is not None and longer[1] > curve[1]


def test_two_late_trees_make_their_tier_late_from_then_on() -> None:
    costs = Costs(0.05)
    costs.add(seen(), CHAIN)
    rated = rate(CHAIN, Survival(50).chances(8), costs, LOAD)
    assert rated is not None and rated.tokens > 1
    late_round = seen(0, num_drafted=0, depth=0, missing=LATE)
    assert not costs.add(late_round, CHAIN)
    assert costs.add(late_round, CHAIN)
    late = rate(CHAIN, Survival(50).chances(8), costs, LOAD)
    assert late is not None and late.tokens == 1


def test_survival_counts_depths_reached_and_ranks_tried() -> None:
    survival = Survival(1e9)
    for _ in range(1000):
        survival.add(seen(2, ranks=(0, 1), rejected_children=2))
    chances = survival.chances(4)
    assert chances.first[0] > 0.98 and chances.first[1] < 0.02 and chances.first[2] < 0.02
    assert chances.hazards[1] == pytest.approx(0.5, abs=0.02)
    assert chances.offered == pytest.approx(1.0)


def test_a_leaf_that_was_reached_refuses_nothing() -> None:
    survival = Survival(1e9)
    for _ in range(1000):
        survival.add(seen(1, ranks=(0,), rejected_children=0))
    assert survival.chances(2).first[1] > 0.4


def test_empty_rounds_lower_what_is_offered_and_nothing_else() -> None:
    survival = Survival(1e9)
    before = survival.chances(2).first
    for _ in range(100):
        survival.add(seen(0, num_drafted=0, depth=0, missing=EMPTY))
    assert survival.chances(2).offered < 0.05
    assert survival.chances(2).first == before


def test_what_was_seen_fades() -> None:
    survival = Survival(20)
    for _ in range(200):
        survival.add(seen(4))
    for _ in range(200):
        survival.add(seen(0))
    assert survival.chances(1).first[0] < 0.05


@given(
    st.lists(st.floats(0.05, 0.95), min_size=3, max_size=6),
    st.floats(0.0, 0.6),
    st.integers(1, 4),
    st.integers(1, 24),
)
def test_the_best_tree_of_a_size_is_closed_under_parents_and_never_loses_by_a_node(
    first: list[float], hazard: float, width: int, size: int
) -> None:
    chances = Chances(first, [0.0, hazard, hazard, hazard], 1.0)
    nodes = best_nodes(chances, len(first), width, 24)
    values = [node.chance for node in nodes]
    assert values == sorted(values, reverse=True)
    depths = [node.depth for node in nodes]
    for place, depth in enumerate(depths):
        assert depth == 1 or depth - 1 in depths[:place]
    smaller = expected_accepted(nodes, len(first), width, size)
    assert expected_accepted(nodes, len(first), width, size + 1) >= smaller


def known_costs(wire_s: float = 0.001) -> Costs:
    costs = Costs(0.05)
    for _ in range(5):
        costs.add(PLAIN, None)
        costs.add(seen(wait_s=0.002 + wire_s), CHAIN)
    return costs


def test_depth_grows_only_while_the_rate_rises() -> None:
    costs = known_costs()
    shallow = best(OFFER, Chances([0.5] * 8, [0, 0, 0, 0], 1.0), costs, LOAD)
    deep = best(OFFER, Chances([0.95] * 8, [0, 0, 0, 0], 1.0), costs, LOAD)
    hopeless = best(OFFER, Chances([0.02] * 8, [0, 0, 0, 0], 1.0), costs, LOAD)
    base = plain(costs, LOAD)
    assert shallow and deep and hopeless and base
    assert shallow.tier.num_steps < deep.tier.num_steps == 8
    assert hopeless.rate < base.rate < shallow.rate < deep.rate


def test_a_wider_tree_is_taken_where_second_guesses_are_right_and_rows_are_free() -> None:
    costs = known_costs()
    offer = Offer(Tier("eagle", 4, 2, 9), 16, 8)
    wide = best(offer, Chances([0.4] * 8, [0, 0.9, 0.1, 0.1], 1.0), costs, LOAD)
    narrow = best(offer, Chances([0.4] * 8, [0, 0.0, 0.0, 0.0], 1.0), costs, LOAD)
    assert wide and narrow and wide.tier.topk > narrow.tier.topk == 1


def test_change_is_told_from_luck() -> None:
    change = Change()
    steady = [change.add(length, 4, [0.8] * 4) for length in (4, 2, 4, 1, 3) * 20]
    assert set(steady) == {""}
    told = [change.add(0, 4, [0.8] * 4) for _ in range(8)]
    assert told.index("fell") >= 5
    change.reset()
    assert [change.add(0, 4, [0.8] * 4, 1.0) for _ in range(8)].index("fell") < 5
    change.reset()
    assert "rose" in [change.add(4, 4, [0.3] * 4) for _ in range(8)]


def test_acceptance_that_collapses_ends_drafting_and_is_tried_again() -> None:
    pilot = Goodput(0.05).open("verify", [OFFER], 1, 100, 0.0)
    now = 0.0
    for _ in range(40):
        now += 0.024
        pilot.observe(PLAIN if pilot.tier.off else seen(3), now)
    assert not pilot.tier.off
    reasons = []
    for _ in range(200):
        now += 0.04
        switch = pilot.observe(
            PLAIN if pilot.tier.off else seen(0, wait_s=0.02, draft_s=0.019), now
        )
        if switch is not None:
            reasons.append((switch.reason, switch.probe, switch.after.off))
    left = next(place for place, (_, probe, off) in enumerate(reasons) if off and not probe)
    assert left <= 2
    assert ("probe", True, False) in reasons[left:]


def test_the_first_tier_is_the_default_and_later_sessions_begin_where_others_ended() -> None:
    shared = Goodput(0.05)
    first = shared.open("verify", [OFFER], 1, 100, 0.0)
    assert first.tier == CHAIN
    now = 0.0
    for _ in range(100):
        now += 0.024
        first.observe(PLAIN if first.tier.off else seen(4), now)
    first.close()
    assert shared.open("verify", [OFFER], 1, 100, now).tier.num_steps > 4


def test_labels_are_few_and_sentences_exact() -> None:
    words = {word(Tier("eagle", depth, 1, depth + 1)) for depth in range(0, 33)}
    assert words == {"off", "eagle-shallow", "eagle-middle", "eagle-deep"}
    assert sentence(Tier("eagle", 4, 2, 9, 3)) == "eagle 4x2, 9 nodes, 3 ahead"


LATE_ROUND = seen(0, num_drafted=0, depth=0, draft_s=0.0, num_rows=1, missing=LATE)


def warm() -> tuple[Goodput, float]:
    """A policy that knows plain rounds of 20 ms, and a drafter that pays on short prompts."""
    shared = Goodput(0.05)
    pilot = shared.open("verify", [OFFER], 1, 100, 0.0)
    now = 0.0
    for _ in range(80):
        now += 0.024
        pilot.observe(PLAIN if pilot.tier.off else seen(3), now)
    assert not pilot.tier.off
    pilot.close()
    return shared, now


def long_prompt(
    shared: Goodput, now: float, tokens: int, slowed_s: float = 0.040
) -> tuple[float, float, list[bool]]:
    """An answer on a machine where the drafter's own prefill takes the target's cores.

    While it drafts, trees are late and forwards take `slowed_s`, twice as long; one round more
    after it was told to stop. Returns the seconds it took, those of
    plain decoding, and where it was at tier 0.
    """
    pilot = shared.open("verify", [OFFER], 1, 3000, now)
    began, busy, waits = now, not pilot.tier.off, True
    off = []
    for place in range(tokens):
        off.append(pilot.tier.off)
        if busy:
            wait_s, waits = (0.05 if waits else 0.0), False
            round_ = replace(LATE_ROUND, wait_s=wait_s, forward_s=slowed_s, context=3000 + place)
        else:
            round_, waits = replace(PLAIN, context=3000 + place), True
        now += round_.seconds
        busy = not pilot.tier.off
        pilot.observe(round_, now)
    pilot.close()
    return now - began, tokens * PLAIN.seconds, off


def test_a_long_prompt_with_a_short_answer_is_not_much_slower_than_plain() -> None:
    shared, now = warm()
    took_s, plain_s, off = long_prompt(shared, now, 64)
    assert off.index(True) <= 5
    assert took_s < plain_s / 0.8


def test_forwards_beside_a_busy_drafter_do_not_make_plain_decoding_look_slow() -> None:
    shared, _ = warm()
    costs = shared.replica("verify").costs
    before = plain(costs, Load(1, 100))
    for _ in range(50):
        costs.add(replace(LATE_ROUND, wait_s=0.0, forward_s=0.060), None, crowded=True)
    after = plain(costs, Load(1, 100))
    assert before and after and after.seconds == pytest.approx(before.seconds, rel=0.01)


def test_plain_rounds_that_verify_calls_late_are_timed_at_tier_zero() -> None:
    shared, now = warm()
    pilot = shared.open("verify", [OFFER], 1, 100, now)
    slower = replace(PLAIN, forward_s=0.060, missing=LATE)
    for _ in range(100):
        now += slower.seconds
        pilot.observe(slower if pilot.tier.off else seen(0, wait_s=0.03), now)
    after = plain(shared.replica("verify").costs, Load(1, 100))
    assert after and after.seconds == pytest.approx(slower.seconds, rel=0.1)


def test_where_starts_cost_more_than_they_gain_sessions_begin_without_drafts() -> None:
    shared, now = warm()
    ratios = []
    for _ in range(6):
        took_s, plain_s, off = long_prompt(shared, now, 16, 0.060)
        now += took_s + 0.1
        ratios.append(took_s / plain_s)
    assert off[0]
    assert ratios[-1] < 1.05
    assert not shared.open("verify", [OFFER], 1, 100, now).tier.off


def test_drafting_that_slows_every_forward_ends_before_it_has_lost_much() -> None:
    shared, now = warm()
    pilot = shared.open("verify", [OFFER], 1, 100, now)
    lost_s = 0.0
    for _ in range(100):
        round_ = PLAIN if pilot.tier.off else seen(0, wait_s=0.010, forward_s=0.045)
        now += round_.seconds
        lost_s += round_.seconds - (round_.accepted + 1) * PLAIN.seconds
        pilot.observe(round_, now)
    assert lost_s < 0.5


def test_a_ledger_forgets_gains_before_a_loss_and_losses_of_long_ago() -> None:
    ledger = Ledger()
    ledger.add(-1.0, 0.0)
    ledger.add(0.1, 1.0)
    ledger.add(0.05, 2.0)
    assert ledger.lost_s(2.0) == pytest.approx(0.15)
    assert ledger.lost_s(6.3) == pytest.approx(0.05)
    ledger.add(-0.2, 6.4)
    assert ledger.lost_s(6.4) == 0.0


def test_going_back_and_forth_counts_and_fades_and_the_first_time_does_not() -> None:
    replica = Replica(0.05)
    replica.num_open = 1
    replica.turned(10.0)
    assert replica.late_turns(10.0) == 0.0
    replica.turned(12.0)
    assert replica.late_turns(12.0) == pytest.approx(1.0)
    replica.turned(32.0)
    assert replica.late_turns(32.0) < 0.8


def test_what_a_start_costs_is_known_by_length_and_forgotten() -> None:
    starts = Starts()
    starts.ended(2.0)
    starts.add("eagle", 3000, 0.9, 10.0)
    assert starts.worth("eagle", 100, 0.4, 11.0)
    assert not starts.worth("eagle", 3100, 0.4, 11.0)
    assert starts.worth("eagle", 3100, 0.4, 100.0)
    assert starts.worth("ngram", 3100, 0.4, 11.0)
