"""The corpus: what it holds, that its settings alone decide it, and that a stop loses little."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from graft.common.errors import InvalidArgument
from graft.testing.corpora import Recorder, Stopped, corpus_bytes, corpus_order
from graft.testing.plain import Plain
from graft.train.corpus import Corpus, Split, draft_vocabulary
from graft.train.files import read_lines
from graft.train.make_corpus import CorpusOrder, make_corpus
from graft.train.plan import default_layers

SPLITS: tuple[Split, ...] = ("train", "held")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> CorpusOrder:
    order = corpus_order(tmp_path_factory.mktemp("corpus"), "whole")
    make_corpus(order, Recorder())
    return order


@pytest.fixture(scope="module")
def corpus(made: CorpusOrder) -> Corpus:
    return Corpus(made.out / "corpus")


def test_a_corpus_has_the_shapes_that_its_reader_promises(corpus: Corpus) -> None:
    refs = [*corpus.sequences("train"), *corpus.sequences("held")]

    assert len(refs) == 14
    for ref in refs:
        states = corpus.states(ref)
        assert states.shape == (ref.length - 1, len(corpus.layers), 64)
        assert states.dtype == torch.float32
        assert corpus.tokens(ref).shape == (ref.length,)
        assert 0 < ref.prompt_len < ref.length <= ref.prompt_len + 12


def test_half_of_the_answers_are_greedy_and_the_others_warm(corpus: Corpus) -> None:
    warmth = [ref.temperature for split in SPLITS for ref in corpus.sequences(split)]

    assert 3 <= warmth.count(0.0) <= 11
    assert all(one == 0 or 0.7 <= one <= 1.0 for one in warmth)


def test_states_are_those_of_a_forward_over_the_finished_text(
    made: CorpusOrder, corpus: Corpus
) -> None:
    plain = Plain.load(Path(made.desk.target))

    for ref in corpus.sequences("train"):
        tokens = corpus.tokens(ref).tolist()[:-1]
        expected = plain.states(tokens, corpus.layers, final_norm=False)
        expected = expected.reshape(len(tokens), len(corpus.layers), -1)
        _, scales = corpus.coded_states(ref)
        error = np.abs(corpus.states(ref).numpy() - expected).max(axis=-1)
        assert (error <= 0.501 * scales.numpy() + 1e-6).all(), ref.id
        assert scales.numpy().max() < expected.std(), "the int8 error is small beside the states"


def test_greedy_answers_are_the_targets_own(made: CorpusOrder, corpus: Corpus) -> None:
    plain = Plain.load(Path(made.desk.target))
    greedy = [ref for ref in corpus.sequences("train") if ref.temperature == 0]

    assert greedy
    for ref in greedy:
        tokens = corpus.tokens(ref).tolist()
        prompt, answer = tokens[: ref.prompt_len], tokens[ref.prompt_len :]
        assert plain.text(prompt, len(answer)) == answer


def test_the_bytes_do_not_depend_on_how_many_texts_are_written_at_once(made: CorpusOrder) -> None:
    other = replace(
        made, out=made.out.with_name("wider"), desk=replace(made.desk, sessions=9, kv_tokens=512)
    )

    make_corpus(other, Recorder())

    assert corpus_bytes(other.out) == corpus_bytes(made.out)


@pytest.mark.parametrize("stop_at", [1, 2, 3, 4])
def test_a_stopped_run_goes_on_to_the_same_bytes(made: CorpusOrder, stop_at: int) -> None:
    order = replace(made, out=made.out.with_name(f"stopped-{stop_at}"))
    with pytest.raises(Stopped):
        make_corpus(order, Recorder(stop_at))
    left = set(corpus_bytes(order.out))
    (order.out / "corpus" / "answers-00003.jsonl.tmp").write_text('{"id": "half a l')

    again = Recorder()
    make_corpus(order, again)

    (order.out / "corpus" / "answers-00003.jsonl.tmp").unlink(missing_ok=True)
    assert corpus_bytes(order.out) == corpus_bytes(made.out)
    assert left < set(corpus_bytes(order.out)), "the stop came before the end"
    assert ("user turns 0/14" in again.begun) == (stop_at == 1)


def test_states_without_their_answers_are_made_again(made: CorpusOrder) -> None:
    order = replace(made, out=made.out.with_name("torn"))
    make_corpus(order, Recorder())
    (order.out / "corpus" / "answers-00002.jsonl").unlink()

    make_corpus(order, Recorder())

    assert corpus_bytes(order.out) == corpus_bytes(made.out)


def test_a_budget_closes_with_whole_shards_and_a_larger_one_goes_on(made: CorpusOrder) -> None:
    order = replace(made, out=made.out.with_name("budget"), tokens=150)
    make_corpus(order, Recorder())
    small = Corpus(order.out / "corpus")
    first = [ref.id for ref in small.sequences("train")]

    make_corpus(replace(order, tokens=0), Recorder())

    assert 150 <= small.num_tokens < Corpus(made.out / "corpus").num_tokens
    assert corpus_bytes(order.out) == corpus_bytes(made.out)
    whole = [ref.id for ref in Corpus(order.out / "corpus").sequences("train")]
    assert whole[: len(first)] == first


def test_a_corpus_in_the_making_reads_as_far_as_it_is_whole(made: CorpusOrder) -> None:
    order = replace(made, out=made.out.with_name("growing"))
    with pytest.raises(Stopped):
        make_corpus(order, Recorder(stop_at=3))

    growing = Corpus(order.out / "corpus")

    assert {ref.shard for ref in growing.sequences("train")} == {0, 1}
    with pytest.raises(InvalidArgument, match="not finished"):
        growing.draft_vocab()


def test_other_settings_do_not_go_on_with_a_corpus(made: CorpusOrder) -> None:
    with pytest.raises(InvalidArgument, match="has seed 3, expected 4"):
        make_corpus(replace(made, seed=4), Recorder())


def test_a_folder_without_a_corpus_says_so(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="holds no corpus"):
        Corpus(tmp_path)


def test_splits_hang_on_seed_and_name_alone(made: CorpusOrder) -> None:
    more = replace(made, out=made.out.with_name("more"), synth=made.synth + 5)
    make_corpus(more, Recorder())

    def splits(order: CorpusOrder) -> dict[str, str]:
        rows = read_lines(order.out / "corpus" / "prompts.jsonl")
        return {row["id"]: row["split"] for row in rows}

    assert splits(made).items() <= splits(more).items()
    assert set(splits(more).values()) == {"train", "held"}


def test_conversations_of_several_turns_hold_the_targets_answers_between(
    made: CorpusOrder,
) -> None:
    rows = read_lines(made.out / "corpus" / "prompts.jsonl")
    roles = Counter(tuple(message["role"] for message in row["messages"]) for row in rows)

    assert roles == {("user",): 13, ("user", "assistant", "user"): 1}
    closed = [row for row in rows if row["messages"][-1]["content"].endswith("it say?")]
    assert closed and all(row["source"] == "synth" for row in closed)


def test_a_draft_vocabulary_is_the_most_frequent_ids_and_the_specials() -> None:
    ids, coverage = draft_vocabulary(Counter({5: 6, 1: 3, 9: 1, 7: 1}), 12, [11], 3)

    assert ids == [1, 5, 11]
    assert coverage == 9 / 11


def test_a_draft_vocabulary_is_filled_up_with_unseen_ids() -> None:
    assert draft_vocabulary(Counter({5: 6}), 8, [7], 4) == ([0, 1, 5, 7], 1.0)
    assert draft_vocabulary(Counter(), 2, [], 4) == ([0, 1], 0.0)


def test_the_draft_vocabulary_counts_training_answers_only(
    made: CorpusOrder, corpus: Corpus
) -> None:
    seen = Counter(
        token
        for ref in corpus.sequences("train")
        for token in corpus.tokens(ref)[ref.prompt_len :].tolist()
    )
    ids = corpus.draft_vocab().tolist()
    told = json.loads((made.out / "corpus" / "draft_vocab.json").read_text())

    assert len(ids) == 64 and ids == sorted(set(ids))
    assert {token for token, _ in seen.most_common(20)} <= set(ids)
    assert told["coverage"] == pytest.approx(
        sum(seen[token] for token in ids) / seen.total(), abs=1e-5
    )


def test_captured_layers_are_those_that_the_drafters_read() -> None:
    assert default_layers(30) == (2, 8, 15, 22, 27, 30)
    assert default_layers(6) == (1, 2, 3, 4, 6)


def test_prompts_that_fill_the_context_are_left_out(tmp_path: Path) -> None:
    order = corpus_order(tmp_path, "long", synth=0)
    rows = [{"prompt": "a" * 600}, {"prompt": "short"}]
    order.prompts[0].write_text("".join(json.dumps(row) + "\n" for row in rows))

    make_corpus(replace(order, max_prompt_tokens=4096), Recorder())

    refs = [ref for s in SPLITS for ref in Corpus(order.out / "corpus").sequences(s)]
    assert [ref.id for ref in refs] == ["rows-00001"]
