"""Which tier a request's `speculation` asks for. Knows what drafters offer; knows no session."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from pydantic import ValidationError

from graft.common.errors import InvalidArgument, UnknownProposer
from graft.common.tier import OFF, Tier, tier_from_proto
from graft.gateway.request import SpeculationField
from graft.gateway.tiers.choose import Offer
from graft.v1 import draft_pb2


@dataclass(frozen=True, slots=True)
class ChosenTier:
    """The tier of a request, its word in metrics, and why nothing is drafted, if so.

    offers: what a policy may choose from, the default first; none for a tier that was asked for.
    late: what was wished while no draft replica was known; it is honoured once one is.
    """

    tier: Tier = OFF
    label: str = "off"
    inactive_reason: str = ""
    offers: tuple[Offer, ...] = ()
    late: str | SpeculationField | None = None


def choose_tier(
    wish: str | SpeculationField | None,
    default: str,
    proposers: Sequence[draft_pb2.ProposerDescription],
    why_none: str,
) -> ChosenTier:
    """The tier that `speculation` asks for, or the server's `default`.

    `proposers` are what the draft replicas offer, the first one is `auto`; `why_none` says why
    there are none.

    Raises:
        UnknownProposer: no draft replica has the proposer.
        InvalidArgument: a number is out of range.
    """
    if wish is None:
        try:
            chosen = choose_tier(default, default, proposers, why_none)
        except UnknownProposer as error:
            return ChosenTier(inactive_reason=str(error))
        if not default.startswith("{") and not chosen.tier.off and not chosen.offers:
            named = tuple(offer_of(one) for one in proposers if one.name == default)
            return replace(chosen, offers=named)
        return chosen
    if isinstance(wish, str) and wish.startswith("{"):
        wish = _written_tier(wish)
    if wish == "off":
        return ChosenTier()
    if not proposers:
        return ChosenTier(inactive_reason=why_none, late=wish)
    name = wish.proposer if isinstance(wish, SpeculationField) else wish
    if name is None or name == "auto":
        found = proposers[0]
    else:
        by_name = {proposer.name: proposer for proposer in proposers}
        if name not in by_name:
            raise UnknownProposer(
                f"no draft replica has the proposer {name!r}; there is {', '.join(by_name)}",
                field="speculation",
            )
        found = by_name[name]
    tier = tier_from_proto(found.default_tier)
    tier = replace(tier, proposer=found.name)
    if isinstance(wish, SpeculationField):
        given = wish.model_dump(exclude_none=True, exclude={"proposer"})
        tier = replace(tier, **given)
        if given:
            return ChosenTier(tier, "off" if tier.off else f"{found.name}-custom")
    if tier.off:
        return ChosenTier(tier)
    within = set(found.sources)
    apart = [proposer for proposer in proposers if proposer.name not in within]
    offers = tuple(map(offer_of, apart)) if wish == "auto" else ()
    return ChosenTier(tier, found.name, offers=offers)


def offer_of(described: draft_pb2.ProposerDescription) -> Offer:
    """What a policy is told of a proposer."""
    base = replace(tier_from_proto(described.default_tier), proposer=described.name)
    return Offer(
        base,
        max(described.max_nodes, base.num_draft_tokens),
        max(described.max_depth, base.num_steps),
    )


def proposers_of(
    descriptions: Iterable[draft_pb2.DraftServiceDescribeResponse],
) -> list[draft_pb2.ProposerDescription]:
    """Every proposer once, in the order of the draft replicas."""
    found: dict[str, draft_pb2.ProposerDescription] = {}
    for description in descriptions:
        for proposer in description.proposers:
            found.setdefault(proposer.name, proposer)
    return list(found.values())


def _written_tier(text: str) -> SpeculationField:
    try:
        return SpeculationField.model_validate_json(text)
    except ValidationError as error:
        reason = error.errors(include_url=False, include_context=False)[0]["msg"]
        raise InvalidArgument(
            f"speculation is neither a proposer's name nor a tier as JSON: {reason}",
            field="speculation",
        ) from None
