"""What a session's span says: its size, and a span for each of its sampled rounds."""

from __future__ import annotations

from graft.common.tracing import Tracing, current
from graft.v1.verify_pb2 import PlainReason
from graft.verify.events import Committed
from graft.verify.session import Session


class SessionSpan:
    """The span that the session's call runs in; does nothing where the call is not traced."""

    def __init__(self, tracing: Tracing, session: Session) -> None:
        self._tracing = tracing
        self._session = session
        self._span = current()
        self._num_rounds = 0
        if self._span.is_recording():
            self._span.set_attributes(
                {
                    "graft.session": f"{session.session_id:016x}",
                    "graft.request": session.request.request_id,
                    "graft.prompt_tokens": session.prompt_length,
                }
            )

    def committed(self, event: Committed) -> None:
        """A round is over; the prefill counts as the first one."""
        number = self._num_rounds
        self._num_rounds += 1
        if not (self._span.is_recording() and self._tracing.sampled(number)):
            return
        timing = event.timing
        lasted_s = timing.tree_wait_s + timing.queue_s + timing.forward_s + timing.choice_s
        attributes: dict[str, str | bool | int | float] = {
            "graft.round": number,
            "graft.drafted_tokens": event.num_drafted,
            "graft.accepted_tokens": event.accepted,
            "graft.tokens": len(event.tokens),
            "graft.prefix_length": event.prefix_length,
            "graft.batch_rows": timing.num_rows,
            "graft.draft_ms": timing.draft_s * 1e3,
            "graft.tree_wait_ms": timing.tree_wait_s * 1e3,
            "graft.queue_ms": timing.queue_s * 1e3,
            "graft.forward_ms": timing.forward_s * 1e3,
            "graft.choice_ms": timing.choice_s * 1e3,
        }
        if event.plain_reason:
            reason = PlainReason.Name(event.plain_reason).removeprefix("PLAIN_REASON_")
            attributes["graft.plain_reason"] = reason.lower()
        self._tracing.past("round", self._span, lasted_s, attributes)

    def ended(self, end: str) -> None:
        """The session is over; the call's span ends with the call."""
        if self._span.is_recording():
            session = self._session
            self._span.set_attributes(
                {
                    "graft.end": end,
                    "graft.tokens": session.generated,
                    "graft.rounds": session.num_rounds,
                    "graft.accepted_tokens": session.num_accepted,
                }
            )
