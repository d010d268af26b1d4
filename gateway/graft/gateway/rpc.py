"""The client API over gRPC. The same requests, checks and answers as REST, in other words."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import grpc.aio

from graft.common.errors import GraftError, NoReplica
from graft.common.tier import tier_to_proto
from graft.gateway.answer import Answer
from graft.gateway.chat_request import TokenizeRequest
from graft.gateway.core import Gateway
from graft.gateway.info import server_info, server_version
from graft.gateway.job import ChoiceEvent, Collected, Delta, Finished, Job, Started
from graft.gateway.keys import Keys
from graft.gateway.prepare import Asked
from graft.gateway.request import token_ids
from graft.gateway.rest.message import finish_reason
from graft.gateway.rpc_fields import (
    answer_id,
    chat_body,
    checked,
    completion_body,
    report_message,
    set_stop,
    usage_message,
)
from graft.gateway.rpc_message import MessageDeltas, call_messages, message_fields
from graft.gateway.rpc_names import in_our_words
from graft.gateway.rpc_tokens import prompt_messages, round_messages, token_messages
from graft.gateway.speech.reader import read_message
from graft.gateway.text import token_texts
from graft.v1 import gateway_pb2, gateway_pb2_grpc

SERVICE_NAME = gateway_pb2.DESCRIPTOR.services_by_name["GatewayService"].full_name
_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
IGNORED_KEY = "x-ignored-params"
_MAX_METADATA_CHARS = 1024
_Context = grpc.aio.ServicerContext[Any, Any]

_REASONS = {
    "stop": gateway_pb2.END_REASON_STOP,
    "length": gateway_pb2.END_REASON_LENGTH,
    "tool_calls": gateway_pb2.END_REASON_TOOL_CALLS,
}


class GatewayRpc(gateway_pb2_grpc.GatewayServiceServicer):
    """The servicer; errors leave as GraftError and the server's interceptor maps them."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._keys = Keys(gateway.settings.api_keys)

    async def Chat(
        self, request: gateway_pb2.ChatRequest, context: _Context
    ) -> gateway_pb2.ChatResponse:
        """One message."""
        with in_our_words(request):
            job = await self._chat_job(request, context)
            return gateway_pb2.ChatResponse(answer=await self._whole("Chat", job, False))

    async def ChatStream(
        self, request: gateway_pb2.ChatStreamRequest, context: _Context
    ) -> AsyncGenerator[gateway_pb2.ChatStreamResponse, None]:
        """One message as it is written."""
        with in_our_words(request):
            job = await self._chat_job(request, context)
            async with aclosing(self._stream("ChatStream", job, False)) as events:
                async for event in events:
                    yield gateway_pb2.ChatStreamResponse(event=event)

    async def Complete(
        self, request: gateway_pb2.CompleteRequest, context: _Context
    ) -> gateway_pb2.CompleteResponse:
        """Continuations."""
        asked = self._asked(context)
        with in_our_words(request):
            job = await self._gateway.prepare_completion(completion_body(request), asked)
            answer = await self._whole("Complete", job, request.echo)
        return gateway_pb2.CompleteResponse(answer=answer)

    async def CompleteStream(
        self, request: gateway_pb2.CompleteStreamRequest, context: _Context
    ) -> AsyncGenerator[gateway_pb2.CompleteStreamResponse, None]:
        """Continuations as they are written."""
        asked = self._asked(context)
        with in_our_words(request):
            job = await self._gateway.prepare_completion(completion_body(request), asked)
            async with aclosing(self._stream("CompleteStream", job, request.echo)) as events:
                async for event in events:
                    yield gateway_pb2.CompleteStreamResponse(event=event)

    async def Tokenize(
        self, request: gateway_pb2.TokenizeRequest, context: _Context
    ) -> gateway_pb2.TokenizeResponse:
        """Token ids of a text or a conversation."""
        self._asked(context)
        self._gateway.check_model(request.model or None)
        if request.messages:
            body = checked(TokenizeRequest, {"messages": message_fields(request.messages)})
            tokens = await self._gateway.preparer.chat_tokens(body.messages or [])
        else:
            tokens = await self._gateway.preparer.text_tokens(
                request.text, specials=not request.skip_special_tokens
            )
        return gateway_pb2.TokenizeResponse(
            tokens=tokens, context_length=self._gateway.target().context_length
        )

    async def Detokenize(
        self, request: gateway_pb2.DetokenizeRequest, context: _Context
    ) -> gateway_pb2.DetokenizeResponse:
        """The text of token ids."""
        self._asked(context)
        self._gateway.check_model(request.model or None)
        tokens = list(request.tokens)
        token_ids("tokens", tokens, self._gateway.target().vocab_size)
        return gateway_pb2.DetokenizeResponse(text=self._gateway.tokenizer.decode(tokens))

    async def ListModels(
        self, request: gateway_pb2.ListModelsRequest, context: _Context
    ) -> gateway_pb2.ListModelsResponse:
        """The one model of this server."""
        self._asked(context)
        gateway = self._gateway
        try:
            context_length = gateway.target().context_length
        except NoReplica:
            context_length = 0
        tiers = [gateway.tier(proposer.name).tier for proposer in gateway.proposers()]
        model = gateway_pb2.Model(
            id=gateway.model,
            context_length=context_length,
            created_seconds=gateway.created,
            tiers=map(tier_to_proto, tiers),
        )
        return gateway_pb2.ListModelsResponse(models=[model])

    async def GetServerInfo(
        self, request: gateway_pb2.GetServerInfoRequest, context: _Context
    ) -> gateway_pb2.GetServerInfoResponse:
        """How the server is doing."""
        self._asked(context)
        info = server_info(self._gateway)
        return gateway_pb2.GetServerInfoResponse(
            version=server_version(),
            model=info["model"],
            state=info["state"],
            detail=info["detail"],
            default_speculation=self._gateway.settings.speculation,
            accept_length=info["internal_states"][0]["avg_spec_accept_length"],
            in_flight_count=info["num_in_flight"],
            replicas=[
                gateway_pb2.ReplicaInfo(
                    kind=kind,
                    address=replica["address"],
                    state=replica["state"],
                    detail=replica["detail"],
                    session_count=replica["sessions"],
                )
                for kind in ("verify", "draft")
                for replica in info[kind]
            ],
        )

    async def _chat_job(
        self, request: gateway_pb2.ChatRequest | gateway_pb2.ChatStreamRequest, context: _Context
    ) -> Job:
        """The job of a conversation; what of it has no effect is named in the metadata."""
        asked = self._asked(context)
        body = chat_body(request)
        job = await self._gateway.prepare_chat(body, asked)
        if unheeded := self._gateway.unheeded(body):
            self._gateway.metrics.ignored(len(unheeded))
            names = ",".join(name.replace(".function", "") for name in unheeded)
            await context.send_initial_metadata(((IGNORED_KEY, names[:_MAX_METADATA_CHARS]),))
        return job

    def _asked(self, context: _Context) -> Asked:
        """Who asks, from the call's metadata.

        Raises:
            Unauthenticated: a key is asked for, and missing or wrong.
        """
        metadata = {str(key).lower(): value for key, value in context.invocation_metadata() or ()}
        authorization = metadata.get("authorization", b"")
        raw = authorization.encode() if isinstance(authorization, str) else authorization
        request_id = str(metadata.get("x-request-id", ""))
        if not _REQUEST_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        return Asked(request_id, self._keys.tenant(raw))

    async def _whole(self, route: str, job: Job, echo: bool) -> gateway_pb2.Answer:
        answer = self._gateway.answer(job)
        choices = [Collected() for _ in job.choices]
        async with aclosing(self._run(route, answer)) as events:
            async for event in events:
                choices[event.index].take(event)
        return gateway_pb2.Answer(
            id=answer_id(),
            created_seconds=int(time.time()),
            model=self._gateway.model,
            choices=[
                self._choice(index, choice, answer, self._echoed(job, index, echo))
                for index, choice in enumerate(choices)
            ],
            usage=usage_message(answer.tally),
            speculation=report_message(answer.tally),
        )

    async def _stream(
        self, route: str, job: Job, echo: bool
    ) -> AsyncGenerator[gateway_pb2.AnswerEvent, None]:
        answer, tokenizer = self._gateway.answer(job), self._gateway.tokenizer
        name = answer_id()
        messages = [MessageDeltas(job.speech) for _ in job.choices]
        async with aclosing(self._run(route, answer)) as events:
            async for event in events:
                match event:
                    case Started(index):
                        started = gateway_pb2.ChoiceStarted(index=index)
                        yield gateway_pb2.AnswerEvent(id=name, started=started)
                        if echo:
                            text = self._echoed(job, index, echo)
                            delta = gateway_pb2.ChoiceDelta(index=index, text=text)
                            yield gateway_pb2.AnswerEvent(id=name, delta=delta)
                    case Delta(index, piece, prompt, rounds):
                        if piece.empty and not prompt and not rounds:
                            continue
                        delta = gateway_pb2.ChoiceDelta(
                            index=index,
                            tokens=token_messages(piece.tokens, tokenizer),
                            rounds=round_messages(rounds, tokenizer),
                            prompt=prompt_messages(prompt, tokenizer),
                        )
                        num_reasoning = messages[index].read(piece.text, piece.tokens, delta)
                        answer.tally.num_reasoning += num_reasoning
                        yield gateway_pb2.AnswerEvent(id=name, delta=delta)
                    case Finished(index, reason, stop):
                        rest = gateway_pb2.ChoiceDelta(index=index)
                        if messages[index].rest(rest):
                            yield gateway_pb2.AnswerEvent(id=name, delta=rest)
                        ended = _REASONS[finish_reason(reason, messages[index].num_calls)]
                        finished = gateway_pb2.ChoiceFinished(index=index, reason=ended)
                        set_stop(finished, stop)
                        yield gateway_pb2.AnswerEvent(id=name, finished=finished)
        completed = gateway_pb2.AnswerCompleted(
            usage=usage_message(answer.tally), speculation=report_message(answer.tally)
        )
        yield gateway_pb2.AnswerEvent(id=name, completed=completed)

    async def _run(self, route: str, answer: Answer) -> AsyncGenerator[ChoiceEvent, None]:
        """The answer's events, counted as one request of a route."""
        code = "CANCELLED"
        try:
            async with aclosing(self._gateway.run(answer)) as events:
                async for event in events:
                    yield event
            code = "OK"
        except GraftError as error:
            code = type(error).__name__
            raise
        finally:
            self._gateway.metrics.request(route, code)

    def _echoed(self, job: Job, index: int, echo: bool) -> str:
        if not echo:
            return ""
        prompt = job.choices[index].plan.prompt
        return "".join(token_texts(prompt, self._gateway.tokenizer.token_bytes))

    def _choice(
        self, index: int, choice: Collected, answer: Answer, before: str
    ) -> gateway_pb2.Choice:
        tokenizer = self._gateway.tokenizer
        said = read_message(choice.text, answer.job.speech, [one.text for one in choice.tokens])
        answer.tally.num_reasoning += said.num_reasoning_tokens
        message = gateway_pb2.Choice(
            index=index,
            text=before + said.content,
            tokens=token_messages(choice.tokens, tokenizer),
            reason=_REASONS[finish_reason(choice.reason, len(said.calls))],
            reasoning=said.reasoning,
            tool_calls=call_messages(said),
            rounds=round_messages(choice.rounds, tokenizer),
            prompt=prompt_messages(choice.prompt, tokenizer),
        )
        set_stop(message, choice.stop)
        return message
