"""The goodput policy's decisions for one session: rounds in, switches out, time passed in.

A state machine without I/O. What it expects is the outlook's, what it tries is the trials'.
"""

from __future__ import annotations

from collections.abc import Sequence

from graft.common.tier import Tier
from graft.gateway.tiers.choose import Load, Offer, Rated
from graft.gateway.tiers.evidence import Evidence
from graft.gateway.tiers.knobs import SCANT_ROUNDS, Knobs
from graft.gateway.tiers.ledger import Ledger
from graft.gateway.tiers.outlook import Outlook
from graft.gateway.tiers.replica import Replica
from graft.gateway.tiers.seen import EMPTY, LATE, NO_DRAFTER, Seen, Switch, sentence
from graft.gateway.tiers.trials import LEANING, Trial, Trials, off_with

_EARLY = (2, 4, 6)
_SCANT_SINKS = 0.3
_MOST_LATE = 4.0
_STAKE = 3.0
_MISSED = 4
_START_ROUNDS = 24


class GoodputPilot:
    """The decisions for one session. `tier` is the one in force, or on its way to the drafter."""

    def __init__(
        self,
        knobs: Knobs,
        replica: Replica,
        offers: Sequence[Offer],
        evidence: Evidence,
        opened: tuple[Load, float],
    ) -> None:
        assert offers, "a session without a proposer has nothing to decide"
        load, now = opened
        self._knobs = knobs
        self._replica = replica
        self._costs = replica.costs
        self._evidence = evidence
        self._outlook = Outlook(offers, evidence, replica.costs, load)
        self._trials = Trials(self._outlook, replica, knobs, now)
        self._ledger = Ledger()
        self._opened_at = self._now = now
        self._since = 0
        self._quiet = 0
        self._num_rounds = 0
        self._missed = 0
        self._in_step = False
        self._by_luck = False
        self._sessions = self._decided_sessions = float(load.num_sessions)
        replica.num_open += 1
        self.tier = self._first(offers, now)
        self._drafter = self.tier.proposer or offers[0].name
        self._opened_with = load.context
        base = self._outlook.plain()
        self._start: tuple[float, float, int] | None = None
        if base is not None and self._costs.plain_known and not self.tier.off:
            self._start = (0.0, base.seconds, 0)
        self._trials.open(self._drafter, off=self.tier.off, now=now)

    def observe(self, seen: Seen, now: float) -> Switch | None:
        """Takes one round of the session; what to change before the next tree, if anything."""
        self._now = now
        self._since += 1
        self._quiet += 1
        self._outlook.load = Load(self._smooth_sessions(seen.num_sessions), seen.context)
        by = self._drafted_at(seen)
        running = self._trials.running
        crowded = self._crowded(seen)
        believe = running is not None
        jumped = self._costs.add(seen, self._timed(seen, by), believe=believe, crowded=crowded)
        cause = "cost" if jumped else ""
        if cause and seen.missing == LATE:
            cause = "late"
        if self._costs.verify.surprised:
            self._quiet = max(self._quiet, self._knobs.interval - 2)
        if self._costs.wait_jumped and by is not None and seen.wait_s > seen.forward_s / 3:
            self._evidence.of(by.proposer).change.beware()
        self._book(seen, now)
        if by is not None and seen.missing in ("", EMPTY):
            self._drafter = by.proposer
            stake = None
            if running is None:
                stake = self._lost_s(now) / (_STAKE * self._knobs.lost_s)
            wary = self._evidence.of(by.proposer).change.wary
            if self._evidence.take(by, seen, now, stake):
                cause, self._by_luck = "acceptance", not wary
        if self.tier.off and by is None and not seen.num_drafted and not crowded:
            self._costs.plain_seen_at = now
        if running is not None:
            return self._go_on_trying(running, seen, told=by is not None, now=now)
        if not cause and abs(self._sessions - self._decided_sessions) > max(
            0.75, 0.25 * self._decided_sessions
        ):
            cause = "load"
            self._trials.hasten(now)
            if self._sessions > self._decided_sessions:
                self._evidence.of(self._drafter).change.beware()
        self._num_rounds += 1
        switch = self._guard(cause, now)
        if switch is not None:
            return switch
        if cause or self._num_rounds in _EARLY or self._quiet >= self._knobs.interval:
            switch = self._decide(cause, now)
            if switch is not None:
                return switch
        trial = self._trials.begin(self.tier, self._since, self._lost_s(now), now)
        if trial is None:
            return None
        return self._change(trial.tier, "probe", trial.detail, probe=True)

    def estimates(self) -> dict[str, object]:
        """What the session is thought to get, for people."""
        rated, base = self._outlook.of(self.tier), self._outlook.plain()
        return {
            "tier": sentence(self.tier),
            "tokens_per_s": None if rated is None else round(rated.rate, 2),
            "plain_tokens_per_s": None if base is None else round(base.rate, 2),
            "lost_ms_of_late": round(self._lost_s(self._now) * 1e3, 1),
        }

    def close(self) -> None:
        """The session is over; what others may use of it stays."""
        self._replica.num_open -= 1
        self._replica.starts.ended(self._now - self._opened_at)
        self._started(self._now)

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
            proposer = self._drafter if self.tier.off else self.tier.proposer
            return self._outlook.offers[proposer].base if self.tier.off else self.tier
        if self.tier.off:
            return None
        if seen.missing == EMPTY or (seen.missing == LATE and self._since > 2 and self._in_step):
            return self.tier
        return None  # before its first tree a drafter reads the prompt; that is no drafting time

    def _timed(self, seen: Seen, by: Tier | None) -> Tier | None:
        """The tier whose cost a round shows: a first tree comes after the prompt was read."""
        first = seen.num_drafted > 0 and not self._in_step
        return None if first and by is not None and self._costs.draft(by.proposer).known else by

    def _crowded(self, seen: Seen) -> bool:
        """True when a drafter was at work for a round that had no tree in the end.

        At tier 0 verify calls rounds late as well, though none is drafted for, but for those that
        had begun before the drafter was told.
        """
        at_work = not self.tier.off or self._since <= 2
        return at_work and seen.missing in (LATE, NO_DRAFTER)

    def _book(self, seen: Seen, now: float) -> None:
        """Enters what a round beside a drafter at work gained or lost, with its tree or without."""
        self._book_start(seen, now)
        if self.tier.off and not seen.num_drafted:
            return
        missed = seen.missing in (LATE, NO_DRAFTER)
        self._missed = self._missed + 1 if missed else 0
        self._in_step = self._in_step or seen.num_drafted > 0
        base = self._outlook.plain()
        if base is None:
            return
        accepted = float(seen.accepted)
        if self._trials.running is not None:
            accepted /= 2  # the luck of few rounds is no gain to draw on
        loss_s = seen.seconds - (accepted + 1.0) * base.seconds
        self._ledger.add(loss_s, now)
        self._replica.book(loss_s, now)

    def _book_start(self, seen: Seen, now: float) -> None:
        """Sums what the rounds until the first tree lost to plain ones as they were before.

        A drafter that was given up may be at work for some rounds more; they count too.
        """
        if self._start is None:
            return
        lost_s, plain_s, rounds = self._start
        if not seen.num_drafted:
            lost_s += seen.seconds - plain_s
        self._start = (lost_s, plain_s, rounds + 1)
        if seen.num_drafted or rounds + 1 >= _START_ROUNDS:
            self._started(now)

    def _started(self, now: float) -> None:
        if self._start is not None:
            starts, context = self._replica.starts, self._opened_with
            starts.add(self._drafter, context, self._start[0], now)
            self._start = None

    def _lost_s(self, now: float) -> float:
        return max(self._ledger.lost_s(now), self._replica.lost_s(now))

    # What to do.

    def _first(self, offers: Sequence[Offer], now: float) -> Tier:
        """The first tier: the default, or the best one once something is known.

        Where it hardly matters, the one that the session before had.
        """
        outlook, base = self._outlook, self._outlook.plain()
        known = [offer for offer in offers if self._costs.draft(offer.name).known]
        if base is None or offers[0] not in known:
            return offers[0].base
        found = outlook.best(known)
        if found is None or found.rate < base.rate * (1 + self._knobs.pays):
            found = base
        last = self._replica.last
        if last is not None and last.off:
            found = base
        elif last is not None and last.proposer in outlook.offers:
            rated = outlook.of(last)
            if rated is not None and found.rate < rated.rate * (1 + self._margin(now)):
                found = rated
        gain = 1.0 - base.rate / found.rate
        proposer = found.tier.proposer
        if not self._replica.starts.worth(proposer, outlook.load.context, gain, now):
            found = base
        return off_with(offers[0].base) if found.tier.off else found.tier

    def _guard(self, cause: str, now: float) -> Switch | None:
        """Ends drafting that has lost more than it may and does not surely pay now."""
        if self.tier.off:
            return None
        scant = self._evidence.crowd(self.tier.proposer).num_rounds < SCANT_ROUNDS
        much = self._lost_s(now) >= (self._knobs.start_s if scant else self._knobs.lost_s)
        current, base = self._outlook.of(self.tier), self._outlook.plain()
        if current is None or base is None:
            return None
        if self._missed >= (_MISSED if much else 2 * _MISSED):
            return self._switch(off_with(self.tier), "late", current, base, now)
        if not much or current.rate > base.rate:
            return None
        reason = cause if cause == "acceptance" else "pays_not"
        return self._switch(off_with(self.tier), reason, current, base, now)

    def _decide(self, cause: str, now: float) -> Switch | None:
        self._quiet = 0
        self._decided_sessions = self._sessions
        self._evidence.of(self._drafter).expected = None
        current, base = self._outlook.of(self.tier), self._outlook.plain()
        if current is None or base is None:
            return None
        if self.tier.off:
            return None  # nothing new can have been seen, and tries decide for themselves
        top = self._outlook.best(self._known()) or base
        if cause in ("acceptance", "late") and self._in_doubt(cause, base):
            return self._switch(off_with(self.tier), cause, current, base, now)
        if top.rate < base.rate:
            if cause != "acceptance" and not self._sinks(current, base, now):
                return None
            return self._switch(off_with(self.tier), cause or "pays_not", current, base, now)
        if self._since < self._knobs.dwell and cause in ("", "cost", "late"):
            return None
        if top.rate < current.rate * (1 + self._margin(now)):
            return None
        if not cause and not self._outlook.surely_better(top.tier, self.tier):
            return None
        return self._switch(top.tier, cause or "gain", current, top, now)

    def _known(self) -> list[Offer]:
        """The proposers of which enough is known to go there without a try."""
        return [
            offer
            for name, offer in self._outlook.offers.items()
            if name == self._drafter or self._evidence.of(name).survival.num_rounds >= SCANT_ROUNDS
        ]

    def _in_doubt(self, cause: str, base: Rated) -> bool:
        """True when drafting may not pay any more: its trees come late, or fewer tokens survive.

        A try tells soon, and costs less than to go on.
        """
        wary = self._outlook.best([self._outlook.offers[self._drafter]], leaning=LEANING)
        return cause == "late" or wary is None or wary.rate < base.rate * (1 + self._knobs.pays)

    def _sinks(self, current: Rated, base: Rated, now: float) -> bool:
        """True when the tier in force is expected to lose too much to wait for the ledger."""
        new = self._evidence.crowd(self.tier.proposer).num_rounds < SCANT_ROUNDS
        sinks = _SCANT_SINKS if new else self._knobs.sinks
        return base.rate > current.rate * (1 + sinks)

    def _margin(self, now: float) -> float:
        """The gain that another tier must promise; more after every switch of late."""
        late = self._replica.late_switches(now, self._knobs.margin_window_s)
        return self._knobs.margin + self._knobs.margin_more * min(late, _MOST_LATE)

    def _go_on_trying(self, trial: Trial, seen: Seen, *, told: bool, now: float) -> Switch | None:
        verdict = self._trials.go_on(seen, told=told, now=now)
        if verdict is None:
            return None
        if verdict.stays:
            # A try that stays is the switch; it was told as a try when it began.
            self._count_switch(trial.home, verdict.tier, now)
            before, self.tier = trial.home, verdict.tier
            self._replica.last = verdict.tier
            self._since = self._quiet = 0
            return Switch(before, verdict.tier, verdict.reason, verdict.detail)
        return self._change(verdict.tier, verdict.reason, verdict.detail, probe=True)

    def _switch(self, tier: Tier, reason: str, before: Rated, after: Rated, now: float) -> Switch:
        self._count_switch(self.tier, tier, now)
        if tier.off:
            by_luck = reason == "acceptance" and self._by_luck
            self._trials.rest(self._drafter, by_luck=by_luck, now=now)
        detail = f"{before.rate:.1f} to {after.rate:.1f} tokens/s expected"
        return self._change(tier, reason, detail, probe=False)

    def _count_switch(self, before: Tier, after: Tier, now: float) -> None:
        """Remembers a change; the end of a session's first rounds is no going back and forth."""
        self._replica.switched(now)
        if (
            before.off != after.off
            and self._evidence.crowd(self._drafter).num_rounds >= SCANT_ROUNDS
        ):
            self._replica.turned(now)

    def _change(self, tier: Tier, reason: str, detail: str, *, probe: bool) -> Switch:
        switch = Switch(self.tier, tier, reason, detail, probe)
        self.tier = tier
        if not probe and (self._in_step or not tier.off):
            self._replica.last = tier
        self._since = self._quiet = 0
        self._evidence.settle()
        return switch
