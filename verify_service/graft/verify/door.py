"""Checks what a gateway asks for before a session exists. Knows messages and limits."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from graft.common.errors import ContextLengthExceeded, InvalidArgument, Unsupported
from graft.common.grammar import Grammar, grammar_from_proto
from graft.common.sampling import (
    Sampling,
    StopRule,
    sampling_from_proto,
    stop_rule_from_proto,
)
from graft.common.tree import IntArray
from graft.v1 import sampling_pb2, verify_pb2
from graft.v1.sampling_pb2 import AcceptRule
from graft.verify.ending import Ending
from graft.verify.session import SessionRequest
from graft.verify.settings import VerifySettings

_COUPLED = Sampling()
MAX_TREE_DEADLINE_S = 60.0
MAX_TOP_LOGPROBS = 64

ACCEPT_RULES = (
    AcceptRule.ACCEPT_RULE_COUPLED,
    AcceptRule.ACCEPT_RULE_TARGET_ONLY,
    AcceptRule.ACCEPT_RULE_REJECTION,
    AcceptRule.ACCEPT_RULE_BLOCK,
)


@dataclass(frozen=True, slots=True)
class Door:
    """What this replica can take.

    default: the rule and the thresholds of sessions that name no rule. closed: why no session is
    let in; empty when they are. grammars: sessions may be held to a grammar.
    """

    vocab_size: int
    context_length: int
    eos_token_ids: frozenset[int]
    default: Sampling = _COUPLED
    closed: str = ""
    grammars: bool = False

    def check(self, message: verify_pb2.OpenSession) -> tuple[SessionRequest, Ending]:
        """The request and its ending.

        Raises:
            InvalidArgument: a field is out of its range, or a replay goes on past its end.
            ContextLengthExceeded: prompt and budget do not fit the context.
            Unsupported: an accept rule or a grammar that is not offered, or a replica that is not
                for clients.
        """
        if self.closed:
            raise Unsupported(self.closed)
        prompt = self._tokens("prompt_tokens", message.prompt_tokens)
        committed = self._tokens("committed_tokens", message.committed_tokens)
        if not len(prompt):
            raise InvalidArgument(
                "prompt_tokens is empty, expected at least one token", field="prompt_tokens"
            )
        sampling = self._ruled(message.sampling)
        _check_rule(sampling)
        self._tokens("logit_bias", sampling.logit_bias)
        stop = stop_rule_from_proto(message.stop)
        self._tokens("stop_token_ids", stop.stop_token_ids)
        room = self.context_length - len(prompt)
        if room < stop.max_tokens:
            raise ContextLengthExceeded(
                f"the prompt has {len(prompt)} tokens and {stop.max_tokens} more are asked for, "
                f"the context holds {self.context_length}",
                field="max_tokens" if room > 0 else "prompt_tokens",
            )
        if message.top_logprobs > MAX_TOP_LOGPROBS:
            raise InvalidArgument(
                f"top_logprobs is {message.top_logprobs}, expected 0 to {MAX_TOP_LOGPROBS}",
                field="top_logprobs",
            )
        ending = Ending.of(stop, self.eos_token_ids, room)
        if len(ending.cut(committed.tolist(), 0).tokens) < len(committed):
            raise InvalidArgument(
                "committed_tokens go on after a token that ends the session",
                field="committed_tokens",
            )
        request = SessionRequest(
            prompt=prompt,
            committed=committed,
            sampling=sampling,
            stop=stop,
            tree_deadline_s=tree_deadline(message.tree_deadline_micros),
            num_top_logprobs=message.top_logprobs,
            want_logprobs=message.want_logprobs,
            want_prompt_logprobs=message.want_prompt_logprobs,
            request_id=message.request_id,
            cache_salt=message.cache_salt,
            speculate=message.speculate,
            want_trace=message.want_trace,
            grammar=self._grammar(message, stop),
        )
        return request, ending

    def _ruled(self, message: sampling_pb2.Sampling) -> Sampling:
        """The law; one that names no rule has this replica's, with its thresholds."""
        sampling = sampling_from_proto(message)
        if message.rule:
            return sampling
        return replace(
            sampling,
            rule=self.default.rule,
            threshold_single=message.threshold_single or self.default.threshold_single,
            threshold_acc=message.threshold_acc or self.default.threshold_acc,
        )

    def _grammar(self, message: verify_pb2.OpenSession, stop: StopRule) -> Grammar | None:
        """The grammar asked for, its text unread."""
        if not message.HasField("grammar"):
            return None
        if not self.grammars:
            raise Unsupported("this replica holds no text to a grammar", field="grammar")
        if stop.ignore_eos:
            raise InvalidArgument(
                "ignore_eos has no meaning beside a grammar, which says where the text ends",
                field="ignore_eos",
            )
        return grammar_from_proto(message.grammar)

    def _tokens(self, field: str, tokens: Iterable[int]) -> IntArray:
        ids = np.fromiter(tokens, np.int64)
        if len(ids) and int(ids.max()) >= self.vocab_size:
            raise InvalidArgument(
                f"{field} holds {int(ids.max())}, the target's ids end at {self.vocab_size - 1}",
                field=field,
            )
        return ids.astype(np.int32)


def default_rule(settings: VerifySettings) -> Sampling:
    """The rule and the thresholds of sessions that name no rule."""
    return Sampling(
        rule=AcceptRule.Value(f"ACCEPT_RULE_{settings.accept_rule.upper()}"),
        threshold_single=settings.threshold_single,
        threshold_acc=settings.threshold_acc,
    )


def tree_deadline(micros: int) -> float:
    """A tree deadline in seconds.

    Raises:
        InvalidArgument: it is so long that a hanging drafter would stop the session.
    """
    if micros > MAX_TREE_DEADLINE_S * 1e6:
        raise InvalidArgument(
            f"tree_deadline_micros is {micros}, the longest wait is {MAX_TREE_DEADLINE_S:g} s",
            field="tree_deadline_micros",
        )
    return micros / 1e6


def _check_rule(sampling: Sampling) -> None:
    if sampling.rule not in ACCEPT_RULES:
        raise Unsupported(f"accept rule {sampling.rule} is not offered", field="rule")
    if sampling.lossy and sampling.rule != AcceptRule.ACCEPT_RULE_TARGET_ONLY:
        name = AcceptRule.Name(sampling.rule).removeprefix("ACCEPT_RULE_").lower()
        raise InvalidArgument(
            f"threshold_single and threshold_acc have no meaning under the {name} rule, "
            "expected 1, or the rule target_only",
            field="threshold_single" if sampling.threshold_single < 1.0 else "threshold_acc",
        )
