"""The errors of Graft, and the one table that maps them to wire codes. Knows no transport."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from graft.v1.error_reason_pb2 import ErrorReason

DOMAIN = "graft"


class Code(Enum):
    """A gRPC status code by its number and name, without importing grpc."""

    CANCELLED = 1
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    UNAUTHENTICATED = 16


class GraftError(Exception):
    """A failure with a machine-readable reason; `str()` is one sentence for people.

    `field` names the offending field of a request, where there is one. `retry_after_s` is
    set when trying again later may help.
    """

    reason: ErrorReason.ValueType = ErrorReason.ERROR_REASON_INTERNAL

    def __init__(
        self, message: str, *, field: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.field = field
        self.retry_after_s = retry_after_s


class InvalidArgument(GraftError):
    """A field has a value it may not have."""

    reason = ErrorReason.ERROR_REASON_INVALID_ARGUMENT


class ContextLengthExceeded(GraftError):
    """Prompt and budget do not fit the context."""

    reason = ErrorReason.ERROR_REASON_CONTEXT_LENGTH_EXCEEDED


class ModelNotFound(GraftError):
    """No such model is served, or no such model file exists."""

    reason = ErrorReason.ERROR_REASON_MODEL_NOT_FOUND


class SessionNotFound(GraftError):
    """No such session is open here."""

    reason = ErrorReason.ERROR_REASON_SESSION_NOT_FOUND


class BadTicket(GraftError):
    """The ticket does not open the session."""

    reason = ErrorReason.ERROR_REASON_BAD_TICKET


class Overloaded(GraftError):
    """The queue is full."""

    reason = ErrorReason.ERROR_REASON_OVERLOADED


class Draining(GraftError):
    """The server is shutting down."""

    reason = ErrorReason.ERROR_REASON_DRAINING


class Mismatch(GraftError):
    """Two services do not fit each other; the message says what differs."""

    reason = ErrorReason.ERROR_REASON_MISMATCH


class UnknownProposer(GraftError):
    """The draft service has no such proposer."""

    reason = ErrorReason.ERROR_REASON_UNKNOWN_PROPOSER


class NoReplica(GraftError):
    """No replica can take the work now."""

    reason = ErrorReason.ERROR_REASON_NO_REPLICA


class NumericFailure(GraftError):
    """The target produced NaN logits."""

    reason = ErrorReason.ERROR_REASON_NUMERIC


class ProtocolBroken(GraftError):
    """A peer broke the order of a stream."""

    reason = ErrorReason.ERROR_REASON_PROTOCOL


class Unsupported(GraftError):
    """The feature is known and not offered here."""

    reason = ErrorReason.ERROR_REASON_UNSUPPORTED


class Stalled(GraftError):
    """A session made no progress in time."""

    reason = ErrorReason.ERROR_REASON_STALLED


class Unauthenticated(GraftError):
    """The key is missing or wrong."""

    reason = ErrorReason.ERROR_REASON_UNAUTHENTICATED


@dataclass(frozen=True, slots=True)
class Mapping:
    """How one reason looks on the two surfaces, and whether trying again can mend it."""

    code: Code
    http: int
    kind: str
    retriable: bool


TABLE: dict[ErrorReason.ValueType, Mapping] = {
    InvalidArgument.reason: Mapping(Code.INVALID_ARGUMENT, 400, "invalid_request_error", False),
    ContextLengthExceeded.reason: Mapping(
        Code.INVALID_ARGUMENT, 400, "invalid_request_error", False
    ),
    ModelNotFound.reason: Mapping(Code.NOT_FOUND, 404, "invalid_request_error", False),
    SessionNotFound.reason: Mapping(Code.NOT_FOUND, 404, "invalid_request_error", False),
    BadTicket.reason: Mapping(Code.PERMISSION_DENIED, 403, "permission_error", False),
    Overloaded.reason: Mapping(Code.RESOURCE_EXHAUSTED, 503, "overloaded_error", True),
    Draining.reason: Mapping(Code.UNAVAILABLE, 503, "server_error", True),
    Mismatch.reason: Mapping(Code.FAILED_PRECONDITION, 500, "server_error", False),
    UnknownProposer.reason: Mapping(Code.INVALID_ARGUMENT, 400, "invalid_request_error", False),
    NoReplica.reason: Mapping(Code.UNAVAILABLE, 503, "server_error", True),
    NumericFailure.reason: Mapping(Code.INTERNAL, 500, "server_error", False),
    ProtocolBroken.reason: Mapping(Code.INVALID_ARGUMENT, 400, "invalid_request_error", False),
    Unsupported.reason: Mapping(Code.UNIMPLEMENTED, 400, "invalid_request_error", False),
    Stalled.reason: Mapping(Code.DEADLINE_EXCEEDED, 504, "server_error", True),
    Unauthenticated.reason: Mapping(Code.UNAUTHENTICATED, 401, "invalid_request_error", False),
    GraftError.reason: Mapping(Code.INTERNAL, 500, "server_error", False),
}


def mapping_of(error: GraftError) -> Mapping:
    """The row of `TABLE` for an error."""
    return TABLE[error.reason]


def error_class(reason: ErrorReason.ValueType) -> type[GraftError]:
    """The class that carries `reason`; GraftError itself when the reason is unknown here."""
    for cls in GraftError.__subclasses__():
        # Parts may refine a class; only the plain ones of this module stand for their reason.
        if cls.__module__ == __name__ and cls.reason == reason:
            return cls
    return GraftError


def reason_name(reason: ErrorReason.ValueType) -> str:
    """The short lower-case name of a reason, for example ``context_length_exceeded``."""
    return ErrorReason.Name(reason).removeprefix("ERROR_REASON_").lower()
