"""A span for each attended session, and one for each of its sampled proposals."""

from __future__ import annotations

from dataclasses import dataclass

from opentelemetry.trace import Span, SpanKind

from graft.common.tier import Tier
from graft.common.tracing import OFF, Tracing, parent_of
from graft.draft.events import Proposed


@dataclass(slots=True)
class _Open:
    span: Span
    num_proposals: int = 0


class SessionSpans:
    """The spans of sessions whose gateway named one; owned by the loop's thread."""

    def __init__(self, tracing: Tracing = OFF) -> None:
        self._tracing = tracing
        self._open: dict[int, _Open] = {}

    def begin(self, session_id: int, traceparent: str, tier: Tier) -> None:
        """The session is attended from now on."""
        if not (self._tracing.enabled and traceparent):
            return
        parent = parent_of({"traceparent": traceparent})
        if parent is None:
            return
        self.end(session_id)
        attributes: dict[str, str | bool | int | float] = {
            "graft.session": f"{session_id:016x}",
            "graft.proposer": tier.proposer,
            "graft.num_draft_tokens": tier.num_draft_tokens,
        }
        span = self._tracing.begin("attend", parent, SpanKind.SERVER, attributes)
        self._open[session_id] = _Open(span)

    def proposed(self, session_id: int, made: Proposed) -> None:
        """A proposer has worked for the session."""
        found = self._open.get(session_id)
        if found is None:
            return
        number = found.num_proposals
        found.num_proposals += 1
        if self._tracing.sampled(number):
            attributes: dict[str, str | bool | int | float] = {
                "graft.proposal": number,
                "graft.proposer": made.proposer,
                "graft.prefix_length": made.prefix_length,
                "graft.trees": len(made.trees),
            }
            self._tracing.past("propose", found.span, made.elapsed_s, attributes)

    def end(self, session_id: int) -> None:
        """The session is left, or over; unknown sessions are fine."""
        found = self._open.pop(session_id, None)
        if found is not None:
            found.span.set_attribute("graft.proposals", found.num_proposals)
            found.span.end()
