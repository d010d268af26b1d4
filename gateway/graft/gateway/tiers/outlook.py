"""What one session may expect of its tiers at the moment. Arithmetic over live estimates.

Knows offers, evidence, costs and load; makes no decision.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from graft.common.tier import Tier
from graft.gateway.tiers.choose import Load, Offer, Rated, best, plain, rate
from graft.gateway.tiers.costs import Costs
from graft.gateway.tiers.evidence import Evidence
from graft.gateway.tiers.field import at_depth
from graft.gateway.tiers.survival import MAX_DEPTH

COSTLY_S = 0.03
_CHEAP_S = 0.02
_PROBE_DEPTH = 3
_WORTH = 0.9


class Outlook:
    """Rates of a session's tiers; `load` follows its rounds."""

    def __init__(
        self, offers: Sequence[Offer], evidence: Evidence, costs: Costs, load: Load
    ) -> None:
        self.offers = {offer.name: offer for offer in offers}
        self.evidence = evidence
        self.costs = costs
        self.load = load

    def plain(self) -> Rated | None:
        """Decoding without drafts; None while nothing is known of verify."""
        return plain(self.costs, self.load)

    def of(self, tier: Tier, *, leaning: float = 0.0) -> Rated | None:
        """A tier as it is; `leaning` is as in Survival.chances."""
        if tier.off:
            return self.plain()
        survival = self.evidence.of(tier.proposer).survival
        chances = survival.chances(tier.num_steps, leaning=leaning)
        return rate(tier, chances, self.costs, self.load)

    def best(self, offers: Iterable[Offer], *, leaning: float = 0.0) -> Rated | None:
        """The best tier of some proposers; `leaning` is as in Survival.chances."""
        found: Rated | None = None
        for offer in offers:
            survival = self.evidence.of(offer.name).survival
            chances = survival.chances(MAX_DEPTH, leaning=leaning)
            rated = best(offer, chances, self.costs, self.load)
            if rated is not None and (found is None or rated.rate > found.rate):
                found = rated
        return found

    def surely_better(self, other: Tier, tier: Tier) -> bool:
        """True when `other` is the better one even where luck has flattered it.

        A deeper tier looks best when acceptance is thought too high, a shallower one when too low.
        """
        if other.off or tier.off or other.proposer != tier.proposer:
            return True
        leaning = -1.0 if other.num_steps >= tier.num_steps else 1.0
        ours, theirs = self.of(other, leaning=leaning), self.of(tier, leaning=leaning)
        return ours is None or theirs is None or ours.rate > theirs.rate

    def loss_s(self, tier: Tier) -> float:
        """What a round of a tier is likely to lose against plain decoding; below 0 for a gain."""
        base, rated = self.plain(), self.of(tier)
        if base is None or rated is None:
            return 0.0
        return rated.seconds - rated.tokens * base.seconds

    def worth_trying(self, offer: Offer) -> Tier:
        """The tier for a try: the best of those whose round costs little, or of all.

        Where deeper ones cost little too, one that shows more.
        """
        chances = self.evidence.chances(offer.name, MAX_DEPTH)
        rated, base = best(offer, chances, self.costs, self.load), self.plain()
        if not self.costs.draft(offer.name).known or rated is None or base is None:
            return offer.base
        cheap = best(offer, chances, self.costs, self.load, base.seconds + _CHEAP_S)
        if cheap is not None:
            rated = cheap
        depth = min(_PROBE_DEPTH, offer.base.num_steps)
        if rated.tier.num_steps >= depth:
            return rated.tier
        deeper = at_depth(offer.base, depth)
        price = self.of(deeper)
        if price is None or rated.rate >= _WORTH * base.rate:
            return rated.tier
        return rated.tier if price.seconds - base.seconds > COSTLY_S else deeper
