"""What a request's span says of its answer: counts and names from small sets, never its text."""

from __future__ import annotations

from graft.common.tracing import current
from graft.gateway.answer import Answer


def describe_answer(model: str, answer: Answer) -> None:
    """Adds what the answer has cost so far to the current span."""
    span = current()
    if not span.is_recording():
        return
    tally, job = answer.tally, answer.job
    record = tally.record
    span.set_attributes(
        {
            "gen_ai.request.model": model,
            "gen_ai.usage.input_tokens": tally.num_prompt,
            "gen_ai.usage.output_tokens": tally.num_completion,
            "graft.request": job.request_id,
            "graft.choices": len(job.choices),
            "graft.cached_tokens": tally.num_cached,
            "graft.tier": job.tier_label,
            "graft.rounds": record.num_rounds,
            "graft.tree_rounds": record.num_tree_rounds,
            "graft.drafted_tokens": record.num_drafted,
            "graft.accepted_tokens": record.num_accepted,
        }
    )
