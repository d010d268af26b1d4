"""What one choice is to be, and what is told of it on its way. Only values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graft.common.sampling import Sampling, StopRule
from graft.common.tier import OFF, Tier
from graft.gateway.request import SpeculationField
from graft.gateway.structured import Structure
from graft.gateway.tiers.choose import Offer
from graft.v1 import verify_pb2
from graft.v1.verify_pb2 import FinishReason, PlainReason


@dataclass(frozen=True, slots=True)
class Plan:
    """What one choice is to be.

    offers: the proposers that a policy may choose from; none keeps the tier as it is.
    prediction: tokens that the client expects to come.
    late: the `speculation` of a request that came before any drafter was known.
    """

    prompt: Sequence[int]
    sampling: Sampling
    stop: StopRule
    tier: Tier
    want_logprobs: bool = False
    top_logprobs: int = 0
    want_prompt_logprobs: bool = False
    request_id: str = ""
    cache_salt: str = ""
    want_trace: bool = False
    structure: Structure | None = None
    offers: tuple[Offer, ...] = ()
    prediction: tuple[int, ...] = ()
    late: str | SpeculationField | None = None


@dataclass(frozen=True, slots=True)
class Limits:
    """Deadlines of a choice, in seconds, and the deadline of a tree in microseconds."""

    request_s: float
    progress_s: float
    replay_s: float
    tree_micros: int


@dataclass(frozen=True, slots=True)
class Opened:
    """The session exists, for the first time or again.

    law: with the accept rule and the thresholds that the replica has put in force. simulated: its
    acceptance is drawn for a benchmark, so the text means nothing.
    """

    num_cached: int
    tier: Tier
    eos_tokens: frozenset[int]
    law: Sampling
    simulated: bool


@dataclass(frozen=True, slots=True)
class Committed:
    """One commit; the message's fields are read once, here. `tier` is the one it was drafted at."""

    tokens: tuple[int, ...]
    num_accepted: int
    num_drafted: int
    plain_reason: PlainReason.ValueType
    logprobs: Sequence[verify_pb2.TokenLogprobs]
    prompt_logprobs: Sequence[verify_pb2.TokenLogprobs]
    timing: verify_pb2.RoundTiming
    tier: Tier = OFF
    trace: verify_pb2.RoundTrace | None = None


@dataclass(frozen=True, slots=True)
class Ended:
    """The session is over. `stop_token` is the id that ended it, for EOS and STOP_ID."""

    reason: FinishReason.ValueType
    stop_token: int


Event = Opened | Committed | Ended
