"""What a draft service sends, as commands for the engine. Decodes trees; knows no session."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from graft.common.channel import PROTOCOL_REVISION
from graft.common.draft_probs import Distribution, decode_probs
from graft.common.errors import Mismatch
from graft.common.features import FeatureSpec, spec_from_proto
from graft.common.tree import Tree, TreeLimits, TreeRefused
from graft.common.tree_codec import decode
from graft.v1 import tree_pb2, verify_pb2
from graft.verify.engine import Command
from graft.verify.offer import FeatureWish
from graft.verify.scheduler import Scheduler
from graft.verify.shelf import PrefixName, Proposal

_UNKNOWN_ROOT = 0


@dataclass(frozen=True, slots=True)
class Identity:
    """What a drafter must agree with."""

    vocab_size: int
    tokenizer_digest: str


def check_hello(hello: verify_pb2.DraftHello, target: Identity) -> None:
    """Refuses a draft service that does not fit the target.

    Equal tokenizers make heads of different padding fit: ids past the smaller one are refused
    tree by tree.

    Raises:
        Mismatch: the sentence says what differs.
    """
    if hello.protocol_revision != PROTOCOL_REVISION:
        raise Mismatch(
            f"the draft service speaks protocol revision {hello.protocol_revision}, "
            f"this replica speaks {PROTOCOL_REVISION}",
            field="protocol_revision",
        )
    if hello.tokenizer_digest:
        if hello.tokenizer_digest != target.tokenizer_digest:
            raise Mismatch(
                f"the drafter's tokenizer has digest {hello.tokenizer_digest[:16]}, "
                f"the target's has {target.tokenizer_digest[:16]}",
                field="tokenizer_digest",
            )
    elif hello.vocab_size and hello.vocab_size != target.vocab_size:
        raise Mismatch(
            f"the drafter's vocabulary has {hello.vocab_size} tokens, "
            f"the target's has {target.vocab_size}",
            field="vocab_size",
        )


def announced(hello: verify_pb2.DraftHello) -> tuple[FeatureSpec, ...]:
    """The hidden states that joins may ask for.

    Raises:
        InvalidArgument: one of them is nonsense.
    """
    return tuple(spec_from_proto(message) for message in hello.features)


def command_of(
    message: verify_pb2.RoundsRequest, stream: int, limits: TreeLimits, arrived: float
) -> Command:
    """One command that applies the parts of a message in their order."""
    commands = [*_commands(message, stream, limits, arrived)]

    def apply(scheduler: Scheduler, now: float) -> None:
        for command in commands:
            command(scheduler, now)

    return apply


def _commands(
    message: verify_pb2.RoundsRequest, stream: int, limits: TreeLimits, arrived: float
) -> Iterator[Command]:
    for join in message.joins:
        yield _join(join, stream)
    for tree in message.trees:
        yield _tree(tree, stream, limits, arrived)
    for empty in message.empties:
        name = (empty.prefix_length, empty.prefix_digest)
        nothing = Proposal(None, behind=empty.behind, arrived=arrived, stream=stream)
        yield _offer(empty.session_id, name, nothing)
    for leave in message.leaves:
        yield _leave(stream, leave.session_id)


def _tree(
    message: tree_pb2.CandidateTree, stream: int, limits: TreeLimits, arrived: float
) -> Command:
    name = (message.prefix_length, message.prefix_digest)
    session_id = message.session_id
    try:
        tree = decode(_UNKNOWN_ROOT, message.shape, message.tokens, message.scores, limits)
        probs = _probs(message, tree, limits.vocab_size)
    except TreeRefused as refused:
        refusal = refused.refusal
        empty = Proposal(None, arrived=arrived, stream=stream)
        return lambda scheduler, _: scheduler.refuse(session_id, name, empty, refusal)
    proposal = Proposal(
        tree,
        draft_s=message.draft_micros / 1e6,
        arrived=arrived,
        stream=stream,
        one_hot=message.one_hot,
        probs=probs,
    )
    return _offer(session_id, name, proposal)


def _probs(
    message: tree_pb2.CandidateTree, tree: Tree, vocab_size: int
) -> tuple[Distribution, ...]:
    if not message.probs:
        return ()
    if message.one_hot:
        raise TreeRefused(
            tree_pb2.TreeRefusal.TREE_REFUSAL_BAD_PROBS,
            "the tree is one_hot and has probabilities as well",
        )
    return decode_probs(message.probs, tree, vocab_size)


def _offer(session_id: int, name: PrefixName, proposal: Proposal) -> Command:
    return lambda scheduler, _: scheduler.offer(session_id, name, proposal, proposal.arrived)


def _join(message: verify_pb2.JoinSession, stream: int) -> Command:
    session_id, ticket = message.session_id, message.ticket
    wish: FeatureWish | None = None
    if message.HasField("features"):
        spec = spec_from_proto(message.features)
        wish = FeatureWish(spec, message.feature_window_tokens)
    return lambda scheduler, _: scheduler.join(stream, session_id, ticket, wish)


def _leave(stream: int, session_id: int) -> Command:
    return lambda scheduler, _: scheduler.leave(stream, session_id)
