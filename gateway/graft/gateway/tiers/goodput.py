"""Goodput: the tier with the most tokens a second by live estimates, for each session.

A state machine without I/O: rounds in, switches out, time passed in. Costs are shared by the
sessions of a verify replica and acceptance is a prior for every new one; each session then keeps
its own acceptance, and tries with few rounds what its tier does not show.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from graft.common.tier import OFF, Tier
from graft.gateway.tiers.change import Change
from graft.gateway.tiers.choose import Load, Offer, Rated, best, plain, rate
from graft.gateway.tiers.costs import Costs
from graft.gateway.tiers.field import at_depth
from graft.gateway.tiers.seen import EMPTY, LATE, Seen, Switch, sentence
from graft.gateway.tiers.survival import MAX_DEPTH, Chances, Survival


@dataclass(frozen=True, slots=True)
class Knobs:
    """How eager the policy is.

    margin: gain that another tier must promise, and margin_more for every switch of late.
    pays: gain over plain decoding at which drafting begins. sinks: loss at which it ends.
    probe_share: share of a session's time that tries may cost.
    """

    interval: int = 8
    dwell: int = 8
    margin: float = 0.03
    margin_more: float = 0.04
    margin_window_s: float = 60.0
    pays: float = 0.03
    sinks: float = 0.02
    probe_share: float = 0.01
    probe_least_s: float = 1.0
    probe_most_s: float = 4.0
    rival_least_s: float = 2.0
    rival_most_s: float = 20.0
    own_half_life: float = 100.0
    crowd_half_life: float = 150.0


KNOBS = Knobs()
_COSTLY_S = 0.03
_PROBE_ROUNDS = 2
_RIVAL_ROUNDS = 4
_PROBE_MOST_ROUNDS = 6
_PROBE_DEPTH = 3
_PATIENCE = 4
_ODD = 1.2
_PROMISING = 0.95
_CLEAR = 0.25
_RETURN_MORE = 0.05
_WORTH = 0.9
_STALE_SHARE = 0.5
_CROWD_SHARE = 0.5
_FIRST_PROBE_S = 0.25
_DEBT_S = 0.08
_DEBT_ROUNDS = 8
_MOST_LOSS_S = 0.06
_FRESH_S = 2.0
_DOUBT = 0.25
_EARLY = (2, 4, 6)
_SCANT_ROUNDS = 8
_SCANT_SINKS = 0.3


class Goodput:
    """What all sessions share. `deadline_s` is how long rounds wait for a tree."""

    def __init__(self, deadline_s: float, knobs: Knobs = KNOBS) -> None:
        self.knobs = knobs
        self._deadline_s = deadline_s
        self._costs: dict[str, Costs] = {}
        self._crowd: dict[str, Survival] = {}
        self._switches: dict[int, Switches] = {}

    def costs(self, verify: str) -> Costs:
        """The costs at a verify replica."""
        found = self._costs.get(verify)
        if found is None:
            found = self._costs[verify] = Costs(self._deadline_s)
        return found

    def crowd(self, proposer: str) -> Survival:
        """How far a proposer's drafts survive in all sessions."""
        found = self._crowd.get(proposer)
        if found is None:
            found = self._crowd[proposer] = Survival(self.knobs.crowd_half_life)
        return found

    def switched(self, costs: Costs) -> Switches:
        """The switches at a verify replica."""
        return self._switches.setdefault(id(costs), Switches())

    def open(
        self, verify: str, offers: Sequence[Offer], num_sessions: int, context: int, now: float
    ) -> GoodputPilot:
        """The pilot of a new session; `offers` are the proposers it may have, the default first."""
        return GoodputPilot(self, self.costs(verify), offers, Load(num_sessions, context), now)

    def as_body(self) -> dict[str, object]:
        """The estimates, for people."""
        survival = {}
        for name, crowd in sorted(self._crowd.items()):
            chances = crowd.chances(8)
            survival[name] = {
                "by_depth": [round(chance, 3) for chance in chances.first],
                "by_later_rank": [round(chance, 3) for chance in chances.hazards[1:]],
                "offered": round(chances.offered, 3),
                "rounds": crowd.num_rounds,
            }
        return {
            "costs": {verify: costs.as_body() for verify, costs in sorted(self._costs.items())},
            "survival": survival,
        }


class Switches:
    """When sessions of a replica changed their tier of late, and how many sessions there are."""

    def __init__(self) -> None:
        self.num_open = 0
        self._times: deque[float] = deque(maxlen=256)

    def add(self, now: float) -> None:
        """A session changed its tier."""
        self._times.append(now)

    def late(self, now: float, window_s: float) -> float:
        """Changes a session made on average in the last `window_s`."""
        while self._times and now - self._times[0] > window_s:
            self._times.popleft()
        return len(self._times) / max(1, self.num_open)


@dataclass(slots=True)
class _Probe:
    """A tier that is being tried; `home` is where to go when it does not pay."""

    offer: Offer | None
    home: Tier
    home_rate: float
    rounds: int
    seen: int = 0
    waited: int = 0
    seconds: float = 0.0
    tokens: int = 0


@dataclass(slots=True)
class _Own:
    """What this session has shown of a proposer.

    expected: chance of each depth as it was at the last decision; changes are told from it.
    """

    survival: Survival
    tried_at: float
    change: Change = field(default_factory=Change)
    recent: deque[Seen] = field(default_factory=lambda: deque(maxlen=16))
    next_try_at: float = 0.0
    failures: int = 0
    expected: list[float] | None = None


class GoodputPilot:
    """The decisions for one session. `tier` is the one in force, or on its way to the drafter."""

    def __init__(
        self, shared: Goodput, costs: Costs, offers: Sequence[Offer], load: Load, now: float
    ) -> None:
        assert offers, "a session without a proposer has nothing to decide"
        self.load = load
        self._knobs = shared.knobs
        self._shared = shared
        self._costs = costs
        self._offers = {offer.name: offer for offer in offers}
        self._own = {
            name: _Own(Survival(self._knobs.own_half_life, shared.crowd(name)), now)
            for name in self._offers
        }
        self._probe: _Probe | None = None
        self._since = 0
        self._quiet = 0
        self._num_rounds = 0
        self._debt_s = 0.0
        self._sessions = float(load.num_sessions)
        self._decided_sessions = float(load.num_sessions)
        self._switched = shared.switched(costs)
        self._switched.num_open += 1
        self._failures = 0
        self._next_probe_at = now
        self._drafter = offers[0].name
        self.tier = self._first(offers, now)
        if not self.tier.off:
            self._drafter = self.tier.proposer
            self._next_probe_at = now
        else:
            planned = max(now + _FIRST_PROBE_S, self._costs.next_try_at)
            self._next_probe_at = min(now + self._first_pause_s(now), planned)
        for name, own in self._own.items():
            if name != self._drafter:
                new = not shared.crowd(name).num_rounds
                own.next_try_at = now + (0.0 if new else self._knobs.rival_least_s)

    def observe(self, seen: Seen, now: float) -> Switch | None:
        """Takes one round of the session; what to change before the next tree, if anything."""
        self._since += 1
        self._quiet += 1
        self.load = Load(self._smooth_sessions(seen.num_sessions), seen.context)
        by = self._drafted_at(seen)
        believe = self._probe is not None
        cause = "cost" if self._costs.add(seen, by, believe=believe) else ""
        if self._costs.verify.surprised:
            self._quiet = max(self._quiet, self._knobs.interval - 2)
        if self._costs.wait_jumped and by is not None and seen.wait_s > seen.forward_s / 3:
            self._own[by.proposer].change.beware()
        if by is not None and seen.missing in ("", EMPTY):
            cause = self._take(by, seen, now) or cause
        if by is None and not seen.num_drafted:
            self._costs.plain_seen_at = now
        if self._probe is not None:
            return self._go_on_probing(self._probe, seen, by is not None, now)
        if not cause and abs(self._sessions - self._decided_sessions) > max(
            0.75, 0.25 * self._decided_sessions
        ):
            cause = "load"
        self._num_rounds += 1
        early = self._num_rounds in _EARLY
        if cause or early or self._quiet >= self._knobs.interval:
            switch = self._decide(cause, now)
            if switch is not None:
                return switch
        return self._try_something(now)

    def estimates(self) -> dict[str, object]:
        """What the session is thought to get, for people."""
        now_rate = self._rate_of(self.tier)
        base = plain(self._costs, self.load)
        return {
            "tier": sentence(self.tier),
            "tokens_per_s": None if now_rate is None else round(now_rate.rate, 2),
            "plain_tokens_per_s": None if base is None else round(base.rate, 2),
        }

    def close(self) -> None:
        """The session is over; what the crowd and the costs learned stays."""
        self._switched.num_open -= 1

    # What was seen.

    def _smooth_sessions(self, num_sessions: int) -> int:
        if num_sessions > 1.5 * self._sessions:
            self._sessions = float(num_sessions)
        else:
            share = 0.7 if num_sessions > self._sessions else 0.3
            self._sessions += share * (max(1, num_sessions) - self._sessions)
        return max(1, round(self._sessions))

    def _drafted_at(self, seen: Seen) -> Tier | None:
        """The tier to which a round tells something, None when no drafter had a part in it."""
        if seen.num_drafted:
            if self._since <= 2 and not self.tier.off and self.tier.proposer != self._drafter:
                return None  # the former proposer's last trees
            offer = self._offers[self._drafter if self.tier.off else self.tier.proposer]
            return offer.base if self.tier.off else self.tier
        if self.tier.off:
            return None
        if seen.missing == EMPTY or (seen.missing == LATE and self._since > 2):
            return self.tier
        return None

    def _take(self, by: Tier, seen: Seen, now: float) -> str:
        """Counts what survived; the reason for a decision at once, if there is one."""
        self._drafter = by.proposer
        own = self._own[by.proposer]
        own.tried_at = now
        alarm = ""
        if seen.num_drafted and self._probe is None:
            first = own.expected
            if first is None:
                first = own.expected = _levels(own.survival.chances(MAX_DEPTH), by.topk)
            told = seen.rejected_children > 0 or not seen.ranks
            depth = seen.depth if told else seen.accepted
            alarm = own.change.add(seen.accepted, depth, first)
        own.survival.add(seen)
        self._shared.crowd(by.proposer).add(seen)
        own.recent.append(seen)
        change = own.change
        count = change.num_fallen if alarm == "fell" else change.num_risen
        if not alarm and self._probe is None and change.wary and self._in_debt(seen):
            alarm, count = "fell", _DEBT_ROUNDS
        if not alarm:
            return ""
        own.survival.fade(0.02)
        own.survival.distrust()
        crowd = self._shared.crowd(by.proposer)
        crowd.fade(_CROWD_SHARE)
        for former in list(own.recent)[-count:]:
            own.survival.add(former)
            crowd.add(former)
        change.reset()
        own.expected = None
        return "acceptance"

    def _in_debt(self, seen: Seen) -> bool:
        """True when rounds of late took so much longer than plain ones that it is time to look."""
        base = plain(self._costs, self.load)
        if base is None:
            return False
        seconds = seen.wait_s + seen.queue_s + seen.forward_s + seen.choice_s
        self._debt_s = max(0.0, self._debt_s + seconds - (seen.accepted + 1) * base.seconds)
        if self._debt_s < _DEBT_S:
            return False
        self._debt_s = 0.0
        return True

    # What to do.

    def _first(self, offers: Sequence[Offer], now: float) -> Tier:
        """The first tier: the default, or the best one once something is known.

        Where it hardly matters, the one that the session before had.
        """
        base = plain(self._costs, self.load)
        known = [offer for offer in offers if self._costs.draft(offer.name).known]
        if base is None or offers[0] not in known:
            return offers[0].base
        found = self._best(known)
        if found is None or found.rate < base.rate * (1 + self._knobs.pays):
            found = base
        margin, last = self._margin(now), self._costs.last
        if last is not None and last.off:
            found = base
        elif last is not None and last.proposer in self._offers:
            rated = self._rate_of(last)
            if rated is not None and found.rate < rated.rate * (1 + margin):
                found = rated
        return _off(offers[0].base) if found.tier.off else found.tier

    def _first_pause_s(self, now: float) -> float:
        """A session that begins at tier 0 although others did well tries almost at once."""
        found, base = self._best(list(self._offers.values())), plain(self._costs, self.load)
        if found is None or base is None or found.rate < base.rate * (1 + self._knobs.margin):
            return self._pause_s(now)
        return _FIRST_PROBE_S

    def _best(self, offers: Sequence[Offer]) -> Rated | None:
        found: Rated | None = None
        for offer in offers:
            chances = self._own[offer.name].survival.chances(MAX_DEPTH)
            rated = best(offer, chances, self._costs, self.load)
            if rated is not None and (found is None or rated.rate > found.rate):
                found = rated
        return found

    def _rate_of(self, tier: Tier) -> Rated | None:
        if tier.off:
            return plain(self._costs, self.load)
        chances = self._own[tier.proposer].survival.chances(tier.num_steps)
        return rate(tier, chances, self._costs, self.load)

    def _known(self, now: float) -> list[Offer]:
        """Proposers of which enough is known to go there without a try."""
        return [
            offer
            for name, offer in self._offers.items()
            if (name == self._drafter and (not self.tier.off or self._fresh(name, now)))
        ]

    def _fresh(self, name: str, now: float) -> bool:
        own = self._own[name]
        return own.survival.num_rounds > 0 and now - own.tried_at < _FRESH_S

    def _decide(self, cause: str, now: float) -> Switch | None:
        self._quiet = 0
        self._decided_sessions = self._sessions
        knobs = self._knobs
        self._own[self._drafter].expected = None
        current, base = self._rate_of(self.tier), plain(self._costs, self.load)
        if current is None or base is None:
            return None
        if self.tier.off and not cause:
            return None  # nothing new can have been seen, and tries decide for themselves
        top = self._best(self._known(now)) or base
        if top.rate < base.rate * (1 + (knobs.pays if self.tier.off else 0.0)):
            if self.tier.off:
                return None
            new = self._shared.crowd(self.tier.proposer).num_rounds < _SCANT_ROUNDS
            late = self._switched.late(now, knobs.margin_window_s)
            sinks = _SCANT_SINKS if new else knobs.sinks + min(0.01 * late, 0.02)
            if cause != "acceptance" and base.rate < current.rate * (1 + sinks):
                return None
            return self._switch(_off(self.tier), cause or "pays_not", current, base, now)
        margin = self._margin(now)
        if self._since < knobs.dwell and cause in ("", "cost"):
            return None
        if top.rate < current.rate * (1 + margin):
            return None
        return self._switch(top.tier, cause or "gain", current, top, now)

    def _switch(self, tier: Tier, reason: str, before: Rated, after: Rated, now: float) -> Switch:
        detail = f"{before.rate:.1f} to {after.rate:.1f} tokens/s expected"
        self._switched.add(now)
        if tier.off:
            self._failures = 0
            pause_s = self._knobs.probe_least_s if reason == "acceptance" else self._pause_s(now)
            self._next_probe_at = self._costs.next_try_at = now + pause_s
        return self._change(tier, reason, detail, probe=False)

    def _margin(self, now: float) -> float:
        """The gain that another tier must promise; more after every switch of late."""
        knobs = self._knobs
        late = self._switched.late(now, knobs.margin_window_s)
        return knobs.margin + knobs.margin_more * min(late, 4.0)

    def _pause_s(self, now: float) -> float:
        """How long to decode plainly before a try, going by what the try is likely to cost."""
        base = plain(self._costs, self.load)
        loss_s = 0.0
        if base is not None:
            offer = self._offers[self._drafter]
            rated = self._rate_of(self._worth_trying(offer))
            if rated is not None:
                loss_s = rated.seconds - rated.tokens * base.seconds
        rounds = 1 if loss_s > _COSTLY_S else _PROBE_ROUNDS
        knobs = self._knobs
        late = self._switched.late(now, knobs.margin_window_s)
        if self._own[self._drafter].survival.num_rounds < _SCANT_ROUNDS and late <= 1:
            return knobs.probe_least_s
        least_s = knobs.probe_least_s * float(2.0 ** min(late / 2, 2.0))
        return min(max(rounds * loss_s / knobs.probe_share, least_s), knobs.probe_most_s)

    def _change(self, tier: Tier, reason: str, detail: str, *, probe: bool) -> Switch:
        switch = Switch(self.tier, tier, reason, detail, probe)
        self.tier = tier
        if not probe:
            self._costs.last = tier
        self._since = 0
        self._quiet = 0
        self._debt_s = 0.0
        for own in self._own.values():
            own.change.reset()
        return switch

    # Tries.

    def _try_something(self, now: float) -> Switch | None:
        if self.tier.off:
            return self._try_drafting(now) if now >= self._next_probe_at else None
        never = self._costs.plain_seen_at < 0
        if self._since < (2 if never else self._knobs.dwell):
            return None
        if never:
            return self._try_plain(now)
        for name, own in self._own.items():
            if name != self.tier.proposer and now >= own.next_try_at:
                return self._try_rival(self._offers[name], now)
        return self._try_plain(now)

    def _try_drafting(self, now: float) -> Switch | None:
        """From tier 0: the proposer that was not tried for the longest time, for a few rounds."""
        base = plain(self._costs, self.load)
        if base is None:
            return None
        offer = min(self._offers.values(), key=lambda offer: self._own[offer.name].tried_at)
        own = self._own[offer.name]
        own.survival.fade(_STALE_SHARE)
        tier = self._worth_trying(offer)
        rated = self._rate_of(tier)
        loss_s = 0.0 if rated is None else rated.seconds - base.seconds
        rounds = 1 if loss_s > _COSTLY_S else _PROBE_ROUNDS
        self._probe = _Probe(offer, self.tier, base.rate, rounds)
        own.tried_at = now
        return self._change(tier, "probe", f"after {base.rate:.1f} tokens/s plain", probe=True)

    def _try_rival(self, offer: Offer, now: float) -> Switch | None:
        """From one proposer: another one, unless it is known to be much worse."""
        own = self._own[offer.name]
        current = self._rate_of(self.tier)
        if current is None:
            return None
        rated = best(offer, own.survival.chances(MAX_DEPTH), self._costs, self.load)
        if (
            rated is not None
            and self._costs.draft(offer.name).known
            and self._shared.crowd(offer.name).num_rounds > 24
            and rated.rate < 0.8 * current.rate
        ):
            own.next_try_at = now + self._knobs.rival_most_s
            return None
        own.survival.fade(_STALE_SHARE)
        tier = self._worth_trying(offer)
        self._probe = _Probe(offer, self.tier, current.rate, _RIVAL_ROUNDS)
        return self._change(tier, "probe", f"after {current.rate:.1f} tokens/s", probe=True)

    def _try_plain(self, now: float) -> Switch | None:
        """From a tier that hardly pays: plain rounds, whose time is only guessed otherwise."""
        if now - self._costs.plain_seen_at < self._knobs.rival_most_s:
            return None
        current, base = self._rate_of(self.tier), plain(self._costs, self.load)
        known = self._costs.plain_seen_at >= 0
        if current is None or base is None:
            return None
        if known and current.rate > base.rate * (1 + _DOUBT):
            return None
        self._probe = _Probe(None, self.tier, current.rate, 1)
        detail = f"{base.rate:.1f} tokens/s guessed without drafts"
        return self._change(_off(self.tier), "probe", detail, probe=True)

    def _worth_trying(self, offer: Offer) -> Tier:
        rated = best(
            offer, self._own[offer.name].survival.chances(MAX_DEPTH), self._costs, self.load
        )
        if not self._costs.draft(offer.name).known or rated is None:
            return offer.base
        depth = min(_PROBE_DEPTH, offer.base.num_steps)
        if rated.tier.num_steps >= depth:
            return rated.tier
        base, deeper = plain(self._costs, self.load), at_depth(offer.base, depth)
        price = self._rate_of(deeper)
        if base is None or price is None or rated.rate >= _WORTH * base.rate:
            return rated.tier
        return rated.tier if price.seconds - base.seconds > _COSTLY_S else deeper

    def _go_on_probing(self, probe: _Probe, seen: Seen, told: bool, now: float) -> Switch | None:
        probe.waited += 1
        if probe.offer is None:
            told = not seen.num_drafted
        if told:
            probe.seen += 1
            probe.seconds += seen.wait_s + seen.queue_s + seen.forward_s + seen.choice_s
            probe.tokens += seen.accepted + 1
        if probe.seen < probe.rounds and probe.waited < probe.rounds + _PATIENCE:
            return None
        base = plain(self._costs, self.load)
        if probe.offer is None or base is None:
            home = self._rate_of(probe.home)
            odd = base is not None and home is not None and base.seconds > _ODD * home.seconds
            if odd and probe.seen < _PROBE_ROUNDS + 1:
                return None  # fewer rows cannot take so much longer; look again
            return self._end_plain_try(probe, now)
        found = self._best([probe.offer])
        home = base if probe.home.off else self._rate_of(probe.home)
        if found is None or home is None or not probe.seen:
            return self._give_up(probe, now)
        margin = self._margin(now)
        if probe.home.off:
            margin += _RETURN_MORE * min(self._switched.late(now, self._knobs.margin_window_s), 4.0)
        if probe.seen < _PROBE_MOST_ROUNDS:
            margin = max(margin, _CLEAR)
        paid = probe.tokens >= probe.seconds * base.rate
        if paid and found.rate >= max(home.rate, base.rate) * (1 + margin):
            self._probe = None
            self._failures = self._own[probe.offer.name].failures = 0
            self._switched.add(now)
            if probe.home.off is False:
                self._own[probe.home.proposer].next_try_at = now + self._knobs.rival_most_s
            detail = f"{home.rate:.1f} to {found.rate:.1f} tokens/s expected"
            tier = found.tier
            self._costs.last = tier
            self.tier, self._since, self._quiet = tier, 0, 0
            return Switch(probe.home, tier, "probe_paid", detail)
        loss_s = probe.seconds - probe.tokens / probe.home_rate
        promising = found.rate >= _PROMISING * home.rate and loss_s < _MOST_LOSS_S
        if promising and probe.seen < _PROBE_MOST_ROUNDS:
            return None
        return self._give_up(probe, now)

    def _give_up(self, probe: _Probe, now: float) -> Switch:
        """Goes back, and waits until the loss of this try is a small share of the time."""
        knobs = self._knobs
        assert probe.offer is not None
        own = self._own[probe.offer.name]
        loss_s = max(0.002, probe.seconds - probe.tokens / probe.home_rate)
        wait_s = loss_s / knobs.probe_share
        if probe.home.off:
            self._failures += 1
            wait_s *= 1.5 ** min(self._failures, 4)
            if (
                self._failures == 1
                and self._shared.crowd(probe.offer.name).num_rounds < _SCANT_ROUNDS
            ):
                wait_s = min(wait_s, knobs.probe_least_s)
            self._next_probe_at = now + min(max(wait_s, knobs.probe_least_s), knobs.probe_most_s)
            self._costs.next_try_at = self._next_probe_at
        else:
            own.failures += 1
            wait_s *= 2.0 ** min(own.failures, 5)
            own.next_try_at = now + min(max(wait_s, knobs.rival_least_s), knobs.rival_most_s)
        self._probe = None
        detail = f"{probe.tokens} tokens in {probe.seconds * 1e3:.0f} ms"
        return self._change(probe.home, "probe_over", detail, probe=True)

    def _end_plain_try(self, probe: _Probe, now: float) -> Switch | None:
        self._probe = None
        self._costs.plain_seen_at = now
        base, home = plain(self._costs, self.load), self._rate_of(probe.home)
        new = self._shared.crowd(self._drafter).num_rounds < _SCANT_ROUNDS
        sinks = _SCANT_SINKS if new else 0.0
        if base is not None and home is not None and base.rate > home.rate * (1 + sinks):
            self._switched.add(now)
            self._next_probe_at = now + self._knobs.probe_least_s
            detail = f"{home.rate:.1f} to {base.rate:.1f} tokens/s expected"
            self._since = self._quiet = 0
            return Switch(probe.home, self.tier, "pays_not", detail)
        return self._change(probe.home, "probe_over", "drafting pays", probe=True)


def _levels(chances: Chances, width: int) -> list[float]:
    """Chance of each depth that some child of an accepted node is right."""
    missed = 1.0
    for hazard in chances.hazards[1:width]:
        missed *= 1.0 - hazard
    return [min(0.99, 1.0 - (1.0 - chance) * missed) for chance in chances.first]


def _off(tier: Tier) -> Tier:
    """Tier 0 with the proposer kept, so that its drafter keeps its state of the session."""
    return replace(OFF, proposer=tier.proposer)
