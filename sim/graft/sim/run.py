"""Runs one policy through one workload on a virtual clock. Knows how rounds follow one another.

The policy's own objects decide; they see commits and nothing of the world behind them.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

from graft.common.tier import Tier
from graft.gateway.tiers.choose import Offer
from graft.gateway.tiers.controller import Pilot, Policy
from graft.gateway.tiers.seen import EMPTY, LATE, Seen
from graft.sim.world import (
    BESIDE_S,
    DEADLINE_S,
    Cost,
    Phase,
    Shape,
    Workload,
    cost,
    effect_of,
    grow,
    mean_rate,
)

SESSION_S = 8.0
ARRIVAL_S = 0.1
_NOISE = 0.06
_SPIKE_SHARE = 0.005
_MOMENT_S = 0.02
_MAX_PEERS = 8
_PROMPT = 200


@dataclass(slots=True)
class Track:
    """What came of a run: time and expected tokens after every round, and the decisions.

    expected: tokens with the luck of acceptance averaged out, which the policy never sees.
    drawn: tokens as the dice fell.
    """

    times: list[float] = field(default_factory=lambda: [0.0])
    expected: list[float] = field(default_factory=lambda: [0.0])
    drawn: int = 0
    switches: int = 0
    probes: int = 0
    tiers: list[tuple[float, Tier, str]] = field(default_factory=list)


@dataclass(slots=True)
class _Luck:
    """Dice of one run. Sessions and the machine's moments are the same for every policy."""

    seed: int
    dice: random.Random = field(init=False)
    effects: list[float] = field(init=False)
    _machine: random.Random = field(init=False)
    _moments: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        sessions = random.Random(self.seed ^ 0x5EED)
        self.effects = [effect_of(sessions.random()) for _ in range(64)]
        self._machine = random.Random(self.seed ^ 0xC0DE)
        self._moments = []

    def noise(self) -> float:
        """A factor near 1, now and then 2, as a shared machine has it."""
        return _factor(self.dice)

    def machine(self, now: float) -> float:
        """The same for a forward that begins at a moment: other policies meet it then, too."""
        place = int(now / _MOMENT_S)
        while len(self._moments) <= place:
            self._moments.append(_factor(self._machine))
        return self._moments[place]


def _factor(dice: random.Random) -> float:
    spike = 2.0 if dice.random() < _SPIKE_SHARE else 1.0
    return spike * (1.0 + _NOISE * (dice.random() + dice.random() - 1.0))


def offers(workload: Workload) -> list[Offer]:
    """The proposers as a draft service would describe them."""
    return [Offer(base, 64, 16) for base in workload.bases]


def fixed_rates(workload: Workload, seed: int, tier: Tier) -> float:
    """Tokens a second of a tier that never changes: exact, by phases and sessions."""
    return fixed_tokens(workload, seed, tier)(workload.seconds) / workload.seconds


def ramped(phases: Sequence[Phase]) -> list[Phase]:
    """The phases, with new sessions coming one after another, as their prefills let them."""
    found: list[Phase] = []
    former = phases[0].num_sessions
    for phase in phases:
        coming = range(former + 1, phase.num_sessions)
        found += [replace(phase, seconds=ARRIVAL_S, num_sessions=count) for count in coming]
        found.append(replace(phase, seconds=phase.seconds - ARRIVAL_S * len(coming)))
        former = phase.num_sessions
    return found


def fixed_tokens(workload: Workload, seed: int, tier: Tier) -> Callable[[float], float]:
    """Expected tokens by a time, of a tier that never changes."""
    luck = _Luck(seed)
    mean_noise = 1.0 + _SPIKE_SHARE
    knots = [(0.0, 0.0)]
    begin = 0.0
    for phase in ramped(workload.phases):
        end = begin + phase.seconds
        at = begin
        while at < end - 1e-9:
            number = int(at / SESSION_S + 1e-9)
            stop = min(end, (number + 1) * SESSION_S)
            rate = mean_rate(workload, phase, luck.effects[number], tier) / mean_noise
            knots.append((stop, knots[-1][1] + rate * (stop - at)))
            at = stop
        begin = end
    return lambda time: _at(knots, time)


def _at(knots: list[tuple[float, float]], time: float) -> float:
    for (low, low_y), (high, high_y) in pairwise(knots):
        if time <= high:
            return low_y + (high_y - low_y) * (time - low) / (high - low)
    return knots[-1][1]


def run(workload: Workload, seed: int, policy: Policy, *, peers: bool = False) -> Track:
    """One run. With `peers` every session of a batch has a pilot of its own, for batch policies."""
    luck, track = _Luck(seed), Track()
    draw = luck.dice.random
    proposers = offers(workload)
    now, total, context = 0.0, 0.0, _PROMPT
    ends: list[float] = []
    phases = ramped(workload.phases)
    for phase in phases:
        ends.append((ends[-1] if ends else 0.0) + phase.seconds)
    place, number = 0, -1
    pilots: list[Pilot] = []
    in_force = Tier()
    expecting = True
    prices: dict[tuple[int, Tier], Cost] = {}
    while now < ends[-1]:
        while now >= ends[place]:
            place += 1
        phase = phases[place]
        wanted = min(phase.num_sessions, _MAX_PEERS) if peers else 1
        if int(now / SESSION_S) != number or len(pilots) != wanted:
            number = int(now / SESSION_S)
            _close(pilots)
            context = _PROMPT
            pilots = [
                policy.open("verify", proposers, phase.num_sessions, context, now)
                for _ in range(wanted)
            ]
            in_force, expecting = pilots[0].tier, True
        effect = luck.effects[number]
        tier = in_force
        in_force = pilots[0].tier  # a change arrives while the next round's tree is on its way
        shape = None if tier.off else grow(phase.skills[tier.proposer], effect, tier)
        priced = prices.get((place, tier))
        if priced is None:
            num_nodes = 1 if shape is None else len(shape.children)
            priced = prices[place, tier] = cost(workload, phase, tier, num_nodes)
        seen, tokens, seconds, expecting = _round(
            phase, tier, shape, priced, expecting, (luck, now), context
        )
        now += seconds
        total += tokens
        context += seen.accepted + 1
        track.drawn += seen.accepted + 1
        track.times.append(now)
        track.expected.append(total)
        switch = pilots[0].observe(seen, now)
        for pilot in pilots[1:]:
            pilot.observe(_again(workload, phase, effect, tier, seen, draw), now)
        if switch is not None:
            track.tiers.append((now, switch.after, switch.reason))
            if switch.probe:
                track.probes += 1
            else:
                track.switches += 1
            if tier.off and not switch.after.off:
                expecting = True
    _close(pilots)
    return track


def _close(pilots: list[Pilot]) -> None:
    for pilot in pilots:
        pilot.close()


def _round(
    phase: Phase,
    tier: Tier,
    shape: Shape | None,
    priced: Cost,
    expecting: bool,
    moment: tuple[_Luck, float],
    context: int,
) -> tuple[Seen, float, float, bool]:
    """One round: what its commit tells, expected tokens, seconds, and whether a tree is awaited."""
    luck, now = moment
    draw, noise = luck.dice.random, luck.machine(now)
    batch = phase.num_sessions
    if shape is None:
        forward_s = (priced.plain_s - BESIDE_S) * noise
        seen = Seen(
            0, 0, 0, 0.0, 0.0, 0.0, forward_s, BESIDE_S, batch, batch, context, missing="off"
        )
        return seen, 1.0, forward_s + BESIDE_S, True
    skill = phase.skills[tier.proposer]
    num_nodes = len(shape.children)
    draft_s = priced.draft_s * luck.noise()
    wait_s = draft_s + priced.wire_s * luck.noise()
    if wait_s > DEADLINE_S:
        waited = DEADLINE_S if expecting else 0.0
        forward_s = (priced.plain_s - BESIDE_S) * noise
        seen = Seen(
            0, 0, 0, 0.0, waited, 0.0, forward_s, BESIDE_S, batch, batch, context, missing=LATE
        )
        return seen, 1.0, waited + forward_s + BESIDE_S, False
    if draw() >= skill.offered:
        forward_s = (priced.plain_s - BESIDE_S) * noise
        seen = Seen(
            0, 0, 0, 0.0, wait_s, 0.0, forward_s, BESIDE_S, batch, batch, context, missing=EMPTY
        )
        return seen, 1.0, wait_s + forward_s + BESIDE_S, True
    forward_s = (priced.tree_s - BESIDE_S) * noise
    ranks, rejected = shape.walk([draw() for _ in range(shape.depth)])
    seen = Seen(
        len(ranks),
        num_nodes - 1,
        shape.depth,
        draft_s,
        wait_s,
        0.0,
        forward_s,
        BESIDE_S,
        batch * num_nodes,
        batch,
        context,
        ranks,
        rejected,
    )
    return seen, 1.0 + shape.expected, wait_s + forward_s + BESIDE_S, True


def _again(
    workload: Workload,
    phase: Phase,
    effect: float,
    tier: Tier,
    seen: Seen,
    draw: Callable[[], float],
) -> Seen:
    """The same round of another session of the batch, with luck of its own."""
    if not seen.num_drafted:
        return seen
    shape = grow(phase.skills[tier.proposer], effect, tier)
    ranks, rejected = shape.walk([draw() for _ in range(shape.depth)])
    return Seen(
        len(ranks),
        seen.num_drafted,
        seen.depth,
        seen.draft_s,
        seen.wait_s,
        seen.queue_s,
        seen.forward_s,
        seen.choice_s,
        seen.num_rows,
        seen.num_sessions,
        seen.context,
        ranks,
        rejected,
    )
