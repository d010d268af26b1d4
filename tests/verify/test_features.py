"""Windows of rows by position, and what each stream of a session is owed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graft.common.errors import Mismatch
from graft.common.features import FeatureSpec
from graft.v1.features_pb2 import FeatureCodec
from graft.verify.features import Feed, Window
from graft.verify.offer import Announced, FeatureOffer, ProjectionShape

SPEC = FeatureSpec((1, 2))
OTHER = FeatureSpec((3,), codec=FeatureCodec.FEATURE_CODEC_INT8)


def rows(start: int, stop: int) -> bytes:
    """Two bytes a row that say its position."""
    return b"".join(position.to_bytes(2, "little") for position in range(start, stop))


def feed(capacity: int = 100, *specs: FeatureSpec) -> Feed:
    """A feed of two-byte rows."""
    made = Feed(2 * capacity, lambda _: 2)
    made.keep(specs or (SPEC,))
    return made


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(0, 12)), max_size=12), st.integers(0, 30))
def test_a_window_holds_what_came_each_position_once(
    spans: list[tuple[int, int]], before: int
) -> None:
    window, held = Window(2), set[int]()
    for start, count in spans:
        window.add(start, rows(start, start + count))
        held |= set(range(start, start + count))
        assert window.num_bytes == 2 * len(held)
    window.trim(before)
    held = {position for position in held if position >= before}
    assert window.num_bytes == 2 * len(held)
    assert window.stop == max(held, default=-1) + 1
    for position in range(60):
        end = next(p for p in range(position, 99) if p not in held)
        assert window.end_of(position) == end
        assert window.take(position, end) == rows(position, end)
        following = [p for p in held if p >= position]
        assert window.next_from(position, 77) == min(following, default=77)


def test_a_stream_is_sent_every_row_once_and_in_order() -> None:
    one = feed()
    one.join(1, SPEC, 0)
    one.add(SPEC, 0, rows(0, 5))
    assert one.take(1, 4) == (0, 2, rows(0, 2))
    assert one.take(1, 1000) == (2, 3, rows(2, 5))
    assert one.take(1, 1000) == (5, 0, b"")
    one.add(SPEC, 5, rows(5, 6))
    assert one.take(1, 1) == (5, 1, rows(5, 6))
    assert one.take(2, 1000) == (0, 0, b"")


def test_rows_beyond_a_gap_wait_until_it_is_filled() -> None:
    one = feed()
    one.join(1, SPEC, 0)
    one.add(SPEC, 10, rows(10, 12))
    assert one.take(1, 1000) == (0, 0, b"")
    assert one.gap(12) == range(0, 10)
    one.add(SPEC, 0, rows(0, 6))
    assert one.take(1, 1000) == (0, 6, rows(0, 6))
    one.add(SPEC, 12, rows(12, 14))
    assert one.gap(14) == range(6, 10)
    one.add(SPEC, 6, rows(6, 10))
    assert one.take(1, 1000) == (6, 8, rows(6, 14))
    assert not one.gap(14)


def test_a_late_stream_gives_up_what_the_window_could_not_hold() -> None:
    one = feed(8)
    one.add(SPEC, 0, rows(0, 30))
    one.trim(30)
    assert one.num_bytes == 16
    one.join(1, SPEC, 0)
    assert not one.gap(30)
    assert one.take(1, 1000) == (22, 8, rows(22, 30))


def test_a_stream_that_is_first_has_the_window_filled_for_it() -> None:
    one = feed(8)
    one.join(1, SPEC, 0)
    assert one.gap(30) == range(22, 30)
    one.add(SPEC, 22, rows(22, 30))
    assert one.take(1, 1000) == (22, 8, rows(22, 30))


def test_a_late_stream_of_a_replica_without_windows_gets_what_comes() -> None:
    one = feed(0)
    one.join(1, SPEC, 0)
    assert not one.gap(30)
    one.add(SPEC, 30, rows(30, 32))
    assert one.take(1, 1000) == (30, 2, rows(30, 32))


def test_a_stream_that_has_heard_rows_is_never_made_to_skip_one() -> None:
    one = feed(4)
    one.join(1, SPEC, 0)
    one.add(SPEC, 0, rows(0, 2))
    one.take(1, 1000)
    one.forget()
    assert one.gap(20) == range(2, 20)


def test_capturing_starts_where_somebody_listens_or_the_window_begins() -> None:
    one = feed(10)
    assert one.floor(SPEC, 25) == 15
    assert one.floor(SPEC, 5) == 0
    one.join(1, SPEC, 3)
    assert one.floor(SPEC, 25) == 3


def test_windows_share_the_sessions_room_and_go_when_nobody_wants_them() -> None:
    one = feed(10, SPEC, OTHER)
    assert one.capacity(SPEC) == 5
    one.join(1, OTHER, 0)
    one.keep(())
    assert one.specs == (OTHER,)
    assert one.capacity(OTHER) == 10
    one.leave(1)
    one.keep(())
    assert not one.specs


def test_an_offer_says_what_it_lacks() -> None:
    offer = FeatureOffer(8, 4, 1 << 20, {"ab": ProjectionShape((1, 2), True, 5)})
    offer.check(FeatureSpec((0, 4)))
    offer.check(FeatureSpec((1, 2), fused_id="ab"))
    with pytest.raises(Mismatch, match="hidden state 5 was asked for, the target has 0 to 4"):
        offer.check(FeatureSpec((1, 5)))
    with pytest.raises(Mismatch, match="projection cd was asked for, here is ab"):
        offer.check(FeatureSpec((1,), fused_id="cd"))
    with pytest.raises(Mismatch, match="takes states"):
        offer.check(FeatureSpec((2, 1), fused_id="ab"))
    assert offer.row_bytes(FeatureSpec((1, 2))) == 32
    assert offer.row_bytes(FeatureSpec((1, 2), fused_id="ab")) == 10


def test_announcements_last_as_long_as_their_streams_and_hold_the_possible_only() -> None:
    announced = Announced(FeatureOffer(8, 4, 1 << 20))
    announced.hello(1, (SPEC, FeatureSpec((9,))))
    announced.hello(2, (SPEC, OTHER))
    assert announced.specs == (SPEC, OTHER)
    announced.gone(2)
    assert list(announced.specs) == [SPEC]
    announced.gone(1)
    assert not list(announced.specs)
