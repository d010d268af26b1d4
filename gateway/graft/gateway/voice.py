"""Commits to text and exact counts, for one choice. Knows no stream and no client.

The counts follow one rule: what is emitted is what is counted. A stop string, a stop id or an
end-of-sequence id that is not part of the text is not emitted; its log-probability is not either.
Speculation counts one thing more, the tokens of the stop itself, since those were decided too.
"""

from __future__ import annotations

from dataclasses import dataclass

from graft.common.prediction import Follower
from graft.gateway.choice import Committed, Ended, Opened, Plan
from graft.gateway.job import ChoicePlan, Job, PromptLogprob, Reason, Tally
from graft.gateway.metrics import Metrics, RoundStages
from graft.gateway.record import SpeculationRecord
from graft.gateway.text import Decided, Logprob, Origin, Piece, TextStream
from graft.gateway.tokenizer import Tokenizer
from graft.v1 import verify_pb2
from graft.v1.verify_pb2 import FinishReason, PlainReason

_END_IDS = (FinishReason.FINISH_REASON_EOS, FinishReason.FINISH_REASON_STOP_ID)
_NO_PIECE = Piece()


@dataclass(frozen=True, slots=True)
class Said:
    """What may leave after an event: a piece, and the prompt's scores with the first one."""

    piece: Piece = _NO_PIECE
    prompt: tuple[PromptLogprob, ...] = ()


NOTHING = Said()


class Counts:
    """What a request has cost, kept in step with the metrics."""

    def __init__(self, job: Job, metrics: Metrics) -> None:
        self.tally = Tally(num_prompt=sum(job.prompt_sizes))
        self.tally.record.tier = job.tier
        self.tally.record.inactive_reason = job.inactive_reason
        self._job = job
        self._metrics = metrics

    def round(self, commit: Committed, kept: int) -> None:
        """Counts one round of which `kept` tokens are before the end of the text."""
        self.tally.record.add_round(
            drafted=commit.num_drafted,
            accepted=commit.num_accepted,
            kept=kept,
            ahead=_ahead(commit),
        )
        reason = commit.plain_reason
        steered = bool(self._job.choices[0].plan.offers)
        speculates = not (commit.tier if steered else self._job.tier).off
        label = (commit.tier.proposer if speculates else "off") if steered else self._job.tier_label
        if speculates and reason not in (
            PlainReason.PLAIN_REASON_UNSPECIFIED,
            PlainReason.PLAIN_REASON_PREFILL,
        ):
            name = PlainReason.Name(reason).removeprefix("PLAIN_REASON_").lower()
            self._metrics.fallback(name)
        timing = commit.timing
        self._metrics.round(
            tier=label,
            drafted=commit.num_drafted,
            accepted=commit.num_accepted,
            kept=kept,
            stages=RoundStages(
                draft=timing.draft_micros,
                wire=max(0, timing.tree_wait_micros - timing.draft_micros),
                verify=timing.queue_micros + timing.forward_micros,
                commit=timing.choice_micros,
            ),
        )

    def lossy(self, rule: str) -> None:
        """Counts a choice whose accept rule trades exactness for acceptance."""
        self._metrics.lossy(rule)


class Voice:
    """Text, counts and speculation record of one choice."""

    def __init__(self, choice: ChoicePlan, tokenizer: Tokenizer, counts: Counts) -> None:
        self.text = TextStream(
            lambda token: tokenizer.token_bytes(token, skip_specials=choice.hides(token)),
            choice.stops,
        )
        self.record = SpeculationRecord(tier=choice.plan.tier)
        self.opened = False
        self.num_emitted = 0
        self._choice = choice
        self._counts = counts
        self._withheld: Decided | None = None
        self._end_ids = choice.plan.stop.stop_token_ids
        self._follower = Follower(choice.plan.prediction)
        counts.tally.num_predicted += len(choice.plan.prediction)

    def open(self, opened: Opened) -> bool:
        """True for the first session of the choice, False for a replay."""
        if not self._choice.plan.stop.ignore_eos:
            self._end_ids = self._end_ids | opened.eos_tokens
        first, self.opened = not self.opened, True
        law = opened.law
        for record in (self.record, self._counts.tally.record):
            record.ruled(law.rule_name, law.lossy, opened.simulated)
        if first and law.lossy:
            self._counts.lossy(law.rule_name)
        return first

    def commit(self, commit: Committed) -> Said:
        """Feeds one commit. A last token that ends the session waits for the session's word."""
        decided = _decided(commit, self._choice.plan.want_logprobs)
        if self._withheld is not None:
            decided.insert(0, self._withheld)
            self._withheld = None
        if decided[-1].token in self._end_ids:
            self._withheld = decided.pop()
        before = self.text.num_fed
        piece = self._emit(self.text.feed(decided))
        kept = self.text.num_fed - before
        if self._withheld is not None and self.text.stopped is None:
            kept += 1
        if self._choice.plan.prediction:
            came = self._follower.feed(commit.tokens[:kept])
            self._counts.tally.num_predicted_accepted += came
        if commit.plain_reason != PlainReason.PLAIN_REASON_PREFILL:
            self._count(commit, kept)
        return Said(piece, _prompt_logprobs(self._choice.plan, commit))

    def end(self, ended: Ended) -> tuple[Said, Reason, str | int | None]:
        """The rest of the text, why it ended, and the id it ended at."""
        by_id = ended.reason == FinishReason.FINISH_REASON_STOP_ID
        if self._choice.discard:
            return NOTHING, "length", None
        withheld = self._withheld
        piece = Piece()
        if withheld is not None and (
            ended.reason not in _END_IDS or (by_id and self._choice.stops.included)
        ):
            piece = self.text.feed([withheld])
        if self.text.stopped is None:
            piece = piece + self.text.finish()
        said = Said(self._emit(piece))
        if self.text.stopped is not None:
            return said, "stop", self.text.stopped
        if ended.reason in _END_IDS:
            return said, "stop", ended.stop_token if by_id else None
        return said, "length", None

    def _emit(self, piece: Piece) -> Piece:
        if self._choice.discard:
            return Piece()
        self.num_emitted += len(piece.tokens)
        self._counts.tally.num_completion += len(piece.tokens)
        return piece

    def _count(self, commit: Committed, kept: int) -> None:
        self.record.add_round(
            drafted=commit.num_drafted,
            accepted=commit.num_accepted,
            kept=kept,
            ahead=_ahead(commit),
        )
        self._counts.round(commit, kept)


def _ahead(commit: Committed) -> bool:
    """True when the round had a tree and waited for none: it was there when its turn came."""
    return commit.num_drafted > 0 and commit.timing.tree_wait_micros == 0


def _decided(commit: Committed, want_logprobs: bool) -> list[Decided]:
    drafted = commit.num_drafted > 0
    decided = []
    for place, token in enumerate(commit.tokens):
        if place < commit.num_accepted:
            origin = Origin.ACCEPTED
        else:
            origin = Origin.BONUS if drafted else Origin.PLAIN
        logprob = _logprob(commit.logprobs[place]) if want_logprobs else None
        decided.append(Decided(token, origin, logprob))
    return decided


def _logprob(entry: verify_pb2.TokenLogprobs) -> Logprob:
    return Logprob(entry.logprob, tuple(zip(entry.top_tokens, entry.top_logprobs, strict=True)))


def _prompt_logprobs(plan: Plan, commit: Committed) -> tuple[PromptLogprob, ...]:
    if not commit.prompt_logprobs:
        return ()
    rest = [PromptLogprob(entry.token, _logprob(entry)) for entry in commit.prompt_logprobs]
    return (PromptLogprob(plan.prompt[0], None), *rest)
