"""Tries: few rounds of a tier whose worth cannot be seen from the one in force.

Drafting from tier 0, another proposer, or plain decoding. A state machine without I/O; its losses
are kept to a share of the time, and begin only where the ledger has room for them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from graft.common.tier import OFF, Tier
from graft.gateway.tiers.choose import Offer, Rated
from graft.gateway.tiers.knobs import SCANT_ROUNDS, Knobs
from graft.gateway.tiers.outlook import COSTLY_S, Outlook
from graft.gateway.tiers.replica import Replica
from graft.gateway.tiers.seen import Seen

_ROUNDS = 2
_RIVAL_ROUNDS = 3
_MOST_ROUNDS = 12
_FEW_ROUNDS = 6
_PATIENCE = 4
_ODD = 1.2
_PROMISING = 0.95
_CLEAR = 0.25
LEANING = -0.7
_LEANING_RIVAL = -1.0
_LUCK_SHARE = 0.4
_NEARLY = 0.7
_RETURN = 0.08
_SOON_S = 0.5
_STALE_SHARE = 0.5
_FIRST_S = 0.25
_DOUBT = 0.25
_MOST_LATE = 4.0
_ROOM = 1.2
_RIVAL_SHARE = 0.8
_RIVAL_SEEN = 24


@dataclass(slots=True)
class Trial:
    """A tier that is being tried; `home` is where to go when it does not pay.

    offer: None for plain decoding. told: rounds that say something; waited: all of them.
    """

    offer: Offer | None
    tier: Tier
    home: Tier
    home_rate: float
    rounds: int
    detail: str
    told: int = 0
    waited: int = 0
    seconds: float = 0.0
    tokens: int = 0

    def exposed_s(self, plain_s: float) -> float:
        """What the rounds would have lost to plain ones, had nothing been accepted."""
        return self.seconds - self.told * plain_s


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a try ended: the tier to be in force, and why."""

    tier: Tier
    reason: str
    detail: str
    stays: bool


class Trials:
    """The tries of one session. `running` is the one under way."""

    def __init__(self, outlook: Outlook, replica: Replica, knobs: Knobs, now: float) -> None:
        self.running: Trial | None = None
        self._outlook = outlook
        self._replica = replica
        self._knobs = knobs
        self._failures = 0
        self._looks_again = False
        self._next_at = now

    def open(self, drafter: str, *, off: bool, now: float) -> None:
        """Plans the first tries of a session that begins at a proposer, or at tier 0."""
        if off:
            outlook = self._outlook
            found, base = outlook.best(outlook.offers.values()), outlook.plain()
            pause_s = _FIRST_S  # although others did well, perhaps
            if found is None or base is None or found.rate < base.rate * (1 + self._knobs.margin):
                pause_s = self._pause_s(drafter, now)
            planned = max(now + _FIRST_S, self._replica.next_try_at)
            self._next_at = min(now + pause_s, planned)
        for name, own in self._outlook.evidence.all():
            if name != drafter:
                new = not self._outlook.evidence.crowd(name).num_rounds
                own.next_try_at = now + (0.0 if new else self._knobs.rival_least_s)

    def rest(self, drafter: str, *, by_luck: bool, now: float) -> None:
        """Drafting has ended; plans the next try: a second look after what may be bad luck."""
        self._failures = 0
        self._looks_again = by_luck
        pause_s = self._knobs.probe_least_s if by_luck else self._pause_s(drafter, now)
        self._next_at = self._replica.next_try_at = now + pause_s

    def hasten(self, now: float) -> None:
        """Load has changed, and what was found at another one says little: tries again soon."""
        self._next_at = min(self._next_at, now + _FIRST_S)

    def begin(self, tier: Tier, since: int, lost_s: float, now: float) -> Trial | None:
        """A try that is due, `since` rounds after the last change of tier."""
        if tier.off:
            if now < self._next_at:
                return None
            self.running = self._drafting(tier, lost_s, now)
            return self.running
        never = not self._outlook.costs.plain_known
        if since < (_ROUNDS if never or self._unknown(tier) else self._knobs.dwell):
            return None
        self.running = None if never else self._rival(tier, now)
        if self.running is None:
            self.running = self._plain(tier, now)
        return self.running

    def go_on(self, seen: Seen, *, told: bool, now: float) -> Verdict | None:
        """Takes a round of the try under way; its end, when it is over."""
        trial = self.running
        assert trial is not None
        trial.waited += 1
        if trial.offer is None:
            told = not seen.num_drafted
        if told:
            trial.told += 1
            trial.seconds += seen.seconds
            trial.tokens += seen.accepted + 1
        if trial.told < trial.rounds and trial.waited < trial.rounds + _PATIENCE:
            return None
        verdict = self._judge(trial, now)
        if verdict is not None:
            self.running = None
        return verdict

    # What to try.

    def _drafting(self, tier: Tier, lost_s: float, now: float) -> Trial | None:
        """From tier 0: the proposer not tried for the longest time, where the ledger has room."""
        outlook, base = self._outlook, self._outlook.plain()
        if base is None:
            return None
        offer = min(
            outlook.offers.values(), key=lambda offer: outlook.evidence.of(offer.name).tried_at
        )
        own = outlook.evidence.of(offer.name)
        tried = outlook.worth_trying(offer)
        start_s = self._replica.starts.loss_s(offer.name, outlook.load.context, now)
        likely_s = _ROUNDS * outlook.loss_s(tried) + (0.0 if own.survival.num_rounds else start_s)
        full = likely_s > 0.0 < lost_s and lost_s + likely_s > _ROOM * self._knobs.lost_s
        if full and not self._looks_again:
            return None
        self._looks_again = False
        own.survival.fade(_STALE_SHARE)
        tried = outlook.worth_trying(offer)
        rated = outlook.of(tried)
        longer_s = 0.0 if rated is None else rated.seconds - base.seconds
        own.tried_at = now
        rounds = 1 if longer_s > COSTLY_S else _ROUNDS
        return Trial(offer, tried, tier, base.rate, rounds, f"after {base.rate:.1f} tokens/s plain")

    def _unknown(self, tier: Tier) -> bool:
        """True while there is a proposer beside the tier's that has never drafted."""
        evidence = self._outlook.evidence
        return any(
            name != tier.proposer and not evidence.crowd(name).num_rounds
            for name, _ in evidence.all()
        )

    def _rival(self, tier: Tier, now: float) -> Trial | None:
        """From one proposer: another one that is due, unless it is known to be much worse."""
        current = self._outlook.of(tier)
        if current is None:
            return None
        for name, own in self._outlook.evidence.all():
            if name == tier.proposer or now < own.next_try_at:
                continue
            offer = self._outlook.offers[name]
            rated = self._outlook.best([offer])
            if (
                rated is not None
                and self._outlook.costs.draft(name).known
                and self._outlook.evidence.crowd(name).num_rounds > _RIVAL_SEEN
                and rated.rate < _RIVAL_SHARE * current.rate
            ):
                own.next_try_at = now + self._knobs.rival_most_s
                continue
            own.survival.fade(_STALE_SHARE)
            tried = self._outlook.worth_trying(offer)
            detail = f"after {current.rate:.1f} tokens/s"
            return Trial(offer, tried, tier, current.rate, _RIVAL_ROUNDS, detail)
        return None

    def _plain(self, tier: Tier, now: float) -> Trial | None:
        """From a tier that hardly pays: plain rounds, whose time is only guessed otherwise."""
        costs = self._outlook.costs
        if now - costs.plain_seen_at < self._knobs.rival_most_s:
            return None
        current, base = self._outlook.of(tier), self._outlook.plain()
        if current is None or base is None:
            return None
        if costs.plain_known and current.rate > base.rate * (1 + _DOUBT):
            return None
        detail = f"{base.rate:.1f} tokens/s guessed without drafts"
        return Trial(None, off_with(tier), tier, current.rate, 1, detail)

    # What came of it.

    def _judge(self, trial: Trial, now: float) -> Verdict | None:
        base = self._outlook.plain()
        if trial.offer is None or base is None:
            return self._judge_plain(trial, base, now)
        leaning = LEANING if trial.home.off else _LEANING_RIVAL
        hoped = self._outlook.best([trial.offer])
        wary = self._outlook.best([trial.offer], leaning=leaning)
        home = base if trial.home.off else self._outlook.of(trial.home)
        if hoped is None or wary is None or home is None or not trial.told:
            return self._gives_up(trial, 0.0, now)
        least = max(home.rate, base.rate)
        found, doubted = hoped, self._outlook.of(hoped.tier, leaning=leaning)
        if doubted is None or doubted.rate < least:
            found = self._outlook.of(wary.tier) or wary
        if wary.rate >= least and self._pays(trial, found.rate / least, base, now):
            self._failures = self._outlook.evidence.of(trial.offer.name).failures = 0
            if not trial.home.off:
                former = self._outlook.evidence.of(trial.home.proposer)
                former.next_try_at = now + 2 * self._knobs.rival_least_s
            detail = f"{home.rate:.1f} to {found.rate:.1f} tokens/s expected"
            return Verdict(found.tier, "probe_paid", detail, stays=True)
        loss_s = trial.seconds - trial.tokens / trial.home_rate
        promising = hoped.rate >= _PROMISING * home.rate and loss_s < self._knobs.start_s
        affordable = trial.exposed_s(base.seconds) < self._knobs.lost_s
        if promising and affordable and trial.told < _MOST_ROUNDS:
            return None
        return self._gives_up(trial, hoped.rate / home.rate, now)

    def _pays(self, trial: Trial, gain: float, base: Rated, now: float) -> bool:
        """True when a gain, as a ratio of rates, is enough, and the try itself was no loss."""
        knobs, margin = self._knobs, self._knobs.margin
        if trial.home.off:
            margin = _RETURN + knobs.return_more * self._replica.late_turns(now) ** 0.5
        else:
            late = self._replica.late_switches(now, knobs.margin_window_s)
            margin += knobs.margin_more * min(late, _MOST_LATE)
        if trial.told < _FEW_ROUNDS:
            margin = max(margin, _CLEAR)
        return gain >= 1 + margin and trial.tokens >= trial.seconds * base.rate

    def _gives_up(self, trial: Trial, promise: float, now: float) -> Verdict:
        """Goes back, and waits until the loss of this try is a small share of the time.

        promise: what the tier tried is thought to get, as a share of home's rate.
        """
        knobs = self._knobs
        assert trial.offer is not None
        own = self._outlook.evidence.of(trial.offer.name)
        loss_s = max(0.002, trial.seconds - trial.tokens / trial.home_rate)
        wait_s = loss_s / knobs.probe_share
        if trial.home.off:
            if self._failures:  # good luck is no reason to try again soon
                exposed_s = trial.exposed_s(1.0 / trial.home_rate)
                wait_s = max(wait_s, _LUCK_SHARE * exposed_s / knobs.probe_share)
            self._failures += 1
            wait_s *= 1.5 ** min(self._failures, 4)
            crowd = self._outlook.evidence.crowd(trial.offer.name)
            if self._failures == 1 and crowd.num_rounds < SCANT_ROUNDS:
                wait_s = min(wait_s, knobs.probe_least_s)
            self._next_at = now + min(max(wait_s, knobs.probe_least_s), knobs.probe_most_s)
            self._replica.next_try_at = self._next_at
        else:
            own.failures += 1
            wait_s *= 2.0 ** min(own.failures, 5)
            most_s = knobs.rival_least_s if own.failures == 1 else knobs.rival_most_s
            least_s = knobs.rival_least_s
            if own.failures == 1 and promise >= _NEARLY:
                most_s = least_s = _SOON_S
            own.next_try_at = now + min(max(wait_s, least_s), most_s)
        detail = f"{trial.tokens} tokens in {trial.seconds * 1e3:.0f} ms"
        return Verdict(trial.home, "probe_over", detail, stays=False)

    def _judge_plain(self, trial: Trial, base: Rated | None, now: float) -> Verdict | None:
        knobs, home = self._knobs, self._outlook.of(trial.home)
        if base is None or home is None:
            return Verdict(trial.home, "probe_over", "nothing was seen", stays=False)
        if base.seconds > _ODD * home.seconds and trial.told <= _ROUNDS:
            return None  # fewer rows cannot take so much longer; look again
        self._outlook.costs.plain_seen_at = now
        new = self._outlook.evidence.crowd(trial.home.proposer).num_rounds < 2 * SCANT_ROUNDS
        wary = self._outlook.of(trial.home, leaning=LEANING if new else 0.0)
        if wary is not None and base.rate > wary.rate:
            self._next_at = now + (self._soon_s(trial.home, base) if new else knobs.probe_least_s)
            detail = f"{home.rate:.1f} to {base.rate:.1f} tokens/s expected"
            return Verdict(trial.tier, "pays_not", detail, stays=True)
        return Verdict(trial.home, "probe_over", "drafting pays", stays=False)

    def _soon_s(self, tier: Tier, base: Rated) -> float:
        """A pause after which a bad start is looked at again; short where that costs little."""
        rated = self._outlook.of(tier)
        exposed_s = 0.0 if rated is None else max(0.0, rated.seconds - base.seconds)
        wait_s = _LUCK_SHARE * _ROUNDS * exposed_s / self._knobs.probe_share
        return min(max(wait_s, _FIRST_S), self._knobs.probe_least_s)

    def _pause_s(self, drafter: str, now: float) -> float:
        """How long to decode plainly before a try, going by what the try is likely to cost."""
        outlook, knobs = self._outlook, self._knobs
        loss_s = outlook.loss_s(outlook.worth_trying(outlook.offers[drafter]))
        rounds = 1 if loss_s > COSTLY_S else _ROUNDS
        late = self._replica.late_switches(now, knobs.margin_window_s)
        if outlook.evidence.of(drafter).survival.num_rounds < SCANT_ROUNDS and late <= 1:
            return knobs.probe_least_s
        least_s = knobs.probe_least_s * float(2.0 ** min(late / 2, 2.0))
        return min(max(rounds * loss_s / knobs.probe_share, least_s), knobs.probe_most_s)


def off_with(tier: Tier) -> Tier:
    """Tier 0 with the proposer kept, so that its drafter keeps its state of the session."""
    return replace(OFF, proposer=tier.proposer)
