"""How a call fails, and whether asking again is safe."""

from __future__ import annotations

import grpc
import grpc.aio

from graft.common.errors import Draining, GraftError, NoReplica, Overloaded, reason_name
from graft.common.server import error_from_call

_NOT_ADMITTED = (Overloaded, Draining, NoReplica)


class CallFailed(Exception):
    """The gateway refused a request, or could not be reached; `str()` is one sentence.

    code: the gRPC status, such as ``INVALID_ARGUMENT``.
    reason: what is wrong in a word, such as ``context_length_exceeded``; empty when no gateway
        said so, as when nothing answers at the address.
    field: the offending field of the request, where there is one.
    retry_after_s: when asking again may help, where the gateway said so.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str,
        reason: str = "",
        field: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.field = field
        self.retry_after_s = retry_after_s

    @property
    def not_admitted(self) -> bool:
        """True when the gateway had no room, so nothing was written and asking again is safe."""
        return self.reason in _REFUSALS

    @property
    def unreachable(self) -> bool:
        """True when the connection failed; what had been done by then is not known."""
        return not self.reason and self.code == grpc.StatusCode.UNAVAILABLE.name


_REFUSALS = frozenset(reason_name(error.reason) for error in _NOT_ADMITTED)


def call_failed(failure: grpc.aio.AioRpcError) -> CallFailed:
    """What a failed call says, in our words."""
    error: GraftError | None = error_from_call(failure)
    code = failure.code().name
    if error is None:
        return CallFailed(failure.details() or code, code=code)
    return CallFailed(
        str(error),
        code=code,
        reason=reason_name(error.reason),
        field=error.field,
        retry_after_s=error.retry_after_s,
    )
