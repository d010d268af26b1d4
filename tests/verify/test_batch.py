"""The arrays of one step, small enough to check by eye."""

from __future__ import annotations

import torch

from graft.common.tree import from_parents
from graft.testing.shadow import new_scheduler, new_session
from graft.v1.verify_pb2 import PlainReason
from graft.verify.batch import build_batch
from graft.verify.pages import PageTable
from graft.verify.session import Session, Turn
from graft.verify.step import Chunk, Round, Step

CPU = torch.device("cpu")
TURN = Turn(None, PlainReason.PLAIN_REASON_OFF, 0.0)


def placed(session_id: int, tokens: list[int], kv_length: int, pages: list[int]) -> Session:
    """A session with hand-given pages of four tokens."""
    session = new_session(session_id, tokens)
    session.table = PageTable(new_scheduler(page_tokens=4).places.pool, "")
    session.table.pages = pages
    session.kv_length = kv_length
    return session


def test_a_chunk_and_a_tree_side_by_side() -> None:
    filling = placed(1, [10, 11, 12, 13, 14, 15], 3, [7, 2])
    decoding = placed(2, [20, 21, 22, 23, 24], 4, [5, 0, 9])
    tree = from_parents([24, 1, 2, 3], [-1, 0, 1, 0])
    batch = build_batch(Step((Chunk(filling, 3, 5), Round(decoding, tree, TURN))), CPU)
    assert batch.tokens.tolist() == [13, 14, 24, 1, 2, 3]
    rows = batch.rows
    assert rows.positions.tolist() == [3, 4, 4, 5, 6, 5]
    assert rows.write_slots.tolist() == [31, 8, 0, 1, 2, 3]
    assert rows.sequence.tolist() == [0, 0, 1, 1, 1, 1]
    assert rows.page_table.tolist() == [[7, 2, -1], [5, 0, 9]]
    assert rows.prefix_len.tolist() == [4, 5, 4, 4, 4, 4]
    assert rows.extra_ptr.tolist() == [0, 0, 0, 1, 3, 6, 8]
    assert rows.extra_slots.tolist() == [0, 0, 1, 0, 1, 2, 0, 3]
    assert batch.output_rows.tolist() == [2, 3, 4, 5]
    (choice,) = batch.choices
    assert (choice.work, choice.rows, choice.law.prefix_length) == (1, slice(0, 4), 5)
    assert choice.write_slots.tolist() == [0, 1, 2, 3]


def test_a_root_alone_is_a_plain_row() -> None:
    session = placed(1, [20, 21, 22, 23, 24], 4, [5, 0])
    batch = build_batch(Step((Round(session, from_parents([24], [-1]), TURN),)), CPU)
    assert batch.rows.positions.tolist() == [4]
    assert batch.rows.prefix_len.tolist() == [5]
    assert batch.rows.extra_ptr.tolist() == [0, 0]
    assert batch.output_rows.tolist() == [0]


def test_the_last_chunk_ends_in_a_choice_after_its_last_token() -> None:
    session = placed(1, [10, 11, 12, 13, 14, 15], 3, [7, 2])
    batch = build_batch(Step((Chunk(session, 3, 6),)), CPU)
    assert batch.output_rows.tolist() == [2]
    (choice,) = batch.choices
    assert choice.law.tree.tokens.tolist() == [15]
    assert choice.law.prefix_length == 6


def test_rows_that_score_the_prompt_stand_behind_those_of_choices() -> None:
    scored = placed(1, [10, 11, 12, 13], 0, [7])
    scored.prompt_logprobs_due = True
    other = placed(2, [20, 21], 0, [3])
    step = Step((Chunk(scored, 0, 4), Chunk(other, 0, 2)))
    batch = build_batch(step, CPU)
    assert batch.output_rows.tolist() == [3, 5, 0, 1, 2]
    assert batch.num_choice_rows == 2
    (prompt,) = batch.prompt_rows
    assert (prompt.work, prompt.rows) == (0, slice(2, 5))
    assert prompt.tokens.tolist() == [11, 12, 13]


def test_an_unfinished_chunk_wants_no_logits() -> None:
    session = placed(1, [10, 11, 12, 13], 0, [7])
    batch = build_batch(Step((Chunk(session, 0, 2),)), CPU)
    assert batch.output_rows.tolist() == []
    assert batch.choices == ()
