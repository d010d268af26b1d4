"""Sessions held to a grammar, over the wire: what is written, drafted, replayed and refused."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import grpc.aio
import pytest
import pytest_asyncio

from graft.common.errors import GraftError, InvalidArgument, Unsupported
from graft.common.grammar import GRAMMAR_KINDS, MAX_GRAMMAR_BYTES
from graft.common.server import error_from_call
from graft.common.tree import Tree, chain, from_parents
from graft.testing.models import IM_END, write_tiny_model
from graft.testing.verify_client import Generation, Say, Script, Seat, VerifyBench, running_verify
from graft.v1 import verify_pb2
from graft.v1.sampling_pb2 import AcceptRule, Grammar, GrammarKind, Sampling, StopRule
from graft.v1.verify_pb2 import FinishReason

pytestmark = pytest.mark.asyncio(loop_scope="module")

PROMPT = list(b"Who? ")
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "\u00e9", "\U0001f600"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
}
OBJECT = Grammar(kind=GrammarKind.GRAMMAR_KIND_JSON_SCHEMA, text=json.dumps(SCHEMA))
EOS = FinishReason.FINISH_REASON_EOS
RULES = [rule for rule in AcceptRule.values() if rule != AcceptRule.ACCEPT_RULE_UNSPECIFIED]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VerifyBench]:
    model = write_tiny_model(tmp_path_factory.mktemp("grammar") / "tiny")
    async with running_verify(model) as running:
        await running.server.warm()
        yield running


def regex(text: str) -> Grammar:
    return Grammar(kind=GrammarKind.GRAMMAR_KIND_REGEX, text=text)


def ebnf(text: str) -> Grammar:
    return Grammar(kind=GrammarKind.GRAMMAR_KIND_EBNF, text=text)


def law(seed: int = 1, rule: AcceptRule.ValueType = AcceptRule.ACCEPT_RULE_COUPLED) -> Sampling:
    return Sampling(temperature=1.0, seed=seed, rule=rule)


async def write(
    bench: VerifyBench,
    grammar: Grammar,
    sampling: Sampling,
    script: Script | None = None,
    stop: StopRule | None = None,
    committed: Sequence[int] = (),
) -> Generation:
    drafter = None if script is None else bench.drafter(script)
    try:
        return await bench.generate(
            PROMPT,
            100,
            drafter=drafter,
            stop=stop or StopRule(max_tokens=100),
            sampling=sampling,
            grammar=grammar,
            committed_tokens=committed,
        )
    finally:
        if drafter is not None:
            await drafter.die()


def text_of(generation: Generation) -> str:
    return bytes(token for token in generation.tokens if token < 256).decode(errors="replace")


def reason(generation: Generation) -> int:
    assert generation.finished is not None
    return generation.finished.reason


def knowing(tokens: list[int], depth: int = 4) -> Script:
    """A drafter that knows what will be written."""

    async def script(seat: Seat) -> Say | None:
        at = len(seat.tokens) - len(PROMPT)
        return Say(trees=[seat.propose(chain([seat.tokens[-1], *tokens[at : at + depth]]))])

    return script


def shaped(tree: Tree) -> Script:
    """A drafter that proposes the same, come what may."""

    async def script(seat: Seat) -> Say | None:
        return Say(trees=[seat.propose(tree)])

    return script


OFF_SCHEMA = from_parents(
    [0, ord("x"), ord("{"), ord('"'), ord("]"), IM_END, ord('"'), 300],
    [-1, 0, 0, 2, 3, 4, 0, 0],
)


async def refusal(bench: VerifyBench, grammar: Grammar, **fields: object) -> GraftError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await bench.generate(
            PROMPT,
            8,
            stop=fields.pop("stop", StopRule(max_tokens=8)),  # type: ignore[arg-type]
            grammar=grammar,
            **fields,
        )
    error = error_from_call(failed.value)
    assert error is not None
    return error


async def test_a_text_keeps_to_its_schema_and_ends_where_the_schema_ends(
    bench: VerifyBench,
) -> None:
    for seed in range(8):
        generation = await write(bench, OBJECT, law(seed))
        assert reason(generation) == EOS
        value = json.loads(text_of(generation))
        assert list(value) == ["name", "age", "tags"]
        assert len(value["name"]) <= 8 and 0 <= value["age"] <= 120


async def test_drafts_change_no_token_of_a_call_that_is_held_to_its_schema(
    bench: VerifyBench,
) -> None:
    """The text has come to the mark that begins a call; what follows is that call, then free."""
    begun, begin, end = "I do.<call>", '{"name": "f", "arguments": ', "}</call>"
    tag = {"begin": f"<call>{begin}", "schema": SCHEMA, "end": end}
    form = json.dumps({"trigger": "<call>", "tags": [tag]})
    grammar = Grammar(kind=GrammarKind.GRAMMAR_KIND_TAGGED_JSON, text=form)
    committed = list(begun.encode())
    stop = StopRule(max_tokens=150)
    for seed in range(4):
        plain = await write(bench, grammar, law(seed), stop=stop, committed=committed)
        for script in (knowing([*committed, *plain.tokens]), shaped(OFF_SCHEMA)):
            drafted = await write(bench, grammar, law(seed), script, stop, committed)
            assert drafted.tokens == plain.tokens
        written = text_of(plain)
        assert written.startswith(begin)
        value, _ = json.JSONDecoder().raw_decode(written.removeprefix(begin))
        assert list(value) == ["name", "age", "tags"]
        assert written.removeprefix(begin + json.dumps(value, ensure_ascii=False))[:8] == end


@pytest.mark.parametrize("greedy", [False, True])
async def test_drafts_change_no_token(bench: VerifyBench, greedy: bool) -> None:
    grammar = regex("[a-z]{20}") if greedy else OBJECT
    sampling = Sampling() if greedy else law(3)
    plain = await write(bench, grammar, sampling)
    right = await write(bench, grammar, sampling, knowing(plain.tokens))
    wrong = await write(bench, grammar, sampling, shaped(OFF_SCHEMA))
    assert plain.tokens == right.tokens == wrong.tokens
    assert right.finished is not None and right.finished.accepted_count > 5
    assert right.finished.round_count < len(plain.tokens)


@pytest.mark.parametrize("rule", RULES)
async def test_every_accept_rule_keeps_to_the_grammar(
    bench: VerifyBench, rule: AcceptRule.ValueType
) -> None:
    plain = await write(bench, OBJECT, Sampling(rule=rule))
    for script in (knowing(plain.tokens), shaped(OFF_SCHEMA)):
        for sampling in (Sampling(rule=rule), law(4, rule)):
            generation = await write(bench, OBJECT, sampling, script)
            assert reason(generation) in (EOS, FinishReason.FINISH_REASON_LENGTH)
            if reason(generation) == EOS:
                json.loads(text_of(generation))


async def test_an_end_in_the_middle_of_a_tree_ends_the_text_there(bench: VerifyBench) -> None:
    plain = await write(bench, regex("[ab]{6}"), law(5))
    assert plain.tokens[6:] == [IM_END] or plain.tokens[6] >= 256
    for depth in range(1, 10):
        known = [*plain.tokens, ord("a"), ord("b"), ord("a")]
        generation = await write(bench, regex("[ab]{6}"), law(5), knowing(known, depth))
        assert generation.tokens == plain.tokens
        assert reason(generation) == EOS


async def test_a_replay_goes_on_from_any_token(bench: VerifyBench) -> None:
    plain = await write(bench, OBJECT, law(6))
    for at in range(1, len(plain.tokens), 3):
        rest = await write(bench, OBJECT, law(6), committed=plain.tokens[:at])
        assert plain.tokens[:at] + rest.tokens == plain.tokens
    ended = await write(bench, OBJECT, law(6), committed=plain.tokens)
    assert (ended.tokens, reason(ended)) == ([], EOS)


async def test_a_replay_against_the_grammar_is_refused(bench: VerifyBench) -> None:
    error = await refusal(bench, OBJECT, committed_tokens=list(b"no"))
    assert (type(error), error.field) == (InvalidArgument, "committed_tokens")


async def test_the_budget_cuts_a_text_that_has_not_ended(bench: VerifyBench) -> None:
    generation = await write(bench, OBJECT, law(7), stop=StopRule(max_tokens=5))
    assert (len(generation.tokens), reason(generation)) == (5, FinishReason.FINISH_REASON_LENGTH)


async def test_min_tokens_holds_the_end_back_as_long_as_the_grammar_goes_on(
    bench: VerifyBench,
) -> None:
    for script in (None, knowing([ord("a")] * 40, 6)):
        open_end = await write(
            bench, regex("[ab]*"), law(8), script, StopRule(max_tokens=40, min_tokens=30)
        )
        assert len(open_end.tokens) >= 30
        closed = await write(
            bench, regex("[ab]{4}"), law(8), script, StopRule(max_tokens=40, min_tokens=30)
        )
        assert (len(closed.tokens), reason(closed)) == (5, EOS)


async def test_a_stop_id_ends_a_text_inside_its_grammar(bench: VerifyBench) -> None:
    stop = StopRule(max_tokens=100, stop_token_ids=[ord(":")])
    generation = await write(bench, OBJECT, law(9), stop=stop)
    assert text_of(generation) == '{"name":'
    assert reason(generation) == FinishReason.FINISH_REASON_STOP_ID


async def test_penalties_and_bias_choose_among_what_the_grammar_allows(bench: VerifyBench) -> None:
    sampling = Sampling(
        temperature=1.0,
        seed=2,
        frequency_penalty=2.0,
        repetition_penalty=1.5,
        logit_bias={ord("x"): 100.0, ord("b"): 100.0},
    )
    plain = await write(bench, regex("[a-c]{12}"), sampling)
    assert re.fullmatch("[a-c]{12}", text_of(plain))
    drafted = await write(bench, regex("[a-c]{12}"), sampling, knowing(plain.tokens))
    assert drafted.tokens == plain.tokens


async def test_any_object_and_rules_of_a_grammar(bench: VerifyBench) -> None:
    anything = Grammar(kind=GrammarKind.GRAMMAR_KIND_JSON_OBJECT)
    generation = await write(bench, anything, law(10), stop=StopRule(max_tokens=60))
    assert text_of(generation).startswith("{")
    ruled = await write(bench, ebnf('root ::= "<" inner ">"\ninner ::= root | [0-9]'), law(11))
    assert re.fullmatch(r"<+[0-9]>+", text_of(ruled)) or len(ruled.tokens) == 100


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        (Grammar(kind=GrammarKind.GRAMMAR_KIND_JSON_SCHEMA, text="{"), "not JSON"),
        (Grammar(kind=GrammarKind.GRAMMAR_KIND_JSON_SCHEMA, text='{"not": {}}'), "'not'"),
        (Grammar(kind=GrammarKind.GRAMMAR_KIND_JSON_SCHEMA, text='{"$ref": "#"}'), "Circular"),
        (Grammar(kind=GrammarKind.GRAMMAR_KIND_JSON_SCHEMA), "empty"),
        (regex("(a"), "parenthesis"),
        (ebnf("r ::= 'a'"), "the EBNF grammar"),
        (ebnf("root ::= root"), "no text"),
        (regex("a" * (MAX_GRAMMAR_BYTES + 1)), "limit"),
    ],
)
async def test_a_grammar_that_cannot_be_used_is_refused_by_name(
    bench: VerifyBench, grammar: Grammar, says: str
) -> None:
    error = await refusal(bench, grammar)
    assert (type(error), error.field) == (InvalidArgument, "grammar")
    assert says in str(error)
    assert str(await refusal(bench, grammar)) == str(error)


async def test_going_on_past_the_end_is_refused_beside_a_grammar(bench: VerifyBench) -> None:
    error = await refusal(bench, OBJECT, stop=StopRule(max_tokens=8, ignore_eos=True))
    assert (type(error), error.field) == (InvalidArgument, "ignore_eos")


async def test_a_nursery_that_died_is_started_again(bench: VerifyBench) -> None:
    grammars = bench.server.grammars
    assert grammars is not None
    process = grammars._trials._process
    assert process is not None
    process.kill()
    await asyncio.to_thread(process.wait)
    generation = await write(bench, regex("[0-9]{3}x"), law(12))
    assert re.fullmatch("[0-9]{3}x", text_of(generation))


async def test_a_replica_says_which_grammars_it_offers(
    bench: VerifyBench, tiny_model: Path
) -> None:
    request = verify_pb2.VerifyServiceDescribeRequest()
    offered = await bench.stub.Describe(request)  # type: ignore[misc]
    assert tuple(offered.grammar_kinds) == GRAMMAR_KINDS
    async with running_verify(tiny_model, grammar_compile_s=0) as without:
        offered = await without.stub.Describe(request)  # type: ignore[misc]
        assert not offered.grammar_kinds
        error = await refusal(without, OBJECT)
        assert (type(error), error.field) == (Unsupported, "grammar")
