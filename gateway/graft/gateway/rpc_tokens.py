"""Tokens, prompts and rounds of an answer as client protos. Knows no service."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from graft.common.tier import tier_to_proto
from graft.gateway.job import PromptLogprob
from graft.gateway.rest.trace import rounds_body
from graft.gateway.rounds import SeenRound
from graft.gateway.text import Emitted, Logprob, Origin, shown, token_texts
from graft.gateway.tokenizer import Tokenizer
from graft.v1 import gateway_pb2, shown_round_pb2

_ORIGINS = {
    Origin.ACCEPTED: gateway_pb2.TOKEN_ORIGIN_ACCEPTED,
    Origin.BONUS: gateway_pb2.TOKEN_ORIGIN_BONUS,
    Origin.PLAIN: gateway_pb2.TOKEN_ORIGIN_PLAIN,
}


def token_messages(
    tokens: Iterable[Emitted], tokenizer: Tokenizer
) -> list[gateway_pb2.GeneratedToken]:
    """Generated tokens, with their log-probabilities where they have some."""
    messages = []
    for one in tokens:
        message = gateway_pb2.GeneratedToken(
            token=one.token, text=one.text, origin=_ORIGINS[one.origin]
        )
        if one.logprob is not None:
            message.logprob = one.logprob.logprob
            message.top.extend(_alternatives(one.logprob, tokenizer))
        messages.append(message)
    return messages


def prompt_messages(
    prompt: Sequence[PromptLogprob], tokenizer: Tokenizer
) -> list[gateway_pb2.PromptToken]:
    """The tokens of an echoed prompt; empty when no log-probabilities were asked for."""
    texts = token_texts([one.token for one in prompt], tokenizer.token_bytes)
    messages = []
    for one, text in zip(prompt, texts, strict=True):
        message = gateway_pb2.PromptToken(token=one.token, text=text)
        if one.logprob is not None:
            message.logprob = one.logprob.logprob
            message.top.extend(_alternatives(one.logprob, tokenizer))
        messages.append(message)
    return messages


def round_messages(
    rounds: Sequence[SeenRound], tokenizer: Tokenizer
) -> list[shown_round_pb2.ShownRound]:
    """The rounds with their trees: the numbers that REST shows, in other words."""
    messages = []
    for seen, body in zip(rounds, rounds_body(rounds, tokenizer), strict=True):
        timing, tree = body["timing_us"], body["tree"]
        message = shown_round_pb2.ShownRound(
            number=body["round"],
            at_micros=round(body["at_ms"] * 1000),
            tier=None if seen.tier.off else tier_to_proto(seen.tier),
            plain_reason=body["plain_reason"] or "",
            tokens=body["tokens"],
            texts=body["texts"],
            accepted_count=body["num_accepted"],
            drafted_count=body["num_drafted"],
            timing=shown_round_pb2.ShownTiming(
                draft_micros=timing["draft"],
                tree_wait_micros=timing["tree_wait"],
                queue_micros=timing["queue"],
                forward_micros=timing["forward"],
                choice_micros=timing["choice"],
            ),
            batch_row_count=body["batch_rows"],
        )
        if tree is not None:
            message.tree.CopyFrom(
                shown_round_pb2.ShownTree(
                    tokens=tree["tokens"],
                    texts=tree["texts"],
                    parents=tree["parents"][1:],
                    probabilities=tree["probabilities"][1:],
                    accepted_nodes=tree["accepted"],
                    choices=tree["choices"],
                    choice_texts=tree["choice_texts"],
                    choice_probabilities=tree["choice_probabilities"],
                    bonus_probability=tree["bonus_probability"],
                )
            )
        messages.append(message)
    return messages


def _alternatives(logprob: Logprob, tokenizer: Tokenizer) -> Iterable[gateway_pb2.AlternativeToken]:
    return (
        gateway_pb2.AlternativeToken(
            token=token, logprob=value, text=shown(tokenizer.own_bytes(token))
        )
        for token, value in logprob.top
    )
