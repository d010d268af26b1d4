"""Where a block of committed tokens is cut: the earliest end wins."""

from __future__ import annotations

import pytest

from graft.common.sampling import StopRule
from graft.v1.verify_pb2 import FinishReason
from graft.verify.ending import Ending

EOS, STOP = 90, 91
BLOCK = [1, 2, 3, 4, 5, 6]


def ending(max_tokens: int = 100, *, ignore_eos: bool = False, room: int = 1000) -> Ending:
    stop = StopRule(max_tokens, stop_token_ids=frozenset({STOP}), ignore_eos=ignore_eos)
    return Ending.of(stop, frozenset({EOS}), room)


@pytest.mark.parametrize("index", range(6))
@pytest.mark.parametrize(
    ("token", "reason"),
    [(EOS, FinishReason.FINISH_REASON_EOS), (STOP, FinishReason.FINISH_REASON_STOP_ID)],
)
def test_an_end_token_cuts_at_every_index(
    index: int, token: int, reason: FinishReason.ValueType
) -> None:
    block = [*BLOCK]
    block[index] = token
    cut = ending().cut(block, 0)
    assert cut.tokens == tuple(block[: index + 1])
    assert (cut.reason, cut.stop_token) == (reason, token)


@pytest.mark.parametrize("budget", range(1, 7))
def test_the_budget_cuts_at_every_index(budget: int) -> None:
    cut = ending(max_tokens=budget + 10).cut(BLOCK, 10)
    assert cut.tokens == tuple(BLOCK[:budget])
    assert cut.reason == FinishReason.FINISH_REASON_LENGTH


def test_a_stop_inside_the_budget_wins_over_it() -> None:
    cut = ending(max_tokens=5).cut([1, 2, STOP, 4, 5, 6], 0)
    assert cut.tokens == (1, 2, STOP)
    assert cut.reason == FinishReason.FINISH_REASON_STOP_ID


def test_the_budget_wins_over_a_stop_behind_it() -> None:
    cut = ending(max_tokens=5).cut([1, 2, 3, 4, 5, STOP], 0)
    assert cut.tokens == (1, 2, 3, 4, 5)
    assert cut.reason == FinishReason.FINISH_REASON_LENGTH


def test_a_stop_on_the_last_token_of_the_budget_is_a_stop() -> None:
    cut = ending(max_tokens=3).cut([1, 2, EOS], 0)
    assert cut.reason == FinishReason.FINISH_REASON_EOS


def test_the_context_ends_a_session_like_its_budget() -> None:
    cut = ending(max_tokens=100, room=4).cut(BLOCK, 0)
    assert cut.tokens == (1, 2, 3, 4)
    assert cut.reason == FinishReason.FINISH_REASON_LENGTH


def test_eos_is_an_ordinary_token_when_ignored() -> None:
    cut = ending(ignore_eos=True).cut([1, EOS, 3], 0)
    assert cut.tokens == (1, EOS, 3)
    assert not cut.ends


def test_a_stop_id_still_ends_when_eos_is_ignored() -> None:
    assert ending(ignore_eos=True).cut([1, STOP, 3], 0).tokens == (1, STOP)
