"""What the gateway answers, as values. Knows protos; knows no channel."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from graft.common.tier import Tier, tier_from_proto
from graft.v1 import gateway_pb2, shown_round_pb2

Origin = Literal["accepted", "bonus", "plain"]
Reason = Literal["stop", "length", "tool_calls"]
Stop = str | int | None

_ORIGINS: dict[int, Origin] = {
    gateway_pb2.TOKEN_ORIGIN_ACCEPTED: "accepted",
    gateway_pb2.TOKEN_ORIGIN_BONUS: "bonus",
    gateway_pb2.TOKEN_ORIGIN_PLAIN: "plain",
}
_REASONS: dict[int, Reason] = {
    gateway_pb2.END_REASON_STOP: "stop",
    gateway_pb2.END_REASON_LENGTH: "length",
    gateway_pb2.END_REASON_TOOL_CALLS: "tool_calls",
}


@dataclass(frozen=True, slots=True)
class Alternative:
    """A likely token beside the one that was chosen."""

    id: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class Token:
    """One token; the texts of all join to what the model wrote, reasoning and calls included."""

    id: int
    text: str
    origin: Origin
    logprob: float | None = None
    top: tuple[Alternative, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptToken:
    """One token of an echoed prompt; the first one has no log-probability."""

    id: int
    text: str
    logprob: float | None = None
    top: tuple[Alternative, ...] = ()


@dataclass(frozen=True, slots=True)
class Tree:
    """A round's tree in preorder, the root first; its parent is -1 and its probability 1.

    choices: the target's own token after every node; empty under accept rules without.
    """

    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    parents: tuple[int, ...]
    probabilities: tuple[float, ...]
    accepted_nodes: tuple[int, ...]
    choices: tuple[int, ...]
    choice_probabilities: tuple[float, ...]
    bonus_probability: float


@dataclass(frozen=True, slots=True)
class Round:
    """One commit of a choice. `plain_reason` is empty where there was a tree."""

    number: int
    at_s: float
    plain_reason: str
    tokens: tuple[int, ...]
    texts: tuple[str, ...]
    num_accepted: int
    num_drafted: int
    draft_s: float
    tree_wait_s: float
    queue_s: float
    forward_s: float
    choice_s: float
    tree: Tree | None = None


@dataclass(frozen=True, slots=True)
class Call:
    """A call of a function; `arguments` are JSON as the model wrote it."""

    id: str
    name: str
    arguments: str = ""


@dataclass(frozen=True, slots=True)
class CallPiece:
    """A piece of a call of a streamed answer; only the first one has an id and a name."""

    index: int
    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request has cost, in tokens; `num_accepted_prediction` of those predicted came."""

    num_prompt: int
    num_completion: int
    num_cached: int
    num_reasoning: int = 0
    num_predicted: int = 0
    num_accepted_prediction: int = 0


@dataclass(frozen=True, slots=True)
class Speculation:
    """What speculation did for a request. `accept_length` counts the bonus."""

    active: bool
    tier: Tier
    inactive_reason: str
    num_rounds: int
    num_drafted: int
    num_accepted: int
    accept_length: float
    accept_rule: str
    lossy: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """One finished text, with what the model thought before it and the functions it calls."""

    index: int
    text: str
    tokens: tuple[Token, ...]
    reason: Reason
    stop: Stop = None
    rounds: tuple[Round, ...] = ()
    prompt: tuple[PromptToken, ...] = ()
    reasoning: str = ""
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a request."""

    id: str
    model: str
    choices: tuple[Choice, ...]
    usage: Usage
    speculation: Speculation

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text

    @property
    def calls(self) -> tuple[Call, ...]:
        """The calls of the first choice."""
        return self.choices[0].calls


@dataclass(frozen=True, slots=True)
class Piece:
    """A step of a streamed answer.

    The last piece of a choice has a `reason`; the last piece of all, and no other, has `usage` and
    `speculation`.
    """

    id: str
    index: int = 0
    text: str = ""
    tokens: tuple[Token, ...] = ()
    rounds: tuple[Round, ...] = ()
    prompt: tuple[PromptToken, ...] = ()
    reasoning: str = ""
    calls: tuple[CallPiece, ...] = ()
    reason: Reason | None = None
    stop: Stop = None
    usage: Usage | None = None
    speculation: Speculation | None = None


@dataclass(frozen=True, slots=True)
class Model:
    """A served model. The first of `tiers` is "auto"."""

    id: str
    context_length: int
    tiers: tuple[Tier, ...]


@dataclass(frozen=True, slots=True)
class Replica:
    """What the gateway knows of a replica behind it."""

    kind: Literal["verify", "draft"]
    address: str
    state: str
    detail: str
    num_sessions: int


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """How the server is doing."""

    version: str
    model: str
    state: str
    detail: str
    default_speculation: str
    accept_length: float
    num_in_flight: int
    replicas: tuple[Replica, ...]


def answer_of(message: gateway_pb2.Answer) -> Answer:
    return Answer(
        id=message.id,
        model=message.model,
        choices=tuple(map(_choice, message.choices)),
        usage=_usage(message.usage),
        speculation=_speculation(message.speculation),
    )


def piece_of(event: gateway_pb2.AnswerEvent) -> Piece | None:
    """The piece of an event; None for one that says nothing to a reader."""
    match event.WhichOneof("event"):
        case "delta":
            delta = event.delta
            return Piece(
                id=event.id,
                index=delta.index,
                text=delta.text,
                tokens=tuple(map(_token, delta.tokens)),
                rounds=tuple(map(_round, delta.rounds)),
                prompt=tuple(map(_prompt_token, delta.prompt)),
                reasoning=delta.reasoning,
                calls=tuple(
                    CallPiece(one.index, one.id, one.name, one.arguments)
                    for one in delta.tool_calls
                ),
            )
        case "finished":
            finished = event.finished
            return Piece(
                id=event.id,
                index=finished.index,
                reason=_REASONS[finished.reason],
                stop=_stop(finished),
            )
        case "completed":
            completed = event.completed
            return Piece(
                id=event.id,
                usage=_usage(completed.usage),
                speculation=_speculation(completed.speculation),
            )
        case _:
            return None


def model_of(message: gateway_pb2.Model) -> Model:
    tiers = tuple(map(tier_from_proto, message.tiers))
    return Model(message.id, message.context_length, tiers)


def server_info_of(message: gateway_pb2.GetServerInfoResponse) -> ServerInfo:
    return ServerInfo(
        version=message.version,
        model=message.model,
        state=message.state,
        detail=message.detail,
        default_speculation=message.default_speculation,
        accept_length=message.accept_length,
        num_in_flight=message.in_flight_count,
        replicas=tuple(
            Replica(
                kind="verify" if replica.kind == "verify" else "draft",
                address=replica.address,
                state=replica.state,
                detail=replica.detail,
                num_sessions=replica.session_count,
            )
            for replica in message.replicas
        ),
    )


def _choice(message: gateway_pb2.Choice) -> Choice:
    return Choice(
        index=message.index,
        text=message.text,
        tokens=tuple(map(_token, message.tokens)),
        reason=_REASONS[message.reason],
        stop=_stop(message),
        rounds=tuple(map(_round, message.rounds)),
        prompt=tuple(map(_prompt_token, message.prompt)),
        reasoning=message.reasoning,
        calls=tuple(Call(one.id, one.name, one.arguments) for one in message.tool_calls),
    )


def _stop(message: gateway_pb2.Choice | gateway_pb2.ChoiceFinished) -> Stop:
    if message.HasField("stop_string"):
        return message.stop_string
    return message.stop_token if message.HasField("stop_token") else None


def _token(message: gateway_pb2.GeneratedToken) -> Token:
    return Token(
        id=message.token,
        text=message.text,
        origin=_ORIGINS[message.origin],
        logprob=message.logprob if message.HasField("logprob") else None,
        top=_alternatives(message.top),
    )


def _prompt_token(message: gateway_pb2.PromptToken) -> PromptToken:
    logprob = message.logprob if message.HasField("logprob") else None
    return PromptToken(message.token, message.text, logprob, _alternatives(message.top))


def _alternatives(messages: Iterable[gateway_pb2.AlternativeToken]) -> tuple[Alternative, ...]:
    return tuple(Alternative(one.token, one.text, one.logprob) for one in messages)


def _usage(message: gateway_pb2.Usage) -> Usage:
    return Usage(
        num_prompt=message.prompt_token_count,
        num_completion=message.completion_token_count,
        num_cached=message.cached_token_count,
        num_reasoning=message.reasoning_token_count,
        num_predicted=message.predicted_token_count,
        num_accepted_prediction=message.accepted_prediction_token_count,
    )


def _speculation(message: gateway_pb2.SpeculationReport) -> Speculation:
    return Speculation(
        active=message.active,
        tier=tier_from_proto(message.tier),
        inactive_reason=message.inactive_reason,
        num_rounds=message.round_count,
        num_drafted=message.drafted_count,
        num_accepted=message.accepted_count,
        accept_length=message.accept_length,
        accept_rule=message.accept_rule,
        lossy=message.lossy,
    )


def _round(message: shown_round_pb2.ShownRound) -> Round:
    timing = message.timing
    return Round(
        number=message.number,
        at_s=message.at_micros / 1e6,
        plain_reason=message.plain_reason,
        tokens=tuple(message.tokens),
        texts=tuple(message.texts),
        num_accepted=message.accepted_count,
        num_drafted=message.drafted_count,
        draft_s=timing.draft_micros / 1e6,
        tree_wait_s=timing.tree_wait_micros / 1e6,
        queue_s=timing.queue_micros / 1e6,
        forward_s=timing.forward_micros / 1e6,
        choice_s=timing.choice_micros / 1e6,
        tree=_tree(message.tree) if message.HasField("tree") else None,
    )


def _tree(message: shown_round_pb2.ShownTree) -> Tree:
    return Tree(
        tokens=tuple(message.tokens),
        texts=tuple(message.texts),
        parents=(-1, *message.parents),
        probabilities=(1.0, *message.probabilities),
        accepted_nodes=tuple(message.accepted_nodes),
        choices=tuple(message.choices),
        choice_probabilities=tuple(message.choice_probabilities),
        bonus_probability=message.bonus_probability,
    )
