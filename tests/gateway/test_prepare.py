from __future__ import annotations

from typing import Any

import pytest

from graft.common.errors import ContextLengthExceeded, InvalidArgument, UnknownProposer
from graft.common.tier import OFF, Tier
from graft.gateway.chat_request import ChatRequest
from graft.gateway.chat_template import ChatTemplate
from graft.gateway.dialog import Dialog
from graft.gateway.prepare import Asked, Preparer, Target
from graft.gateway.request import CompletionRequest, SpeculationField
from graft.gateway.tokenizer import Tokenizer
from graft.gateway.wish import ChosenTier, choose_tier, proposers_of
from graft.testing.models import write_tiny_model
from graft.v1 import draft_pb2, tree_pb2

TARGET = Target(context_length=100, vocab_size=320)
ASKED = Asked("r")
PROPOSERS = [
    draft_pb2.ProposerDescription(
        name=name,
        default_tier=tree_pb2.Tier(proposer=name, num_steps=4, topk=2, num_draft_tokens=12),
    )
    for name in ("ngram", "eagle")
]


@pytest.fixture(scope="module")
def preparer(tmp_path_factory: pytest.TempPathFactory) -> Preparer:
    tokenizer = Tokenizer(write_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))
    dialog = Dialog.of(ChatTemplate(tokenizer.chat_template))
    return Preparer(tokenizer, dialog, max_choices=8)


async def complete(preparer: Preparer, **fields: Any) -> Any:
    request = CompletionRequest.model_validate({"prompt": "abc", **fields})
    request.check()
    return await preparer.complete(request, TARGET, ChosenTier(), ASKED)


@pytest.mark.parametrize(
    ("wish", "tier", "label"),
    [
        ("off", OFF, "off"),
        ("auto", Tier("ngram", 4, 2, 12), "ngram"),
        ("eagle", Tier("eagle", 4, 2, 12), "eagle"),
        (None, Tier("eagle", 4, 2, 12), "eagle"),
        (SpeculationField(), Tier("ngram", 4, 2, 12), "ngram"),
        (SpeculationField(num_steps=7, topk=1), Tier("ngram", 7, 1, 12), "ngram-custom"),
        (SpeculationField(proposer="eagle", num_draft_tokens=1), Tier("eagle", 4, 2, 1), "off"),
        ('{"proposer": "eagle", "topk": 3}', Tier("eagle", 4, 3, 12), "eagle-custom"),
    ],
)
def test_a_wish_becomes_a_tier(wish: Any, tier: Tier, label: str) -> None:
    chosen = choose_tier(wish, "eagle", PROPOSERS, "")
    assert (chosen.tier, chosen.label) == (tier, label)


def test_without_drafters_the_reason_is_kept() -> None:
    chosen = choose_tier("auto", "auto", [], "draft d is down")
    assert chosen.tier.off
    assert chosen.inactive_reason == "draft d is down"
    assert choose_tier("off", "auto", [], "draft d is down").inactive_reason == ""


def test_a_default_that_nobody_offers_is_reported_as_inactive() -> None:
    chosen = choose_tier(None, "medusa", PROPOSERS, "")
    assert chosen.tier.off and "'medusa'" in chosen.inactive_reason


def test_unknown_proposers_are_named() -> None:
    with pytest.raises(UnknownProposer, match="'medusa'; there is ngram, eagle"):
        choose_tier("medusa", "auto", PROPOSERS, "")


def test_tiers_out_of_range_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"speculation\.num_draft_tokens is 5000"):
        choose_tier(SpeculationField(num_draft_tokens=5000), "auto", PROPOSERS, "")


def test_proposers_of_several_replicas_are_listed_once() -> None:
    replica = draft_pb2.DraftServiceDescribeResponse(proposers=PROPOSERS)
    assert [one.name for one in proposers_of([replica, replica])] == ["ngram", "eagle"]


async def test_choices_are_laid_out_prompt_by_prompt(preparer: Preparer) -> None:
    job = await complete(preparer, prompt=["a", "bc"], n=2, seed=3)
    assert [list(choice.plan.prompt) for choice in job.choices] == [[97], [97], [98, 99], [98, 99]]
    seeds = [choice.plan.sampling.seed for choice in job.choices]
    assert seeds[0] == seeds[2] == 3 and seeds[1] == seeds[3] != 3
    assert (job.prompt_sizes, job.num_per_prompt) == ((1, 2), 2)


async def test_too_many_choices_are_refused(preparer: Preparer) -> None:
    with pytest.raises(InvalidArgument, match="9 choices, limit is 8"):
        await complete(preparer, prompt=["a", "b", "c"], n=3)


async def test_the_budget_must_fit(preparer: Preparer) -> None:
    job = await complete(preparer, max_tokens=97)
    assert job.choices[0].plan.stop.max_tokens == 97
    with pytest.raises(ContextLengthExceeded, match="the context holds 100 tokens"):
        await complete(preparer, max_tokens=98)
    with pytest.raises(ContextLengthExceeded):
        await complete(preparer, prompt="x" * 100)


async def test_the_new_name_of_the_budget_wins(preparer: Preparer) -> None:
    job = await complete(preparer, max_tokens=5, max_completion_tokens=7)
    assert job.choices[0].plan.stop.max_tokens == 7


async def test_a_scored_prompt_needs_one_token_that_is_thrown_away(preparer: Preparer) -> None:
    job = await complete(preparer, max_tokens=0, echo=True, logprobs=2)
    plan = job.choices[0].plan
    assert job.choices[0].discard
    assert (plan.stop.max_tokens, plan.want_prompt_logprobs, plan.top_logprobs) == (1, True, 2)


async def test_a_chat_is_rendered_by_the_models_template(preparer: Preparer) -> None:
    request = ChatRequest.model_validate({"messages": [{"role": "user", "content": "hi"}]})
    job = await preparer.chat(request, TARGET, ChosenTier(), Asked("r", tenant="t"))
    plan = job.choices[0].plan
    text = preparer.tokenizer.decode(plan.prompt)
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert plan.stop.max_tokens == 100 - len(plan.prompt)
    assert plan.cache_salt == "t:"
