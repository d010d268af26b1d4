"""One seed, one text: a text is a function of weights, prompt, law and seed, and of nothing else.

Every (prompt, seed) pair is written once by a target alone and then again under each set-up; all
ids must be equal. The set-ups share one process and one tiny target; those of real services, with
a drafter that is killed and a replica that is lost, are at the end.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from graft.common.prefix import Prefix
from graft.common.sampling import Sampling
from graft.common.tier import Tier
from graft.common.tree import Tree, TreeLimits, from_parents, trim
from graft.draft.mirror import Mirror
from graft.draft.proposers.base import Seat
from graft.draft.proposers.ngram import NgramOptions, NgramProposer
from graft.kernels.ops import ChoiceRows
from graft.kernels.rows import Law, choice_rows
from graft.testing.cluster import Cluster, running_cluster
from graft.testing.models import write_tiny_model
from graft.testing.plain import Plain
from graft.testing.replica import Drafter, Replica, Shape, Written
from graft.testing.scripted import die_at, replay
from graft.testing.scripted import perfect as perfect_proposer

NUM_TOKENS = 20
VOCAB = 320
LIMITS = TreeLimits(64, 32, VOCAB)
LAWS = [
    Sampling(),
    Sampling(temperature=0.05),
    Sampling(temperature=0.3, top_k=8),
    Sampling(temperature=0.8, top_k=40, top_p=0.95),
    Sampling(temperature=1.0),
    Sampling(temperature=1.5, top_p=0.7, min_p=0.02),
    Sampling(temperature=0.2, repetition_penalty=1.3, presence_penalty=0.4),
    Sampling(temperature=0.7, frequency_penalty=0.6, logit_bias={5: 4.0, 6: -100.0}),
]


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt and a law with its seed. `number` seeds what drafters do by chance."""

    number: int
    prompt: tuple[int, ...]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Text:
    """A pair and what the target alone writes for it."""

    pair: Pair
    tokens: list[int]

    @property
    def whole(self) -> list[int]:
        return [*self.pair.prompt, *self.tokens]


Rewrite = Callable[[Plain, Sequence[Text]], list[Written]]


def pairs(count: int) -> list[Pair]:
    """Prompts of 1 to 48 ids, some with much repetition; every law with its own seed."""
    generator = np.random.default_rng(20)
    found = []
    for number in range(count):
        length = int(generator.integers(1, 49))
        span = VOCAB if number % 3 else 4
        prompt = tuple(generator.integers(0, span, length).tolist())
        seed = int(generator.integers(0, 1 << 63)) * 2 + number % 2
        found.append(Pair(number, prompt, replace(LAWS[number % len(LAWS)], seed=seed)))
    return found


def written_alone(plain: Plain, several: Sequence[Pair]) -> list[Text]:
    """One session at a time, no drafts, whole prompts."""
    replica = Replica(plain, Shape(max_running=1, max_step_rows=64))
    texts = []
    for pair in several:
        written = replica.open(pair.prompt, NUM_TOKENS, pair.sampling)
        replica.run()
        texts.append(Text(pair, written.tokens))
    return texts


# Drafters: functions of the truth.


def perfect(text: Text) -> Drafter:
    return lambda tokens: spine(tokens, text.whole[len(tokens) : len(tokens) + 5])


def behind_wrong(text: Text) -> Drafter:
    """The truth as the last of three children, so that accepted keys have to move."""
    return lambda tokens: spine(tokens, text.whole[len(tokens) : len(tokens) + 4], wrong=2)


def always_wrong(text: Text) -> Drafter:
    def draft(tokens: list[int]) -> Tree | None:
        truth = text.whole[len(tokens) : len(tokens) + 4]
        return spine(tokens, [(token + 1) % VOCAB for token in truth])

    return draft


def anything(text: Text) -> Drafter:
    """A tree of any width and depth of 1 to 8, true now here, now there, anew every round."""
    generator = np.random.default_rng(text.pair.number)

    def draft(tokens: list[int]) -> Tree | None:
        width, depth = generator.integers(1, 9, 2).tolist()
        return random_tree(generator, tokens, text.whole, width, depth, 40)

    return draft


def switching(text: Text) -> Drafter:
    """Another tier every round: off, chains, stars, bushes."""
    generator = np.random.default_rng(text.pair.number)
    tiers = itertools.cycle([(0, 0, 0), (1, 8, 9), (8, 1, 9), (3, 3, 30), (2, 1, 2), (8, 8, 60)])

    def draft(tokens: list[int]) -> Tree | None:
        depth, width, nodes = next(tiers)
        return random_tree(generator, tokens, text.whole, width, depth, nodes) if nodes else None

    return draft


def ngram(text: Text) -> Drafter:
    """The real proposer, which knows what is committed and nothing else."""
    proposer = NgramProposer(NgramOptions(spec_factor=0))
    seats: list[Seat] = []

    def draft(tokens: list[int]) -> Tree | None:
        if not seats:
            mirror = Mirror(
                session_id=1,
                prefix=Prefix(tokens),
                prompt_length=len(text.pair.prompt),
                sampling=text.pair.sampling,
                limits=LIMITS,
                room=NUM_TOKENS,
            )
            seats.append(Seat(mirror, Tier("ngram", 8, 4, 16), proposer.open(mirror)))
        mirror = seats[0].mirror
        if new := tokens[len(mirror.prefix) :]:
            mirror.prefix.extend(new)
            proposer.commit(seats[0], new)
        return proposer.propose(seats)[0]

    return draft


def spine(tokens: list[int], path: Sequence[int], wrong: int = 0) -> Tree | None:
    """A chain; every node of it stands behind `wrong` brothers."""
    if not path:
        return None
    nodes, parents, parent = [tokens[-1]], [-1], 0
    for token in path:
        for shift in range(1, wrong + 1):
            nodes.append((token + shift) % VOCAB)
            parents.append(parent)
        nodes.append(token)
        parents.append(parent)
        parent = len(nodes) - 1
    return from_parents(nodes, parents)


def random_tree(
    generator: np.random.Generator,
    tokens: list[int],
    whole: list[int],
    width: int,
    depth: int,
    max_nodes: int,
) -> Tree:
    """Nodes have 1 to `width` children; one of them is true for as long as the dice fall well."""
    nodes, parents = [tokens[-1]], [-1]
    level, spine_node = [0], 0
    for step in range(depth):
        following = []
        for node in level:
            children = set(generator.integers(0, VOCAB, int(generator.integers(1, width + 1))))
            place = len(tokens) + step
            if node == spine_node and place < len(whole) and generator.random() < 0.8:
                children.add(whole[place])
            order = [int(child) for child in generator.permutation(sorted(children))[:width]]
            for child in order:
                following.append(len(nodes))
                if node == spine_node and place < len(whole) and child == whole[place]:
                    true_node = len(nodes)
                nodes.append(child)
                parents.append(node)
            if node == spine_node:
                on_path = place < len(whole) and whole[place] in order
                spine_node = true_node if on_path else -1
        keep = generator.permutation(following)[: max(1, width)].tolist()
        level = sorted({*keep, spine_node} & set(following))
        if len(nodes) > max_nodes:
            break
    return trim(from_parents(nodes, parents), max_nodes, depth)


# Set-ups: one rewriting of all texts each.


def together(shape: Shape, drafter: Callable[[Text], Drafter] | None = None) -> Rewrite:
    """All sessions at one replica, which batches as it likes."""

    def rewrite(plain: Plain, texts: Sequence[Text]) -> list[Written]:
        replica = Replica(plain, shape)
        written = [open_at(replica, text, drafter) for text in texts]
        replica.run()
        return written

    return rewrite


def every_batch(plain: Plain, texts: Sequence[Text]) -> list[Written]:
    """Each eighth of the texts in batches of 1, 2 .. 8, under trees of all shapes."""
    written: list[Written | None] = [None] * len(texts)
    for size in range(1, 9):
        replica = Replica(plain, Shape(max_running=size))
        for place in range(size - 1, len(texts), 8):
            written[place] = open_at(replica, texts[place], anything)
        replica.run()
    return [one for one in written if one is not None]


def every_chunk(plain: Plain, texts: Sequence[Text]) -> list[Written]:
    """Prompts are run in chunks of 1, 5, 16 and 33 rows, beside decoding sessions."""
    written: list[Written | None] = [None] * len(texts)
    for turn, chunk in enumerate((1, 5, 16, 33)):
        replica = Replica(plain, Shape(chunk_tokens=chunk, max_step_rows=max(48, chunk + 16)))
        for place in range(turn, len(texts), 4):
            written[place] = open_at(replica, texts[place], switching)
        replica.run()
    return [one for one in written if one is not None]


def drafter_killed(plain: Plain, texts: Sequence[Text]) -> list[Written]:
    """Eight at a time; the drafter of all is lost after a few steps."""
    written = []
    replica = Replica(plain, Shape())
    for number, group in enumerate(in_groups(texts, 8)):
        written += [open_at(replica, text, perfect) for text in group]
        for _ in range(1 + number % 4):
            replica.step()
        replica.lose_drafters()
        replica.run()
    return written


def moved(plain: Plain, texts: Sequence[Text]) -> list[Written]:
    """Each text moves mid-way to a replica with other pages, chunks, batches and a cold cache."""
    written = []
    here, there = Replica(plain, Shape()), Replica(plain, Shape(5, 7, 60, 8))
    for number, group in enumerate(in_groups(texts, 8)):
        first = [open_at(here, text, anything) for text in group]
        for _ in range(1 + number % 6):
            here.step()
        for begun, text in zip(first, group, strict=True):
            here.scheduler.cancel(begun.session.session_id)
            drafter = switching(text)
            rest = there.open(
                text.pair.prompt, NUM_TOKENS, text.pair.sampling, drafter, begun.tokens
            )
            rest.tokens += begun.tokens
            rest.num_accepted += begun.num_accepted
            written.append(rest)
        here.run()
        there.run()
    return written


def warm(plain: Plain, texts: Sequence[Text]) -> list[Written]:
    """Every text is written twice by one replica; the second time its prefix is cached."""
    written = []
    replica = Replica(plain, Shape(page_tokens=4))
    for group in in_groups(texts, 8):
        for text in group:
            open_at(replica, text, anything)
        replica.run()
        before = replica.scheduler.tally.reused
        written += [open_at(replica, text, behind_wrong) for text in group]
        replica.run()
        assert replica.scheduler.tally.reused > before
    return written


def preempted(plain: Plain, texts: Sequence[Text]) -> list[Written]:
    """Pages for about two sessions and a half: sessions lose theirs and come back."""
    replica = Replica(plain, Shape(page_tokens=4, num_pages=44))
    written = [open_at(replica, text, anything) for text in texts]
    replica.run()
    assert replica.scheduler.tally.preemptions > 0
    return written


SET_UPS: dict[str, Rewrite] = {
    "no drafting, batched": together(Shape()),
    "ngram": together(Shape(), ngram),
    "always wrong": together(Shape(), always_wrong),
    "perfect": together(Shape(), perfect),
    "perfect behind wrong": together(Shape(max_running=6), behind_wrong),
    "random trees": together(Shape(), anything),
    "tiers switched every round": together(Shape(max_running=7), switching),
    "rows are scarce": together(Shape(max_step_rows=24, chunk_tokens=8), anything),
    "batches of 1 to 8": every_batch,
    "chunked prefill": every_chunk,
    "drafter killed": drafter_killed,
    "moved between replicas": moved,
    "warm cache": warm,
    "preempted": preempted,
}
NOTHING_ACCEPTED = {"no drafting, batched", "always wrong"}


def open_at(
    replica: Replica, text: Text, drafter: Callable[[Text], Drafter] | None = None
) -> Written:
    pair = text.pair
    made = None if drafter is None else drafter(text)
    return replica.open(pair.prompt, NUM_TOKENS, pair.sampling, made)


def in_groups(texts: Sequence[Text], size: int) -> Iterator[Sequence[Text]]:
    for start in range(0, len(texts), size):
        yield texts[start : start + size]


def check_all(plain: Plain, texts: Sequence[Text], name: str) -> tuple[int, float]:
    """Accepted tokens and seconds of a set-up; every id is compared."""
    started = time.monotonic()
    written = SET_UPS[name](plain, texts)
    assert len(written) == len(texts)
    wrong = [
        text.pair.number
        for text, one in zip(texts, written, strict=True)
        if one.tokens != text.tokens
    ]
    assert not wrong, f"{name}: {len(wrong)} of {len(texts)} texts differ: pairs {wrong[:10]}"
    accepted = sum(one.num_accepted for one in written)
    assert (accepted == 0) == (name in NOTHING_ACCEPTED), f"{name} accepted {accepted} tokens"
    return accepted, time.monotonic() - started


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def plain(model: Path) -> Plain:
    torch.set_num_threads(1)
    return Plain.load(model)


@pytest.fixture(scope="module")
def few(plain: Plain) -> list[Text]:
    return written_alone(plain, pairs(24))


def test_a_text_written_alone_is_the_reference_s(plain: Plain, few: list[Text]) -> None:
    for text in few:
        pair = text.pair
        assert text.tokens == plain.text(pair.prompt, NUM_TOKENS, pair.sampling)


def test_seeds_make_texts(few: list[Text]) -> None:
    assert len({tuple(text.tokens) for text in few}) == len(few)


@pytest.mark.parametrize("name", SET_UPS)
def test_a_set_up_leaves_every_text_as_it_is(plain: Plain, few: list[Text], name: str) -> None:
    check_all(plain, few, name)


def rows_of_the_batch(laws: Sequence[Law], vocab_size: int) -> ChoiceRows:
    """The fault: noise by the row of the step in place of the position."""
    rows = choice_rows(laws, vocab_size)
    return replace(rows, position=torch.arange(len(rows.position), dtype=torch.int32))


@pytest.mark.parametrize("name", ["random trees", "no drafting, batched", "perfect"])
def test_noise_that_is_not_keyed_by_position_would_show(
    plain: Plain, few: list[Text], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("choice", "runner"):
        monkeypatch.setattr(f"graft.verify.{place}.choice_rows", rows_of_the_batch)
    with pytest.raises(AssertionError, match="texts differ"):
        check_all(plain, few, name)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_thousand_pairs_are_the_same_under_every_set_up(plain: Plain) -> None:
    started = time.monotonic()
    texts = written_alone(plain, pairs(1000))
    print(f"\n{len(texts)} texts written alone in {time.monotonic() - started:.1f} s")
    for name in SET_UPS:
        accepted, seconds = check_all(plain, texts, name)
        print(f"{name}: identical, {accepted} drafted tokens accepted, {seconds:.1f} s")
    print(f"all {len(SET_UPS)} set-ups in {time.monotonic() - started:.1f} s")


# Real services: what a drafter or a replica does when it dies cannot be told from its text.


async def ids_of(cluster: Cluster, pair: Pair) -> list[int]:
    law = pair.sampling
    body = await cluster.complete(
        list(pair.prompt),
        max_tokens=NUM_TOKENS,
        seed=law.seed,
        temperature=law.temperature,
        top_k=law.top_k,
        top_p=law.top_p,
        min_p=law.min_p,
        presence_penalty=law.presence_penalty,
        frequency_penalty=law.frequency_penalty,
        repetition_penalty=law.repetition_penalty,
        logit_bias={str(token): bias for token, bias in law.logit_bias.items()},
        ignore_eos=True,
        return_token_ids=True,
    )
    ids: list[int] = body["choices"][0]["token_ids"]
    return ids


async def counted(cluster: Cluster, name: str) -> float:
    lines = (await cluster.client.get("/metrics")).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))


@pytest.mark.parametrize("lost", ["nothing", "drafter", "replica"])
async def test_real_services_write_the_same_ids(model: Path, few: list[Text], lost: str) -> None:
    loop = asyncio.get_running_loop()
    running: list[Cluster] = []

    def die() -> None:
        cluster = running[0]
        victim = cluster.drafters[0] if lost == "drafter" else cluster.verifiers[0]
        loop.call_soon_threadsafe(lambda: loop.create_task(victim.stop(0)))

    proposer = perfect_proposer(replay([text.whole for text in few]), depth=2)
    if lost != "nothing":
        proposer = die_at(proposer, 6, die)
    async with running_cluster(model, proposers=[proposer], num_verify=2) as cluster:
        running.append(cluster)
        written = await asyncio.gather(*(ids_of(cluster, text.pair) for text in few))
        moved_sessions = await counted(cluster, "graft_verify_replays_total")
        drafted = await counted(cluster, "graft_accepted_tokens_total")
    assert written == [text.tokens for text in few]
    assert drafted > 0
    assert (moved_sessions > 0) == (lost == "replica")
