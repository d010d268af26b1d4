"""How eager the goodput policy is. Only numbers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Knobs:
    """Rounds, seconds, and shares of a rate or of time.

    interval, dwell: rounds between two decisions, and after a switch before one for gain.
    margin: gain that another tier must promise, and margin_more for every switch of late, that is
        of the last margin_window_s. A way back from tier 0 needs return_more for the first time
        that drafting began or ended of late, less for each further one, most for those soon undone.
    pays: gain over plain decoding at which drafting begins.
    sinks: expected loss at which it ends at once, before anything was lost.
    lost_s: what drafting may lose in any window of the ledger before it has to pay or end;
        start_s: of that, what a session's first rounds may lose while little is known.
    probe_share: share of a session's time that tries may cost.
    own_half_life, crowd_half_life: rounds after which what was seen counts half.
    """

    interval: int = 8
    dwell: int = 8
    margin: float = 0.03
    margin_more: float = 0.04
    return_more: float = 0.5
    margin_window_s: float = 60.0
    pays: float = 0.03
    sinks: float = 0.1
    lost_s: float = 0.08
    start_s: float = 0.05
    probe_share: float = 0.01
    probe_least_s: float = 1.0
    probe_most_s: float = 4.0
    rival_least_s: float = 2.0
    rival_most_s: float = 20.0
    own_half_life: float = 100.0
    crowd_half_life: float = 150.0


KNOBS = Knobs()
SCANT_ROUNDS = 8
