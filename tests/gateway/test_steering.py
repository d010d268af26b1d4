"""The shell around a policy: what it tells metrics and people, and which tier is in force."""

from __future__ import annotations

import asyncio
from pathlib import Path

from graft.common.tier import Tier
from graft.gateway.metrics import Metrics
from graft.gateway.steering import Steering, cut_offers
from graft.gateway.tiers.choose import Offer
from graft.gateway.tiers.controller import FixedPilot, make_policy
from graft.gateway.tiers.seen import Seen, Switch
from graft.testing.front import running_front
from graft.testing.scripted_draft import ScriptedDraft
from graft.testing.scripted_verify import Script
from graft.v1.verify_pb2 import PlainReason, RoundTiming, TokensCommitted

CHAIN = Tier("eagle", 4, 1, 5)
OFFERS = [Offer(CHAIN, 16, 8)]


def round_of(accepted: int, **fields: object) -> TokensCommitted:
    message = TokensCommitted(
        tokens=[1] * (accepted + 1),
        accepted_count=accepted,
        node_count=4,
        depth=4,
        prefix_length=50,
        timing=RoundTiming(
            draft_micros=2000,
            tree_wait_micros=3000,
            forward_micros=20_000,
            batch_row_count=10,
            batch_session_count=2,
        ),
        accepted_ranks=[0] * accepted,
        rejected_child_count=1,
    )
    message.MergeFrom(TokensCommitted(**fields))  # type: ignore[arg-type]
    return message


class Scripted(FixedPilot):
    """Goes to tier 0 at the second round, and remembers what it was shown."""

    def __init__(self) -> None:
        super().__init__(CHAIN)
        self.shown: list[Seen] = []

    def observe(self, seen: Seen, now: float) -> Switch | None:
        self.shown.append(seen)
        if len(self.shown) != 2:
            return None
        before, self.tier = self.tier, Tier("eagle")
        return Switch(before, self.tier, "pays_not", "10.0 to 12.0 tokens/s expected")


class ScriptedPolicy:
    def __init__(self) -> None:
        self.pilot = Scripted()

    def open(self, *_: object) -> Scripted:
        return self.pilot

    def as_body(self) -> dict[str, object]:
        return {"known": 1}


def test_a_switch_is_counted_remembered_and_in_force_one_round_later() -> None:
    metrics, policy = Metrics(), ScriptedPolicy()
    steering = Steering("goodput", policy, metrics)
    steered = steering.open("verify", OFFERS, 1, 10)
    steered.session = 0xAB
    prefill = TokensCommitted(tokens=[1], plain_reason=PlainReason.PLAIN_REASON_PREFILL)
    assert steered.observe(prefill) is None and policy.pilot.shown == []
    assert steered.observe(round_of(2)) is None
    assert steered.observe(round_of(0)) is not None
    assert steered.in_force == CHAIN and steered.tier.off
    assert steered.observe(round_of(1)) is None
    assert steered.in_force.off
    body = steering.as_body()
    assert (body["policy"], body["switches"], body["estimates"]) == ("goodput", 1, {"known": 1})
    (past,) = body["last_switches"]
    assert past["session"] == "00000000000000ab"
    assert (past["from"], past["to"], past["reason"]) == ("eagle 4x1, 5 nodes", "off", "pays_not")
    text = metrics.exposition().decode()
    sample = 'graft_tier_switches_total{from="eagle-middle",reason="pays_not",to="off"} 1.0'
    assert sample in text
    assert 'graft_tier_sessions{tier="off"} 1.0' in text
    steered.close()
    assert "graft_tier_sessions{" not in metrics.exposition().decode()


def test_a_policy_is_shown_what_the_commit_says() -> None:
    policy = ScriptedPolicy()
    steered = Steering("goodput", policy, Metrics()).open("verify", OFFERS, 1, 10)
    steered.observe(round_of(2))
    (seen,) = policy.pilot.shown
    assert (seen.accepted, seen.num_drafted, seen.depth, seen.missing) == (2, 4, 4, "")
    assert (seen.draft_s, seen.wait_s, seen.forward_s) == (0.002, 0.003, 0.02)
    assert (seen.num_rows, seen.num_sessions, seen.context) == (10, 2, 50)
    assert (seen.ranks, seen.rejected_children) == ((0, 0), 1)


def test_a_commit_without_times_is_no_reason_to_fail() -> None:
    for name in ("fixed", "field", "goodput"):
        policy = make_policy(name, "default", 0.05)  # type: ignore[arg-type]
        steered = Steering(name, policy, Metrics()).open("verify", OFFERS, 1, 10)
        for _ in range(50):
            steered.observe(TokensCommitted(tokens=[1]))
            steered.observe(TokensCommitted(tokens=[1, 1], accepted_count=1, node_count=1, depth=1))
        steered.close()


def test_offers_are_cut_to_verify_and_to_the_accept_rule() -> None:
    (cut,) = cut_offers([Offer(Tier("eagle", 6, 4, 24), 64, 16)], 12, 4, chains_only=True)
    assert cut == Offer(Tier("eagle", 4, 1, 12), 12, 4)


class LateStart(FixedPilot):
    """Drafts from the third round on."""

    def __init__(self) -> None:
        super().__init__(Tier("ngram"))
        self.num_rounds = 0

    def observe(self, seen: Seen, now: float) -> Switch | None:
        self.num_rounds += 1
        if self.num_rounds != 3:
            return None
        before, self.tier = self.tier, Tier("ngram", 4, 1, 5)
        return Switch(before, self.tier, "gain", "")


class LateStarts(ScriptedPolicy):
    def open(self, *_: object) -> LateStart:  # type: ignore[override]
        return LateStart()


async def test_a_session_that_does_not_draft_has_no_drafter_until_it_does(tmp_path: Path) -> None:
    """A drafter would read its prompt, and follow its text, for nothing."""
    drafter, seen = ScriptedDraft("ngram"), asyncio.Event()

    async def wait(num_committed: int) -> None:
        if num_committed == 3:
            assert not drafter.attended and not drafter.tiers
        elif num_committed == 6:
            await drafter.until(lambda: bool(drafter.attended))
            seen.set()

    script = Script(list(b"abcdefghijkl"), before_commit=wait)
    settings = {"tiers": "goodput", "speculation": "auto"}
    async with running_front(tmp_path, [script], [drafter], **settings) as front:
        front.server.gateway.steering._policy = LateStarts()
        body = (await front.complete(max_tokens=10)).json()
        assert body["choices"][0]["text"] == "abcdefghij"
        assert seen.is_set()
        (session,) = drafter.attended.values()
        assert (session.tier.num_steps, session.tier.num_draft_tokens) == (4, 5)
        await drafter.until(lambda: bool(drafter.released))
        assert front.verify.opened[0].speculate and not front.verify.opened[0].tree_deadline_micros
        # The next session never comes so far, and no drafter hears of it.
        await front.complete(max_tokens=2)
        assert len(drafter.attended) == len(drafter.released) == 1
