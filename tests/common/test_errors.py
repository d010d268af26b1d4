"""One table of errors: complete, and the same on both surfaces."""

from __future__ import annotations

from graft.common.errors import TABLE, GraftError, error_class, reason_name
from graft.v1.error_reason_pb2 import ErrorReason


def test_every_reason_has_a_row_and_a_class() -> None:
    reasons = set(ErrorReason.values()) - {ErrorReason.ERROR_REASON_UNSPECIFIED}
    assert set(TABLE) == reasons
    for reason in reasons:
        assert error_class(reason).reason == reason


def test_a_refined_class_does_not_stand_for_its_reason() -> None:
    class Refined(GraftError):
        """A part's own kind of internal error; its reason is inherited."""

    assert Refined.reason == GraftError.reason
    assert error_class(GraftError.reason) is GraftError


def test_only_what_a_retry_can_mend_is_retriable() -> None:
    for mapping in TABLE.values():
        assert mapping.retriable == (mapping.http in (503, 504))


def test_reasons_have_short_names() -> None:
    assert reason_name(ErrorReason.ERROR_REASON_BAD_TICKET) == "bad_ticket"
    assert reason_name(GraftError("x").reason) == "internal"
