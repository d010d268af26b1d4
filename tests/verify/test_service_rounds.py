"""Scripted drafters over real sockets: whatever they send, the text is the plain text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from graft.common.errors import BadTicket, SessionNotFound
from graft.common.tree import Tree, chain, from_parents
from graft.testing.plain import Plain
from graft.testing.verify_client import (
    Generation,
    Say,
    Script,
    ScriptedDrafter,
    Seat,
    VerifyBench,
    eventually,
    running_verify,
)
from graft.v1 import tree_pb2, verify_pb2
from graft.v1.sampling_pb2 import StopRule
from graft.v1.tree_pb2 import TreeRefusal
from graft.v1.verify_pb2 import PlainReason

PROMPT = list(b"tell me something that repeats")
COUNT = 21


@pytest_asyncio.fixture
async def bench(tiny_model: Path) -> AsyncIterator[VerifyBench]:
    async with running_verify(tiny_model) as running:
        yield running


@pytest.fixture(scope="module")
def truth(plain: Plain) -> list[int]:
    return plain.text(PROMPT, COUNT + 8)


def scripted(make: Callable[[Seat], Say | None]) -> Script:
    async def script(seat: Seat) -> Say | None:
        return make(seat)

    return script


def right(truth: list[int], seat: Seat, depth: int = 4) -> Tree:
    done = len(seat.tokens) - len(PROMPT)
    return chain([seat.tokens[-1], *truth[done : done + depth]])


def perfect(truth: list[int], depth: int = 4) -> Script:
    return scripted(lambda seat: Say(trees=[seat.propose(right(truth, seat, depth))]))


async def run(
    bench: VerifyBench, script: Script, *, deadline_micros: int = 5_000_000
) -> tuple[Generation, ScriptedDrafter]:
    drafter = bench.drafter(script)
    generation = await bench.generate(
        PROMPT, COUNT, drafter=drafter, tree_deadline_micros=deadline_micros
    )
    return generation, drafter


@pytest.mark.parametrize("depth", [1, 4, 9])
async def test_a_perfect_drafter_is_accepted_whole(
    bench: VerifyBench, truth: list[int], depth: int
) -> None:
    generation, drafter = await run(bench, perfect(truth, depth))
    assert generation.tokens == truth[:COUNT]
    assert generation.finished is not None
    assert generation.finished.round_count == -(-(COUNT - 1) // (depth + 1))
    assert generation.finished.accepted_count == generation.finished.drafted_count > 0
    assert generation.sequences == list(range(len(generation.sequences)))
    await drafter.until(lambda: bool(drafter.closed))
    assert drafter.sequences == list(range(len(drafter.sequences)))
    assert not drafter.refusals


async def test_an_always_wrong_drafter_gets_one_token_a_round(
    bench: VerifyBench, truth: list[int]
) -> None:
    def wrong(seat: Seat) -> Say:
        tree = right(truth, seat)
        return Say(trees=[seat.propose(chain([tree.tokens[0], *((tree.tokens[1:] + 1) % 256)]))])

    generation, _ = await run(bench, scripted(wrong))
    assert generation.tokens == truth[:COUNT]
    assert generation.finished is not None
    assert generation.finished.round_count == COUNT - 1
    assert generation.finished.accepted_count == 0
    assert generation.finished.drafted_count > COUNT


async def test_a_wide_tree_finds_the_truth_behind_its_brothers(
    bench: VerifyBench, truth: list[int]
) -> None:
    def wide(seat: Seat) -> Say:
        done = len(seat.tokens) - len(PROMPT)
        tokens, parents, parent = [seat.tokens[-1]], [-1], 0
        for token in truth[done : done + 4]:
            tokens += [(token + 1) % 256, (token + 2) % 256, token]
            parents += [parent] * 3
            parent = len(tokens) - 1
        return Say(trees=[seat.propose(from_parents(tokens, parents))])

    generation, _ = await run(bench, scripted(wide))
    assert generation.tokens == truth[:COUNT]
    assert generation.finished is not None
    assert generation.finished.round_count == 4


async def test_stale_trees_are_counted_and_harmless(bench: VerifyBench, truth: list[int]) -> None:
    def stale(seat: Seat) -> Say:
        former = seat.tokens[:-1]
        return Say(trees=[seat.propose(chain([former[-1], 1, 2]), former)])

    generation, drafter = await run(bench, scripted(stale), deadline_micros=20_000)
    assert generation.tokens == truth[:COUNT]
    assert drafter.refusals[TreeRefusal.TREE_REFUSAL_STALE] > 0
    assert bench.metric("graft_rejected_trees_total", reason="stale") > 0


async def test_doubled_trees_are_counted_and_harmless(bench: VerifyBench, truth: list[int]) -> None:
    def double(seat: Seat) -> Say:
        tree = seat.propose(right(truth, seat))
        return Say(trees=[tree, tree])

    generation, drafter = await run(bench, scripted(double))
    assert generation.tokens == truth[:COUNT]
    assert drafter.refusals[TreeRefusal.TREE_REFUSAL_REPEATED] > 0
    assert generation.finished is not None
    assert generation.finished.accepted_count == generation.finished.drafted_count > 0


async def test_foreign_trees_touch_nobody(bench: VerifyBench, truth: list[int]) -> None:
    victims: list[int] = []

    def foreign(seat: Seat) -> Say:
        tree = seat.propose(right(truth, seat))
        tree.session_id = victims[0]
        return Say(trees=[tree, seat.propose(right(truth, seat))])

    async def hold(seat: Seat) -> Say | None:
        victims.append(seat.session_id)
        return Say(empties=[empty_of(seat)])

    other = bench.drafter(hold)
    victim = asyncio.create_task(bench.generate(PROMPT, 400, drafter=other))
    await other.until(lambda: bool(other.seats))
    generation, drafter = await run(bench, scripted(foreign))
    assert generation.tokens == truth[:COUNT]
    assert drafter.refusals[TreeRefusal.TREE_REFUSAL_FOREIGN] > 0
    assert not other.refusals
    assert (await victim).tokens[: len(truth)] == truth


def empty_of(seat: Seat) -> verify_pb2.EmptyProposal:
    return verify_pb2.EmptyProposal(
        session_id=seat.session_id,
        prefix_length=len(seat.prefix),
        prefix_digest=seat.prefix.digest,
    )


def broken_shape(message: tree_pb2.CandidateTree) -> None:
    message.shape = b"\xff" * len(message.shape)


def short_tokens(message: tree_pb2.CandidateTree) -> None:
    message.tokens = message.tokens[:-1]


def id_out_of_range(message: tree_pb2.CandidateTree) -> None:
    message.tokens = (320).to_bytes(2, "little") + message.tokens[2:]


def id_minus_one(message: tree_pb2.CandidateTree) -> None:
    message.tokens = b"\xff\xff" + message.tokens[2:]


def nan_scores(message: tree_pb2.CandidateTree) -> None:
    message.scores = b"\x00\x7e" * (len(message.tokens) // 2)


@pytest.mark.parametrize(
    ("damage", "refusal"),
    [
        (broken_shape, TreeRefusal.TREE_REFUSAL_MALFORMED),
        (short_tokens, TreeRefusal.TREE_REFUSAL_MALFORMED),
        (id_out_of_range, TreeRefusal.TREE_REFUSAL_TOKEN_RANGE),
        (id_minus_one, TreeRefusal.TREE_REFUSAL_TOKEN_RANGE),
        (nan_scores, TreeRefusal.TREE_REFUSAL_BAD_SCORES),
    ],
)
async def test_rubbish_is_refused_at_once_and_the_round_goes_on(
    bench: VerifyBench,
    truth: list[int],
    damage: Callable[[tree_pb2.CandidateTree], None],
    refusal: int,
) -> None:
    def rubbish(seat: Seat) -> Say:
        tree = seat.propose(right(truth, seat))
        damage(tree)
        return Say(trees=[tree])

    generation, drafter = await run(bench, scripted(rubbish))
    assert generation.tokens == truth[:COUNT]
    assert drafter.refusals[refusal] >= COUNT - 2
    reasons = {commit.plain_reason for commit in generation.commits[1:]}
    assert reasons == {PlainReason.PLAIN_REASON_REFUSED}


@pytest.mark.parametrize(
    ("tree", "refusal"),
    [
        (chain([0] * 33), TreeRefusal.TREE_REFUSAL_TOO_MANY_NODES),
        (chain([0] * 18), TreeRefusal.TREE_REFUSAL_TOO_DEEP),
        (from_parents([0, 5, 5], [-1, 0, 0]), TreeRefusal.TREE_REFUSAL_DUPLICATE_SIBLING),
    ],
)
async def test_trees_beyond_the_agreed_limits_are_refused(
    bench: VerifyBench, truth: list[int], tree: Tree, refusal: int
) -> None:
    generation, drafter = await run(bench, scripted(lambda s: Say(trees=[s.propose(tree)])))
    assert generation.tokens == truth[:COUNT]
    assert drafter.refusals[refusal] > 0


async def test_trees_of_every_odd_shape_are_verified(bench: VerifyBench, truth: list[int]) -> None:
    shapes = [
        lambda s: chain([s.tokens[-1]]),
        lambda s: from_parents([s.tokens[-1], 1, 2, 3, 4], [-1, 0, 0, 0, 0]),
        lambda s: right(truth, s, 1),
        lambda s: from_parents([0, *range(20)], [-1, *[i // 4 for i in range(20)]]),
    ]

    def odd(seat: Seat) -> Say:
        return Say(trees=[seat.propose(shapes[seat.round % 4](seat))])

    generation, drafter = await run(bench, scripted(odd))
    assert generation.tokens == truth[:COUNT]
    assert not drafter.refusals


async def test_an_empty_proposal_ends_the_wait(bench: VerifyBench, truth: list[int]) -> None:
    generation, _ = await run(bench, scripted(lambda s: Say(empties=[empty_of(s)])))
    assert generation.tokens == truth[:COUNT]
    assert {commit.plain_reason for commit in generation.commits[1:]} == {
        PlainReason.PLAIN_REASON_EMPTY
    }


async def test_a_hanging_drafter_costs_one_deadline(bench: VerifyBench, truth: list[int]) -> None:
    generation, _ = await run(bench, scripted(lambda _: None), deadline_micros=200_000)
    assert generation.tokens == truth[:COUNT]
    waits = [commit.timing.tree_wait_micros for commit in generation.commits]
    assert sum(wait >= 100_000 for wait in waits) == 1
    assert bench.metric("graft_draft_timeouts_total") == 1


async def test_a_slow_drafter_costs_one_deadline(bench: VerifyBench, truth: list[int]) -> None:
    async def slow(seat: Seat) -> Say:
        await asyncio.sleep(0.05)
        return Say(trees=[seat.propose(right(truth, seat))])

    generation, _ = await run(bench, slow, deadline_micros=10_000)
    assert generation.tokens == truth[:COUNT]
    assert bench.metric("graft_draft_timeouts_total") == 1


async def test_a_drafter_that_dies_leaves_plain_decoding(
    bench: VerifyBench, truth: list[int]
) -> None:
    drafter = bench.drafter(scripted(lambda _: None))

    async def dying(seat: Seat) -> Say | None:
        if seat.round == 2:
            drafter.call.cancel()
            return None
        return Say(trees=[seat.propose(right(truth, seat, 2))])

    drafter.script = dying
    generation = await bench.generate(PROMPT, COUNT, drafter=drafter)
    assert generation.tokens == truth[:COUNT]
    last = generation.commits[-1].plain_reason
    assert last == PlainReason.PLAIN_REASON_NO_DRAFTER
    await drafter.die()


async def test_another_drafter_takes_over_a_running_session(
    bench: VerifyBench, plain: Plain
) -> None:
    truth = plain.text(PROMPT, 300)
    first = bench.drafter(scripted(lambda _: None))
    second = bench.drafter(perfect(truth, 4))

    async def hand_over(seat: Seat) -> Say | None:
        if seat.round == 3:
            await second.join(seat.session_id, tickets[0])
            return Say(leaves=[verify_pb2.LeaveSession(session_id=seat.session_id)])
        return Say(trees=[seat.propose(right(truth, seat, 1))])

    tickets: list[bytes] = []
    first.script = hand_over
    join = first.join

    async def remember(session_id: int, ticket: bytes) -> None:
        tickets.append(ticket)
        await join(session_id, ticket)

    first.join = remember  # type: ignore[method-assign]
    generation = await bench.generate(PROMPT, 300, drafter=first, tree_deadline_micros=1_000_000)
    assert generation.tokens == truth
    assert sum(commit.accepted_count == 4 for commit in generation.commits) > 30


async def test_a_drafter_may_push_ahead_of_the_commit(bench: VerifyBench, truth: list[int]) -> None:
    """Each message carries the tree for now and the one for what will be true after it."""

    def ahead(seat: Seat) -> Say:
        tree = right(truth, seat, 2)
        done = len(seat.tokens) - len(PROMPT)
        after = [*seat.tokens, *truth[done : done + 3]]
        return Say(
            trees=[
                seat.propose(tree),
                seat.propose(chain([after[-1], *truth[done + 3 : done + 5]]), after),
            ]
        )

    generation, drafter = await run(bench, scripted(ahead))
    assert generation.tokens == truth[:COUNT]
    assert bench.metric("graft_pushed_trees_total", outcome="hit") > 0
    assert generation.finished is not None
    assert generation.finished.accepted_count == generation.finished.drafted_count
    await drafter.die()


async def test_more_trees_than_are_held_push_out_the_oldest(
    bench: VerifyBench, truth: list[int]
) -> None:
    def flood(seat: Seat) -> Say:
        guesses = [seat.propose(chain([token, 1]), [*seat.tokens, token]) for token in range(40)]
        return Say(trees=[*guesses, seat.propose(right(truth, seat))])

    generation, drafter = await run(bench, scripted(flood))
    assert generation.tokens == truth[:COUNT]
    assert drafter.refusals[TreeRefusal.TREE_REFUSAL_NO_CREDIT] > 0


async def test_eight_sessions_through_one_drafter(bench: VerifyBench, plain: Plain) -> None:
    prompts = [[*PROMPT, i] for i in range(8)]
    truths = {tuple(prompt): plain.text(prompt, 24) for prompt in prompts}

    def draft(seat: Seat) -> Say:
        tokens = seat.tokens
        truth = truths[tuple(tokens[: len(PROMPT) + 1])]
        done = len(tokens) - len(PROMPT) - 1
        depth = tokens[len(PROMPT)] % 4 + 1
        return Say(trees=[seat.propose(chain([tokens[-1], *truth[done : done + depth]]))])

    drafter = bench.drafter(scripted(draft))
    generations = await asyncio.gather(
        *(bench.generate(prompt, 20, drafter=drafter) for prompt in prompts)
    )
    assert [g.tokens for g in generations] == [truths[tuple(p)][:20] for p in prompts]
    rows = [commit.timing.batch_row_count for g in generations for commit in g.commits]
    assert max(rows) > 5
    await eventually(bench.idle_pages)


async def test_a_join_with_a_wrong_ticket_or_session_is_told_so(bench: VerifyBench) -> None:
    drafter = bench.drafter(scripted(lambda _: None))
    await drafter.join(12345, b"x")
    await drafter.until(lambda: 12345 in drafter.closed)
    assert drafter.closed[12345] == SessionNotFound.reason
    call = bench.generate_call()
    stop = StopRule(max_tokens=400, ignore_eos=True)
    await call.write(
        verify_pb2.GenerateRequest(open=verify_pb2.OpenSession(prompt_tokens=PROMPT, stop=stop))
    )
    opened = await anext(aiter(call))
    session_id = opened.opened.session_id
    await drafter.join(session_id, b"not the ticket")
    await drafter.until(lambda: session_id in drafter.closed)
    assert drafter.closed[session_id] == BadTicket.reason
    assert not drafter.seats
    call.cancel()
