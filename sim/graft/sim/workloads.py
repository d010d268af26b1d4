"""The workloads that policies are compared on. Only numbers."""

from __future__ import annotations

import random
from dataclasses import replace

from graft.common.tier import Tier
from graft.sim.world import FP32, Q4, Phase, Skill, Workload

# Chances by depth: an EAGLE-like drafter on code, on chat and on free writing at temperature 1, and
# n-gram look-up on text that repeats itself and on text that does not.
CODE = Skill((0.86, 0.85, 0.84, 0.83, 0.82))
CHAT = Skill((0.68, 0.64, 0.60, 0.57, 0.55))
FREE = Skill((0.36, 0.30, 0.27, 0.25))
WORSE = Skill((0.12, 0.10))
COPIES = Skill((0.9, 0.93, 0.94, 0.95), offered=0.85)
NO_COPIES = Skill((0.3, 0.4, 0.5), offered=0.25)

EAGLE = Tier("eagle", 4, 1, 5)
EAGLE_TREE = Tier("eagle", 4, 2, 9)
NGRAM = Tier("ngram", 6, 1, 7)

CHAINS = tuple(Tier("eagle", depth, 1, depth + 1) for depth in (1, 2, 3, 4, 5, 7))
TREES = (Tier("eagle", 3, 2, 7), Tier("eagle", 4, 2, 13), Tier("eagle", 5, 4, 24))
NGRAMS = (Tier("ngram", 3, 1, 4), Tier("ngram", 6, 1, 7), Tier("ngram", 12, 1, 13))


def _one(skill: Skill, seconds: float, rtt_ms: float = 0.5, num_sessions: int = 1) -> Phase:
    return Phase(seconds, {"eagle": skill}, rtt_ms / 1e3, num_sessions)


def _steady(
    name: str, skill: Skill, rtt_ms: float, batch: int, seconds: float = 14.0, **kind: object
) -> Workload:
    machine = Q4 if kind.get("q4") else FP32
    tree = bool(kind.get("tree"))
    return Workload(
        name,
        "stationary",
        machine,
        (_one(skill, seconds, rtt_ms, batch),),
        (EAGLE_TREE if tree else EAGLE,),
        CHAINS + TREES if tree else CHAINS,
    )


def _oscillating() -> Workload:
    """Acceptance just above and just below where drafting pays, by turns of four seconds."""
    above, below = Skill((0.4, 0.38, 0.36)), Skill((0.15, 0.13))
    phases = tuple(_one(above if turn % 2 else below, 4.0, 2.0) for turn in range(30))
    return Workload("oscillating", "oscillating", FP32, phases, (EAGLE,), CHAINS)


def _shifting() -> Workload:
    """Prompt class, distance and load change every ten seconds or so."""
    phases = (
        _one(CODE, 12, 0.5),
        _one(FREE, 10, 15),
        _one(CHAT, 10, 0.5, 8),
        _one(CODE, 10, 12),
        _one(WORSE, 10, 5),
        _one(CODE, 10, 0.5, 4),
        _one(FREE, 10, 0.5, 16),
        _one(CHAT, 12, 2),
    )
    return Workload("shifting", "shifting", FP32, phases, (EAGLE,), CHAINS)


def _slowed() -> Workload:
    """A drafter ten times as slow for a while, then as before."""
    usual = _one(CODE, 10)
    return Workload(
        "slowed-10x", "slowed", FP32, (usual, replace(usual, slow=10.0), usual), (EAGLE,), CHAINS
    )


def _two(name: str, eagle: Skill, ngram: Skill) -> Workload:
    phase = Phase(14.0, {"eagle": eagle, "ngram": ngram})
    return Workload(name, "stationary", FP32, (phase,), (EAGLE, NGRAM), CHAINS + NGRAMS)


def _unseen(number: int, dice: random.Random) -> Workload:
    """A steady workload that nobody chose."""
    machine = dice.choice((FP32, FP32, Q4))
    skill = dice.choice((CODE, CHAT, FREE, WORSE))
    phase = _one(skill, 14.0, dice.uniform(0.5, 25.0), dice.choice((1, 1, 2, 4, 8)))
    return Workload(f"unseen-{number}", "stationary", machine, (phase,), (EAGLE,), CHAINS)


def _unseen_shifting(number: int, dice: random.Random) -> Workload:
    phases = tuple(
        _one(
            dice.choice((CODE, CHAT, FREE, WORSE)),
            10.0,
            dice.uniform(0.5, 20.0),
            dice.choice((1, 1, 2, 4, 8)),
        )
        for _ in range(8)
    )
    name = f"unseen-shifting-{number}"
    return Workload(name, "shifting", FP32, phases, (EAGLE,), CHAINS)


WORKLOADS = (
    _steady("code-near", CODE, 0.5, 1),
    _steady("chat-near", CHAT, 0.5, 1),
    _steady("free-far", FREE, 25, 1),
    _steady("code-far", CODE, 25, 1, 28.0),
    _steady("chat-batch-8", CHAT, 0.5, 8),
    _steady("hopeless", WORSE, 1, 1),
    _steady("code-q4", CODE, 0.5, 1, 6.0, q4=True),
    _steady("chat-tree", CHAT, 0.5, 1, tree=True),
    _two("copies-two-proposers", CHAT, COPIES),
    _two("chat-two-proposers", CHAT, NO_COPIES),
    _shifting(),
    _oscillating(),
    _slowed(),
)

# Drawn, not chosen: no number of the policy was set by what it gets on these.
_DICE = random.Random(2026)
UNSEEN = (
    *(_unseen(number, _DICE) for number in range(1, 7)),
    *(_unseen_shifting(number, _DICE) for number in range(1, 5)),
)
