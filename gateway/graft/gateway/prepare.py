"""From a request to a job: prompt to ids, fields to the sampling law.

Knows the tokenizer, the template and what replicas said of themselves; opens nothing.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from graft.common.errors import (
    ContextLengthExceeded,
    InvalidArgument,
)
from graft.common.noise import derive_seed
from graft.common.sampling import Sampling, StopRule
from graft.gateway.chat_request import ChatMessage, ChatRequest, for_template
from graft.gateway.choice import Plan
from graft.gateway.dialog import Dialog
from graft.gateway.functions import FunctionUse
from graft.gateway.job import ChoicePlan, Job
from graft.gateway.request import CompletionRequest, GenerationFields, token_ids
from graft.gateway.strict import KIND as STRICT_CALLS
from graft.gateway.strict import structure_of_strict_calls
from graft.gateway.structured import Structure
from graft.gateway.text import StopStrings
from graft.gateway.tokenizer import Tokenizer
from graft.gateway.wish import ChosenTier
from graft.v1.sampling_pb2 import AcceptRule, GrammarKind

_SEED_BITS = 64
_THREAD_CHARS = 16_384
COMPLETION_MAX_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Target:
    """What the verify replicas serve. grammar_kinds: those that one of them offers."""

    context_length: int
    vocab_size: int
    grammar_kinds: frozenset[GrammarKind.ValueType] = frozenset()


@dataclass(frozen=True, slots=True)
class Asked:
    """Who asks: the id of the request, and what keeps the caller's caches apart."""

    request_id: str
    tenant: str = ""


@dataclass(frozen=True, slots=True)
class Preparer:
    """Makes jobs for one model."""

    tokenizer: Tokenizer
    dialog: Dialog
    max_choices: int

    async def chat_tokens(
        self, messages: Sequence[ChatMessage], extra: dict[str, object] | None = None
    ) -> list[int]:
        """Ids of the prompt that asks for the next message."""
        rendered = self.dialog.render(for_template(messages), extra=extra)
        return await self._encode(rendered, "messages", specials=False)

    async def text_tokens(self, text: str, *, specials: bool = True) -> list[int]:
        """Ids of a plain prompt."""
        return await self._encode(text, "prompt", specials=specials)

    async def chat(
        self, request: ChatRequest, target: Target, chosen: ChosenTier, asked: Asked
    ) -> Job:
        """The job of a chat completion.

        Raises:
            InvalidArgument, ContextLengthExceeded: the request cannot be honoured.
        """
        use = request.function_use()
        rendered = self.dialog.render(
            for_template(request.messages), use, request.chat_template_kwargs
        )
        prompt = await self._encode(rendered, "messages", specials=False)
        budget = _first(request.max_completion_tokens, request.max_tokens)
        structure = request.structure()
        plan = _Draft(
            structure=structure or self._strict_calls(request, use, target),
            want_logprobs=request.logprobs,
            top_logprobs=request.top_logprobs,
            field="messages",
            prediction=await self._predicted(request, target),
        )
        job = self._job(request, [prompt], [budget], plan, target, chosen, asked)
        speech = self.dialog.speech(use, rendered, held=structure is not None)
        return job if speech.plain else job.spoken(speech, self._marks)

    def holds_strict_calls(self, grammar_kinds: frozenset[GrammarKind.ValueType]) -> bool:
        """True where `strict` of a function has an effect though no call is forced."""
        calls = self.dialog.calls
        between_marks = bool(calls.opens and calls.closes)
        special = self.tokenizer.specials_of(calls.markers)
        return between_marks and not special and STRICT_CALLS in grammar_kinds

    def _strict_calls(
        self, request: ChatRequest, use: FunctionUse, target: Target
    ) -> Structure | None:
        if not self.holds_strict_calls(target.grammar_kinds):
            return None
        structure = structure_of_strict_calls(use, self.dialog.calls)
        if structure is not None and request.ignore_eos:
            raise InvalidArgument(
                "ignore_eos has no meaning beside strict functions, since calls have to end",
                field="ignore_eos",
            )
        return structure

    @property
    def _marks(self) -> frozenset[int]:
        """Special tokens without which an answer cannot be read."""
        return self.tokenizer.specials_of(self.dialog.marks)

    async def complete(
        self, request: CompletionRequest, target: Target, chosen: ChosenTier, asked: Asked
    ) -> Job:
        """The job of a text completion: every prompt with its n choices, in order.

        Raises:
            InvalidArgument, ContextLengthExceeded: the request cannot be honoured.
        """
        prompts = [await self._prompt(one, target) for one in request.prompts]
        budget = _first(request.max_completion_tokens, request.max_tokens, COMPLETION_MAX_TOKENS)
        plan = _Draft(
            structure=request.structure(),
            want_logprobs=request.logprobs is not None,
            top_logprobs=request.logprobs or 0,
            want_prompt_logprobs=request.echo and request.logprobs is not None,
            discard=budget == 0,
            field="prompt",
            prediction=await self._predicted(request, target),
        )
        budgets = [budget] * len(prompts)
        return self._job(request, prompts, budgets, plan, target, chosen, asked)

    async def _predicted(self, request: GenerationFields, target: Target) -> tuple[int, ...]:
        """Ids of what the client expects, as many as there can be tokens."""
        if request.prediction is None:
            return ()
        tokens = await self._encode(request.prediction.text, "prediction", specials=False)
        return tuple(tokens[: target.context_length])

    async def _prompt(self, prompt: str | list[int], target: Target) -> list[int]:
        if isinstance(prompt, str):
            tokens = await self.text_tokens(prompt)
            if not tokens and self.tokenizer.bos_id is not None:
                tokens = [self.tokenizer.bos_id]
        else:
            token_ids("prompt", prompt, target.vocab_size)
            tokens = prompt
        if not tokens:
            raise InvalidArgument("the prompt is empty", field="prompt")
        return tokens

    async def _encode(self, text: str, field: str, *, specials: bool) -> list[int]:
        """Long texts are cut into ids off the loop's thread."""
        try:
            if len(text) < _THREAD_CHARS:
                return self.tokenizer.encode(text, specials=specials)
            return await asyncio.to_thread(self.tokenizer.encode, text, specials=specials)
        except InvalidArgument as error:
            raise InvalidArgument(str(error), field=field) from None

    def _job(
        self,
        request: GenerationFields,
        prompts: Sequence[list[int]],
        budgets: Sequence[int | None],
        draft: _Draft,
        target: Target,
        chosen: ChosenTier,
        asked: Asked,
    ) -> Job:
        num_choices = len(prompts) * request.n
        if num_choices > self.max_choices:
            raise InvalidArgument(
                f"the request asks for {num_choices} choices, limit is {self.max_choices}",
                field="n",
            )
        token_ids("stop_token_ids", request.stop_token_ids, target.vocab_size)
        token_ids("logit_bias", request.biases(), target.vocab_size)
        seed = secrets.randbits(_SEED_BITS) if request.seed is None else request.seed
        choices = []
        for prompt, budget in zip(prompts, budgets, strict=True):
            max_tokens = _fitting(len(prompt), budget, target.context_length, draft.field)
            stop = StopRule(
                max_tokens=max_tokens,
                min_tokens=_min_tokens(request.min_tokens, max_tokens),
                stop_token_ids=frozenset(request.stop_token_ids),
                ignore_eos=request.ignore_eos,
            )
            for index in range(request.n):
                choices.append(
                    self._choice(request, prompt, stop, draft, chosen, asked, seed, index)
                )
        return Job(
            request_id=asked.request_id,
            choices=tuple(choices),
            prompt_sizes=tuple(map(len, prompts)),
            num_per_prompt=request.n,
            tier=chosen.tier,
            tier_label=chosen.label,
            inactive_reason=chosen.inactive_reason,
        )

    def _choice(
        self,
        request: GenerationFields,
        prompt: list[int],
        stop: StopRule,
        draft: _Draft,
        chosen: ChosenTier,
        asked: Asked,
        seed: int,
        index: int,
    ) -> ChoicePlan:
        plan = Plan(
            prompt=prompt,
            sampling=_sampling(request, derive_seed(seed % (1 << _SEED_BITS), index)),
            stop=stop,
            tier=chosen.tier,
            want_logprobs=draft.want_logprobs,
            top_logprobs=draft.top_logprobs,
            want_prompt_logprobs=draft.want_prompt_logprobs,
            request_id=asked.request_id,
            cache_salt=_salt(asked.tenant, request.cache_salt),
            want_trace=request.speculation_trace,
            structure=draft.structure,
            offers=chosen.offers,
            prediction=draft.prediction,
            late=chosen.late,
        )
        stops = StopStrings(request.stops, request.include_stop_str_in_output, request.min_tokens)
        return ChoicePlan(plan, stops, request.skip_special_tokens, draft.discard)


@dataclass(frozen=True, slots=True)
class _Draft:
    """What the two routes ask for under different names."""

    structure: Structure | None
    want_logprobs: bool
    top_logprobs: int
    field: str
    want_prompt_logprobs: bool = False
    discard: bool = False
    prediction: tuple[int, ...] = ()


def _sampling(request: GenerationFields, seed: int) -> Sampling:
    return Sampling(
        temperature=request.temperature,
        top_k=max(0, request.top_k),
        top_p=request.top_p,
        min_p=request.min_p,
        seed=seed,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        repetition_penalty=request.repetition_penalty,
        logit_bias=request.biases(),
        rule=_rule(request.accept_rule),
        threshold_single=request.threshold_single,
        threshold_acc=request.threshold_acc,
    )


def _rule(name: str | None) -> AcceptRule.ValueType:
    """The rule of a name; unspecified leaves it to the verify replica."""
    if name is None:
        return AcceptRule.ACCEPT_RULE_UNSPECIFIED
    return AcceptRule.Value(f"ACCEPT_RULE_{name.upper()}")


def _fitting(num_prompt: int, budget: int | None, context_length: int, field: str) -> int:
    """The token budget; one token is decoded even when none is wanted, and then thrown away."""
    room = context_length - num_prompt
    wanted = 1 if budget is None else max(1, budget)
    if wanted > room:
        asked = "" if budget is None else f" and {wanted} for the answer"
        if budget == 0:
            asked = " and room for one more is needed to score them"
        raise ContextLengthExceeded(
            f"the context holds {context_length} tokens, but the request has {num_prompt} in its "
            f"{field}{asked}",
            field=field,
        )
    return room if budget is None else wanted


def _min_tokens(min_tokens: int, max_tokens: int) -> int:
    if min_tokens > max_tokens:
        raise InvalidArgument(
            f"min_tokens is {min_tokens}, more than the {max_tokens} tokens of the budget",
            field="min_tokens",
        )
    return min_tokens


def _salt(tenant: str, cache_salt: str) -> str:
    return f"{tenant}:{cache_salt}" if tenant else cache_salt


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)
