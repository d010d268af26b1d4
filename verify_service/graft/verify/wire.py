"""Values to messages. Knows graft.v1; decides nothing."""

from __future__ import annotations

from collections.abc import Iterable

from graft.common.sampling import sampling_to_proto
from graft.v1 import features_pb2, verify_pb2
from graft.verify.events import (
    ClosedTold,
    Committed,
    CommitTold,
    FeaturesTold,
    Finished,
    PrefixTold,
    RefusalTold,
    Rows,
    StreamEvent,
    Timing,
    TokenLogprob,
    TreeTrace,
)


def committed_message(event: Committed) -> verify_pb2.TokensCommitted:
    """What the gateway learns of a round."""
    return verify_pb2.TokensCommitted(
        tokens=event.tokens,
        accepted_count=event.accepted,
        node_count=event.num_drafted,
        depth=event.depth,
        prefix_length=event.prefix_length,
        logprobs=_logprobs(event.logprobs),
        prompt_logprobs=_logprobs(event.prompt_logprobs),
        timing=_timing(event.timing),
        plain_reason=event.plain_reason,
        trace=None if event.trace is None else _trace(event.trace, event.accepted),
        accepted_ranks=event.accepted_ranks,
        rejected_child_count=event.rejected_children,
    )


def finished_message(event: Finished) -> verify_pb2.SessionFinished:
    """What the gateway learns last."""
    return verify_pb2.SessionFinished(
        reason=event.reason,
        stop_token=event.stop_token,
        round_count=event.num_rounds,
        drafted_count=event.num_drafted,
        accepted_count=event.num_accepted,
    )


def add_told(message: verify_pb2.RoundsResponse, event: StreamEvent) -> None:
    """In place: appends one event to the message for a draft service."""
    match event:
        case FeaturesTold():
            message.features.add(session_id=event.session_id, rows=_rows(event.rows))
        case PrefixTold():
            message.prefixes.add(
                session_id=event.session_id,
                tokens=event.tokens.tolist(),
                prompt_token_count=event.prompt_length,
                sampling=sampling_to_proto(event.sampling),
                room=event.room,
                cache_salt=event.cache_salt,
            )
        case CommitTold():
            message.commits.add(
                session_id=event.session_id,
                tokens=event.tokens,
                prefix_length=event.prefix_length,
                prefix_digest=event.prefix_digest,
                accepted_count=event.accepted,
                node_count=event.num_drafted,
                features=None if event.rows is None else _rows(event.rows),
            )
        case RefusalTold():
            message.refusals.add(
                session_id=event.session_id,
                prefix_length=event.prefix_length,
                refusal=event.refusal,
            )
        case ClosedTold():
            message.closed.add(session_id=event.session_id, error=event.error)


def _rows(rows: Rows) -> features_pb2.FeatureRows:
    return features_pb2.FeatureRows(
        start_position=rows.start, row_count=rows.count, payload=rows.payload
    )


def _trace(trace: TreeTrace, accepted: int) -> verify_pb2.RoundTrace:
    """accepted: drafted tokens kept, which the end of the session may have cut."""
    return verify_pb2.RoundTrace(
        tokens=trace.tokens,
        parents=trace.parents,
        accepted_nodes=trace.path[:accepted],
        logprobs=trace.logprobs,
        choices=trace.choices,
        choice_logprobs=trace.choice_logprobs,
        bonus_logprob=trace.bonus_logprob,
    )


def _timing(timing: Timing) -> verify_pb2.RoundTiming:
    return verify_pb2.RoundTiming(
        draft_micros=_micros(timing.draft_s),
        tree_wait_micros=_micros(timing.tree_wait_s),
        queue_micros=_micros(timing.queue_s),
        forward_micros=_micros(timing.forward_s),
        choice_micros=_micros(timing.choice_s),
        batch_row_count=timing.num_rows,
        batch_session_count=timing.num_sessions,
    )


def _micros(seconds: float) -> int:
    return min(int(seconds * 1e6), (1 << 32) - 1)


def _logprobs(scores: Iterable[TokenLogprob]) -> list[verify_pb2.TokenLogprobs]:
    return [
        verify_pb2.TokenLogprobs(
            token=score.token,
            logprob=score.logprob,
            top_tokens=score.top_tokens,
            top_logprobs=score.top_logprobs,
        )
        for score in scores
    ]
