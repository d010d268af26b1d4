"""Steps of a real, tiny target: trees, batches, chunks and pages leave the text as it is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from torch import Tensor

from graft.common.errors import NumericFailure
from graft.common.sampling import Sampling, StopRule
from graft.common.tree import Tree, from_parents
from graft.kernels.ops import KvCache, StepRows
from graft.testing.plain import GREEDY, Plain
from graft.v1.sampling_pb2 import AcceptRule
from graft.v1.verify_pb2 import FinishReason
from graft.verify.ending import Ending
from graft.verify.events import Committed, Event, Failed, Finished
from graft.verify.pages import PagePool
from graft.verify.runner import Model, Runner
from graft.verify.scheduler import Scheduler, SchedulerLimits
from graft.verify.session import Session, SessionRequest
from graft.verify.shelf import Proposal

PAGE = 16
Drafter = Callable[[list[int]], Tree | None]


class Bench:
    """Scheduler and runner driven by hand, with a function as drafter."""

    def __init__(
        self,
        plain: Plain,
        *,
        num_pages: int = 64,
        max_running: int = 8,
        max_step_rows: int = 256,
        chunk_tokens: int = 32,
        model: Model | None = None,
    ) -> None:
        limits = SchedulerLimits(max_running, 64, max_step_rows, chunk_tokens)
        self.pool = PagePool(num_pages, PAGE)
        self.scheduler = Scheduler(limits, self.pool)
        kv = plain.new_kv(num_pages * PAGE, PAGE)
        self.runner = Runner(model or plain.target.decoder, plain.ops, kv)
        self.events: list[Event] = []
        self._ids = itertools.count(1)
        self._drafters: dict[int, Drafter] = {}
        self._live: dict[int, Session] = {}

    def open(
        self,
        prompt: Sequence[int],
        stop: StopRule,
        sampling: Sampling = GREEDY,
        *,
        drafter: Drafter | None = None,
        eos: frozenset[int] = frozenset(),
        committed: Sequence[int] = (),
        **fields: object,
    ) -> int:
        request = SessionRequest(
            prompt=np.asarray(prompt, np.int32),
            committed=np.asarray(committed, np.int32),
            sampling=sampling,
            stop=stop,
            speculate=drafter is not None,
            tree_deadline_s=0.0,
        )
        request = replace(request, **fields)  # type: ignore[arg-type]
        session_id = next(self._ids)
        session = Session(session_id, b"", request, Ending.of(stop, eos, 1000), 4)
        self.scheduler.open(session, 0.0)
        if drafter is not None:
            self.scheduler.join(1, session_id, b"")
            self._drafters[session_id] = drafter
        self._live[session_id] = session
        return session_id

    def run(self) -> None:
        while self.scheduler.num_sessions:
            for session_id, session in self._live.items():
                drafter = self._drafters.get(session_id)
                if drafter is not None and session.generated:
                    tree = drafter(session.prefix.tokens.tolist())
                    proposal = Proposal(tree, stream=1)
                    self.scheduler.offer(session_id, session.name, proposal, 0.0)
            plan = self.scheduler.plan(1.0)
            assert plan.step is not None
            outcomes, timing = self.runner.run(plan.step)
            self.scheduler.complete(plan.step, outcomes, timing, 1.0)
            self.scheduler.check()
            self.events += self.scheduler.take_events()

    def commits(self, session_id: int) -> list[Committed]:
        return [e for e in self.events if isinstance(e, Committed) and e.session_id == session_id]

    def text(self, session_id: int) -> list[int]:
        return [token for commit in self.commits(session_id) for token in commit.tokens]

    def end(self, session_id: int) -> Finished | Failed:
        return next(
            e
            for e in self.events
            if isinstance(e, Finished | Failed) and e.session_id == session_id
        )


def perfect(text: Sequence[int], depth: int, *, siblings: int = 0) -> Drafter:
    """Chains of the truth, each node behind `siblings` wrong brothers, so that KV must move."""

    def draft(tokens: list[int]) -> Tree:
        nodes, parents, parent = [tokens[-1]], [-1], 0
        for truth in text[len(tokens) : len(tokens) + depth]:
            for wrong in range(siblings):
                nodes.append((truth + 1 + wrong) % 256)
                parents.append(parent)
            nodes.append(truth)
            parents.append(parent)
            parent = len(nodes) - 1
        return from_parents(nodes, parents)

    return draft


def always_wrong(text: Sequence[int]) -> Drafter:
    def draft(tokens: list[int]) -> Tree:
        wrong = (text[len(tokens)] + 1) % 256 if len(tokens) < len(text) else 1
        return from_parents([tokens[-1], wrong, wrong, wrong], [-1, 0, 1, 2])

    return draft


PROMPTS = [list(f"prompt number {i} is {'x' * i}".encode()) for i in range(8)]
SAMPLED = Sampling(temperature=0.8, top_k=40, top_p=0.95, min_p=0.01, seed=1234567890123456789)


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("drafted", ["off", "perfect", "perfect behind wrong", "wrong"])
def test_the_text_does_not_depend_on_the_trees(
    plain: Plain, sampling: Sampling, drafted: str
) -> None:
    prompt = PROMPTS[3]
    truth = plain.text(prompt, 30, sampling)
    whole = [*prompt, *truth]
    drafter = {
        "off": None,
        "perfect": perfect(whole, 4),
        "perfect behind wrong": perfect(whole, 4, siblings=2),
        "wrong": always_wrong(whole),
    }[drafted]
    bench = Bench(plain)
    session = bench.open(prompt, StopRule(30), sampling, drafter=drafter)
    bench.run()
    assert bench.text(session) == truth
    end = bench.end(session)
    assert isinstance(end, Finished)
    accepted = {"off": 0, "wrong": 0}.get(drafted, 23)
    assert end.num_accepted == accepted
    assert end.num_rounds == 29 - accepted


def test_eight_sessions_in_one_batch_equal_each_alone(plain: Plain) -> None:
    laws = [Sampling(temperature=(i % 3) / 2, seed=i) for i in range(8)]
    truths = [plain.text(p, 20, law) for p, law in zip(PROMPTS, laws, strict=True)]
    bench = Bench(plain)
    sessions = []
    for i, (prompt, law, truth) in enumerate(zip(PROMPTS, laws, truths, strict=True)):
        whole = [*prompt, *truth]
        drafter = [None, perfect(whole, i), perfect(whole, 2, siblings=1), always_wrong(whole)]
        sessions.append(bench.open(prompt, StopRule(20), law, drafter=drafter[i % 4]))
    bench.run()
    assert [bench.text(session) for session in sessions] == truths
    assert bench.pool.num_used == 0


@pytest.mark.parametrize("length", [15, 16, 17, 31, 32, 33, 65])
def test_chunks_and_reused_prefixes_change_nothing(plain: Plain, length: int) -> None:
    prompt = [(7 * i) % 256 for i in range(length)]
    truth = plain.text(prompt, 6)
    bench = Bench(plain, chunk_tokens=16, max_step_rows=17)
    first = bench.open(prompt, StopRule(6))
    bench.run()
    second = bench.open(prompt, StopRule(6))
    bench.run()
    assert bench.text(first) == bench.text(second) == truth
    assert bench.scheduler.tally.reused == (length - 1) // PAGE * PAGE


def test_preempted_sessions_write_the_same_text(plain: Plain) -> None:
    truths = [plain.text(prompt, 40) for prompt in PROMPTS[:4]]
    bench = Bench(plain, num_pages=9, max_running=4)
    sessions = [
        bench.open(prompt, StopRule(40), drafter=perfect([*prompt, *truth], 3, siblings=1))
        for prompt, truth in zip(PROMPTS, truths, strict=False)
    ]
    bench.run()
    assert bench.scheduler.tally.preemptions > 0
    assert [bench.text(session) for session in sessions] == truths


@pytest.mark.parametrize("kept", [0, 1, 7, 19])
def test_a_replay_writes_the_rest_of_the_text(plain: Plain, kept: int) -> None:
    truth = plain.text(PROMPTS[0], 20, SAMPLED)
    bench = Bench(plain)
    session = bench.open(PROMPTS[0], StopRule(20), SAMPLED, committed=truth[:kept])
    bench.run()
    assert bench.text(session) == truth[kept:]


@pytest.mark.parametrize("index", range(6))
def test_eos_inside_an_accepted_block_ends_it_there(plain: Plain, index: int) -> None:
    truth = plain.text(PROMPTS[1], 40, SAMPLED)
    eos = truth[1 + index]
    cut = truth.index(eos) + 1
    bench = Bench(plain)
    drafter = perfect([*PROMPTS[1], *truth], 5)
    session = bench.open(PROMPTS[1], StopRule(40), SAMPLED, drafter=drafter, eos=frozenset({eos}))
    bench.run()
    assert bench.text(session) == truth[:cut]
    end = bench.end(session)
    assert isinstance(end, Finished)
    assert (end.reason, end.stop_token) == (FinishReason.FINISH_REASON_EOS, eos)
    assert end.num_accepted <= cut - 1


@pytest.mark.parametrize("depth", [1, 3, 8])
def test_every_budget_is_met_to_the_token(plain: Plain, depth: int) -> None:
    truth = plain.text(PROMPTS[2], 12)
    bench = Bench(plain)
    whole = [*PROMPTS[2], *plain.text(PROMPTS[2], 24)]
    sessions = [
        bench.open(PROMPTS[2], StopRule(budget), drafter=perfect(whole, depth))
        for budget in range(1, 13)
    ]
    bench.run()
    for budget, session in enumerate(sessions, 1):
        assert bench.text(session) == truth[:budget]
        end = bench.end(session)
        assert isinstance(end, Finished)
        assert end.num_rounds == -(-(budget - 1) // (depth + 1))
        assert end.num_accepted == end.num_drafted


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(frequency_penalty=1.0, presence_penalty=0.5),
        Sampling(repetition_penalty=1.3),
        Sampling(temperature=0.9, seed=3, frequency_penalty=0.7, logit_bias={50: 3.0, 113: -100.0}),
        Sampling(logit_bias={65: 5.0}),
    ],
)
def test_penalties_follow_each_path_of_a_tree(plain: Plain, sampling: Sampling) -> None:
    truth = plain.text(PROMPTS[4], 30, sampling)
    assert truth != plain.text(PROMPTS[4], 30)
    bench = Bench(plain)
    drafter = perfect([*PROMPTS[4], *truth], 8, siblings=1)
    session = bench.open(PROMPTS[4], StopRule(30), sampling, drafter=drafter)
    bench.run()
    assert bench.text(session) == truth
    assert bench.scheduler.tally.accepted > 20


@pytest.mark.parametrize("depth", [0, 1, 8])
def test_min_tokens_counts_tokens_not_rounds(plain: Plain, depth: int) -> None:
    free = plain.text(PROMPTS[5], 12)
    eos = free[0]
    truth = plain.text(PROMPTS[5], 30, forbidden=[eos], min_tokens=5)
    assert eos not in truth[:5]
    cut = truth.index(eos) + 1 if eos in truth else 30
    bench = Bench(plain)
    drafter = perfect([*PROMPTS[5], *truth], depth) if depth else None
    stop = StopRule(30, min_tokens=5)
    session = bench.open(PROMPTS[5], stop, drafter=drafter, eos=frozenset({eos}))
    bench.run()
    assert bench.text(session) == truth[:cut]


@pytest.mark.parametrize("depth", [0, 4])
def test_logprobs_are_those_of_the_unfiltered_softmax(plain: Plain, depth: int) -> None:
    truth = plain.text(PROMPTS[6], 10, SAMPLED)
    whole = [*PROMPTS[6], *truth]
    expected = plain.log_probs(whole)
    bench = Bench(plain)
    session = bench.open(
        PROMPTS[6],
        StopRule(10),
        SAMPLED,
        drafter=perfect(whole, depth, siblings=1) if depth else None,
        want_logprobs=True,
        num_top_logprobs=3,
    )
    bench.run()
    scores = [score for commit in bench.commits(session) for score in commit.logprobs]
    assert [score.token for score in scores] == truth
    for place, score in enumerate(scores):
        row = expected[len(PROMPTS[6]) - 1 + place]
        assert score.logprob == pytest.approx(float(row[score.token]), abs=1e-5)
        best = row.topk(3)
        assert list(score.top_tokens) == best.indices.tolist()
        assert score.top_logprobs == pytest.approx(best.values.tolist(), abs=1e-5)


def test_an_end_inside_a_block_cuts_its_logprobs_too(plain: Plain) -> None:
    truth = plain.text(PROMPTS[1], 40, SAMPLED)
    eos = truth[3]
    bench = Bench(plain)
    session = bench.open(
        PROMPTS[1],
        StopRule(40),
        SAMPLED,
        drafter=perfect([*PROMPTS[1], *truth], 8),
        eos=frozenset({eos}),
        want_logprobs=True,
    )
    bench.run()
    scores = [score.token for commit in bench.commits(session) for score in commit.logprobs]
    assert scores == bench.text(session) == truth[: truth.index(eos) + 1]


def test_prompt_logprobs_come_once_whole_and_in_order(plain: Plain) -> None:
    prompt = [(11 * i) % 256 for i in range(50)]
    expected = plain.log_probs(prompt)
    bench = Bench(plain, chunk_tokens=16, max_step_rows=17)
    bench.open(prompt, StopRule(2))
    bench.run()
    session = bench.open(prompt, StopRule(3), want_prompt_logprobs=True, num_top_logprobs=1)
    bench.run()
    first, *others = bench.commits(session)
    assert [score.token for score in first.prompt_logprobs] == prompt[1:]
    for place, score in enumerate(first.prompt_logprobs):
        value = float(expected[place, prompt[place + 1]])
        assert score.logprob == pytest.approx(value, abs=1e-5)
    assert not any(commit.prompt_logprobs for commit in others)


class Poisoned:
    """A decoder whose final states are NaN for rows of one token."""

    def __init__(self, inner: Model, token: int) -> None:
        self._inner = inner
        self._token = token
        self.vocab_size = inner.vocab_size
        self.logits, self.choose = inner.logits, inner.choose

    def forward(
        self, tokens: Tensor, rows: StepRows, kv: KvCache, output_rows: Tensor | None
    ) -> Tensor:
        hidden = self._inner.forward(tokens, rows, kv, output_rows)
        chosen = tokens if output_rows is None else tokens[output_rows]
        hidden[chosen == self._token] = float("nan")
        return hidden


def test_nan_logits_fail_their_session_and_no_other(plain: Plain) -> None:
    truth = plain.text(PROMPTS[0], 10)
    bench = Bench(plain, model=Poisoned(plain.target.decoder, 200))
    good = bench.open(PROMPTS[0], StopRule(10))
    bad = bench.open([*PROMPTS[1], 200], StopRule(10))
    bench.run()
    assert bench.text(good) == truth
    end = bench.end(bad)
    assert isinstance(end, Failed) and isinstance(end.error, NumericFailure)
    assert bench.text(bad) == []


def test_nan_on_a_branch_that_is_not_taken_harms_nothing(plain: Plain) -> None:
    truth = plain.text(PROMPTS[0], 10)
    whole = [*PROMPTS[0], *truth]
    assert 200 not in whole

    def drafter(tokens: list[int]) -> Tree:
        return from_parents([tokens[-1], 200, 200], [-1, 0, 1])

    bench = Bench(plain, model=Poisoned(plain.target.decoder, 200))
    session = bench.open(PROMPTS[0], StopRule(10), drafter=drafter)
    bench.run()
    assert bench.text(session) == truth


@pytest.mark.parametrize(
    "rule",
    [
        AcceptRule.ACCEPT_RULE_TARGET_ONLY,
        AcceptRule.ACCEPT_RULE_REJECTION,
        AcceptRule.ACCEPT_RULE_BLOCK,
    ],
)
def test_other_rules_are_the_greedy_text_at_temperature_zero(
    plain: Plain, rule: AcceptRule.ValueType
) -> None:
    truth = plain.text(PROMPTS[3], 20)
    bench = Bench(plain)
    other = bench.open(PROMPTS[2], StopRule(8))
    session = bench.open(
        PROMPTS[3],
        StopRule(20),
        Sampling(rule=rule),
        drafter=perfect([*PROMPTS[3], *truth], 4),
    )
    bench.run()
    assert bench.text(session) == truth
    assert bench.text(other) == plain.text(PROMPTS[2], 8)
    end = bench.end(session)
    assert isinstance(end, Finished) and end.num_accepted == end.num_drafted > 10
