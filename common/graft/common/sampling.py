"""The sampling law of a session and where it ends, checked once at the door."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from graft.common.errors import InvalidArgument
from graft.v1 import sampling_pb2
from graft.v1.sampling_pb2 import AcceptRule

MAX_TEMPERATURE = 100.0
MAX_LOGIT_BIAS = 300


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the target chooses a token; the meaning of each field is in sampling.proto.

    Filters apply in this order to the penalised logits divided by the temperature: top_k (ties
    with the k-th value stay), top_p on what is left, renormalised, min_p.

    Raises:
        InvalidArgument: a field is out of its range; `field` names it.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    rule: AcceptRule.ValueType = AcceptRule.ACCEPT_RULE_COUPLED
    threshold_single: float = 1.0
    threshold_acc: float = 1.0

    def __post_init__(self) -> None:
        _within("temperature", self.temperature, 0.0, MAX_TEMPERATURE)
        _within("top_k", self.top_k, 0, 2**31 - 1)
        _within("top_p", self.top_p, 0.0, 1.0, open_low=True)
        _within("min_p", self.min_p, 0.0, 1.0)
        _within("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _within("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _within("repetition_penalty", self.repetition_penalty, 0.0, 100.0, open_low=True)
        _within("threshold_single", self.threshold_single, 0.0, 1.0)
        _within("threshold_acc", self.threshold_acc, 0.0, 1.0)
        if not 0 <= self.seed < 1 << 64:
            raise InvalidArgument(f"seed is {self.seed}, expected 0..2^64 - 1", field="seed")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidArgument(
                f"logit_bias names {len(self.logit_bias)} tokens, limit is {MAX_LOGIT_BIAS}",
                field="logit_bias",
            )
        for token, bias in self.logit_bias.items():
            if not -100.0 <= bias <= 100.0:
                raise InvalidArgument(
                    f"logit_bias of token {token} is {bias}, expected -100 to 100",
                    field="logit_bias",
                )

    @property
    def greedy(self) -> bool:
        """True when no noise is used."""
        return self.temperature == 0.0 or self.top_k == 1

    @property
    def has_penalties(self) -> bool:
        """True when a node's logits depend on the tokens before it."""
        return (
            self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
            or self.repetition_penalty != 1.0
        )

    @property
    def compares_probs(self) -> bool:
        """True when the rule compares what was drafted from with the target, so on chains alone."""
        return self.rule in (AcceptRule.ACCEPT_RULE_REJECTION, AcceptRule.ACCEPT_RULE_BLOCK)

    @property
    def needs_draft_probs(self) -> bool:
        """True when a tree is of no use without what its tokens were drawn from."""
        return self.compares_probs and not self.greedy

    @property
    def rule_name(self) -> str:
        """The rule in lower case, as settings and requests write it."""
        return AcceptRule.Name(self.rule).removeprefix("ACCEPT_RULE_").lower()

    @property
    def lossy(self) -> bool:
        """True when a threshold trades exactness for acceptance."""
        return self.threshold_single < 1.0 or self.threshold_acc < 1.0


@dataclass(frozen=True, slots=True)
class StopRule:
    """Where a session ends, apart from stop strings.

    Raises:
        InvalidArgument: a field is out of its range.
    """

    max_tokens: int
    min_tokens: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        _within("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _within("min_tokens", self.min_tokens, 0, self.max_tokens)


def sampling_from_proto(message: sampling_pb2.Sampling) -> Sampling:
    """Reads the wire form, where zero means the default."""
    return Sampling(
        temperature=message.temperature,
        top_k=message.top_k,
        top_p=message.top_p or 1.0,
        min_p=message.min_p,
        seed=message.seed,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        repetition_penalty=message.repetition_penalty or 1.0,
        logit_bias=dict(message.logit_bias),
        rule=message.rule or AcceptRule.ACCEPT_RULE_COUPLED,
        threshold_single=message.threshold_single or 1.0,
        threshold_acc=message.threshold_acc or 1.0,
    )


def sampling_to_proto(sampling: Sampling) -> sampling_pb2.Sampling:
    """The wire form; a law that names no rule leaves the thresholds to the receiver as well."""
    ruled = sampling.rule != AcceptRule.ACCEPT_RULE_UNSPECIFIED
    return sampling_pb2.Sampling(
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        min_p=sampling.min_p,
        seed=sampling.seed,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=dict(sampling.logit_bias),
        rule=sampling.rule,
        threshold_single=sampling.threshold_single if ruled else 0.0,
        threshold_acc=sampling.threshold_acc if ruled else 0.0,
    )


def stop_rule_from_proto(message: sampling_pb2.StopRule) -> StopRule:
    """Reads the wire form."""
    return StopRule(
        max_tokens=message.max_tokens,
        min_tokens=message.min_tokens,
        stop_token_ids=frozenset(message.stop_token_ids),
        ignore_eos=message.ignore_eos,
    )


def stop_rule_to_proto(stop: StopRule) -> sampling_pb2.StopRule:
    """The wire form."""
    return sampling_pb2.StopRule(
        max_tokens=stop.max_tokens,
        min_tokens=stop.min_tokens,
        stop_token_ids=sorted(stop.stop_token_ids),
        ignore_eos=stop.ignore_eos,
    )


def _within(name: str, value: float, low: float, high: float, *, open_low: bool = False) -> None:
    inside = low < value <= high if open_low else low <= value <= high
    if not (math.isfinite(value) and inside):
        bracket = "above" if open_low else "from"
        raise InvalidArgument(
            f"{name} is {value}, expected {bracket} {low:g} to {high:g}", field=name
        )
