"""Client protos to request models, and counts to protos. Knows no service."""

from __future__ import annotations

import json
import uuid
from typing import Any, Literal, TypeVar, get_args

from google.protobuf import struct_pb2
from pydantic import ValidationError

from graft.common.errors import InvalidArgument
from graft.common.tier import tier_to_proto
from graft.gateway.chat_request import ChatRequest
from graft.gateway.faults import first_error
from graft.gateway.job import Tally
from graft.gateway.request import CompletionRequest, Fields
from graft.gateway.rpc_message import message_fields, tool_fields
from graft.v1 import gateway_pb2

_Body = TypeVar("_Body", bound=Fields)
_Optional = Literal[
    "max_tokens",
    "temperature",
    "top_p",
    "seed",
    "repetition_penalty",
    "threshold_single",
    "threshold_acc",
]
_OPTIONAL: tuple[_Optional, ...] = get_args(_Optional)
_TIER_FIELDS: tuple[Literal["num_steps", "topk", "num_draft_tokens", "lookahead"], ...] = (
    "num_steps",
    "topk",
    "num_draft_tokens",
    "lookahead",
)


def chat_body(
    request: gateway_pb2.ChatRequest | gateway_pb2.ChatStreamRequest,
) -> ChatRequest:
    fields = option_fields(request.options)
    if request.options.logprobs:
        fields["logprobs"] = True
    if request.options.top_logprobs:
        fields["top_logprobs"] = request.options.top_logprobs
    fields["messages"] = message_fields(request.messages)
    fields.update(tool_fields(request))
    fields["model"] = request.model or None
    if request.HasField("chat_template_kwargs"):
        fields["chat_template_kwargs"] = _plain_struct(request.chat_template_kwargs)
    return checked(ChatRequest, fields)


def completion_body(
    request: gateway_pb2.CompleteRequest | gateway_pb2.CompleteStreamRequest,
) -> CompletionRequest:
    fields = option_fields(request.options)
    if request.options.logprobs:
        fields["logprobs"] = request.options.top_logprobs
    texts = [prompt.text for prompt in request.prompts if prompt.HasField("text")]
    tokens = [list(prompt.tokens.tokens) for prompt in request.prompts if prompt.HasField("tokens")]
    if bool(texts) == bool(tokens):
        raise InvalidArgument("prompts must all be texts, or all be tokens", field="prompts")
    fields["prompt"] = texts or tokens
    fields["echo"] = request.echo
    fields["model"] = request.model or None
    return checked(CompletionRequest, fields)


def option_fields(options: gateway_pb2.GenerationOptions) -> dict[str, Any]:
    """The fields of the request models; what is left out stays out."""
    fields: dict[str, Any] = {
        "top_k": options.top_k,
        "min_p": options.min_p,
        "stop": list(options.stop),
        "stop_token_ids": list(options.stop_token_ids),
        "include_stop_str_in_output": options.include_stop,
        "ignore_eos": options.ignore_eos,
        "min_tokens": options.min_tokens,
        "presence_penalty": options.presence_penalty,
        "frequency_penalty": options.frequency_penalty,
        "logit_bias": {str(token): bias for token, bias in options.logit_bias.items()},
        "n": options.n or 1,
        "skip_special_tokens": not options.keep_special_tokens,
        "cache_salt": options.cache_salt,
        "accept_rule": options.accept_rule or None,
        "speculation_trace": options.trace_rounds,
    }
    for name in _OPTIONAL:
        if options.HasField(name):
            fields[name] = getattr(options, name)
    match options.WhichOneof("speculation"):
        case "speculation_mode":
            fields["speculation"] = options.speculation_mode
        case "speculation_tier":
            wish = options.speculation_tier
            tier: dict[str, Any] = {"proposer": wish.proposer} if wish.proposer else {}
            for part in _TIER_FIELDS:
                if wish.HasField(part):
                    tier[part] = getattr(wish, part)
            fields["speculation"] = tier
    if options.prediction:
        fields["prediction"] = {"content": options.prediction}
    fields.update(_grammar_fields(options))
    return fields


def _grammar_fields(options: gateway_pb2.GenerationOptions) -> dict[str, Any]:
    """What the text is held to, as REST asks for it.

    Raises:
        InvalidArgument: json_schema is not JSON.
    """
    match options.WhichOneof("grammar"):
        case "json_object":
            return {"response_format": {"type": "json_object"}} if options.json_object else {}
        case "json_schema":
            try:
                schema = json.loads(options.json_schema)
            except (ValueError, RecursionError) as error:
                raise InvalidArgument(
                    f"json_schema is not JSON: {error}", field="json_schema"
                ) from None
            form = {"type": "json_schema", "json_schema": {"schema": schema}}
            return {"response_format": form}
        case "regex":
            return {"regex": options.regex}
        case "ebnf":
            return {"ebnf": options.ebnf}
    return {}


def checked(model: type[_Body], fields: dict[str, Any]) -> _Body:
    try:
        return model.model_validate(fields)
    except ValidationError as failure:
        raise first_error(failure) from None


def _plain_struct(struct: struct_pb2.Struct) -> dict[str, Any]:
    """The struct as JSON would have it; how deep it goes is bounded by the protobuf parser."""
    return {key: _plain(value) for key, value in struct.fields.items()}


def _plain(value: struct_pb2.Value) -> Any:
    match value.WhichOneof("kind"):
        case "struct_value":
            return _plain_struct(value.struct_value)
        case "list_value":
            return [_plain(item) for item in value.list_value.values]
        case "number_value":
            number = value.number_value
            return int(number) if number.is_integer() else number
        case "string_value":
            return value.string_value
        case "bool_value":
            return value.bool_value
        case _:
            return None


def set_stop(message: Any, stop: str | int | None) -> None:
    """Sets the stop of a Choice or ChoiceFinished, in place."""
    if isinstance(stop, str):
        message.stop_string = stop
    elif stop is not None:
        message.stop_token = stop


def usage_message(tally: Tally) -> gateway_pb2.Usage:
    return gateway_pb2.Usage(
        prompt_token_count=tally.num_prompt,
        completion_token_count=tally.num_completion,
        cached_token_count=tally.num_cached,
        reasoning_token_count=tally.num_reasoning,
        predicted_token_count=tally.num_predicted,
        accepted_prediction_token_count=tally.num_predicted_accepted,
    )


def report_message(tally: Tally) -> gateway_pb2.SpeculationReport:
    record = tally.record
    return gateway_pb2.SpeculationReport(
        active=record.active,
        tier=tier_to_proto(record.tier),
        inactive_reason=record.inactive_reason,
        round_count=record.num_rounds,
        tree_round_count=record.num_tree_rounds,
        drafted_count=record.num_drafted,
        accepted_count=record.num_accepted,
        accepted_per_position=record.by_position,
        accept_length=record.accept_length,
        accept_rule=record.rule,
        lossy=record.lossy,
        simulated=record.simulated,
    )


def answer_id() -> str:
    return f"answer-{uuid.uuid4().hex}"
