"""Where a session ends: cuts a block of committed tokens. Knows no session and no text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graft.common.sampling import StopRule
from graft.v1.verify_pb2 import FinishReason


@dataclass(frozen=True, slots=True)
class Cut:
    """The tokens of a block that stay, and why the session ends with the last of them, if it does.

    `reason` is unspecified while the session goes on; `stop_token` belongs to EOS and STOP_ID.
    """

    tokens: tuple[int, ...]
    reason: FinishReason.ValueType = FinishReason.FINISH_REASON_UNSPECIFIED
    stop_token: int = 0

    @property
    def ends(self) -> bool:
        """True when the session is over."""
        return self.reason != FinishReason.FINISH_REASON_UNSPECIFIED


@dataclass(frozen=True, slots=True)
class Ending:
    """The rule of one session: stop rule, the model's own ends, and the room the context leaves.

    max_generated is the smaller of the budget and the room.
    """

    eos_token_ids: frozenset[int]
    stop_token_ids: frozenset[int]
    min_tokens: int
    max_generated: int

    @classmethod
    def of(cls, stop: StopRule, eos_token_ids: frozenset[int], room: int) -> Ending:
        """The ending of a session whose context leaves `room` tokens after the prompt."""
        return cls(
            eos_token_ids=frozenset() if stop.ignore_eos else eos_token_ids,
            stop_token_ids=stop.stop_token_ids,
            min_tokens=stop.min_tokens,
            max_generated=min(stop.max_tokens, room),
        )

    @property
    def masked(self) -> frozenset[int]:
        """Ids that may not be chosen before min_tokens tokens."""
        return self.eos_token_ids | self.stop_token_ids

    def cut(self, tokens: Sequence[int], generated: int) -> Cut:
        """The part of `tokens` that stays after `generated` earlier ones; the earliest end wins.

        An end-of-sequence or stop id at the last place of the budget ends as such, not as LENGTH.
        """
        for index, token in enumerate(tokens):
            kept = tuple(tokens[: index + 1])
            if token in self.eos_token_ids:
                return Cut(kept, FinishReason.FINISH_REASON_EOS, token)
            if token in self.stop_token_ids:
                return Cut(kept, FinishReason.FINISH_REASON_STOP_ID, token)
            if generated + index + 1 >= self.max_generated:
                return Cut(kept, FinishReason.FINISH_REASON_LENGTH)
        return Cut(tuple(tokens))
