"""A request on its way through the gateway: the job, and the events of its answer. Only values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from graft.common.tier import OFF, Tier
from graft.gateway.choice import Plan
from graft.gateway.record import SpeculationRecord
from graft.gateway.rounds import SeenRound
from graft.gateway.speech.reader import PLAIN, Speech
from graft.gateway.text import Emitted, Logprob, Piece, StopStrings

Reason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class ChoicePlan:
    """One choice of a request: `plan` has its own seed already.

    marks: special tokens that stay in the text, since the answer is read by them.
    """

    plan: Plan
    stops: StopStrings
    skip_specials: bool = True
    discard: bool = False
    marks: frozenset[int] = frozenset()

    def hides(self, token: int) -> bool:
        """True when a special token is to be left out of the text."""
        return self.skip_specials and token not in self.marks


@dataclass(frozen=True, slots=True)
class Job:
    """A request, checked and tokenized: its choices in the order of their index.

    `prompt_sizes` counts every prompt once, however many choices it has. `tier_label` is a word
    for metrics, drawn from a small set.
    """

    request_id: str
    choices: tuple[ChoicePlan, ...]
    prompt_sizes: tuple[int, ...]
    num_per_prompt: int = 1
    tier: Tier = OFF
    tier_label: str = "off"
    inactive_reason: str = ""
    speech: Speech = PLAIN

    def spoken(self, speech: Speech, marks: frozenset[int]) -> Job:
        """The same job, whose answers are read that way, by those special tokens."""
        choices = tuple(replace(choice, marks=marks) for choice in self.choices)
        return replace(self, choices=choices, speech=speech)


@dataclass(frozen=True, slots=True)
class PromptLogprob:
    """Log-probability of a prompt token; the first one has none."""

    token: int
    logprob: Logprob | None


@dataclass(frozen=True, slots=True)
class Started:
    """A choice's session is open."""

    index: int


@dataclass(frozen=True, slots=True)
class Delta:
    """Text and tokens of a choice that may leave now; rounds only for those who asked."""

    index: int
    piece: Piece
    prompt: tuple[PromptLogprob, ...] = ()
    rounds: tuple[SeenRound, ...] = ()

    def __add__(self, other: Delta) -> Delta:
        return Delta(
            self.index,
            self.piece + other.piece,
            self.prompt + other.prompt,
            self.rounds + other.rounds,
        )


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of a choice. `stop` is the stop string or id that was met, if it was one."""

    index: int
    reason: Reason
    stop: str | int | None


ChoiceEvent = Started | Delta | Finished


@dataclass(slots=True)
class Collected:
    """One choice of an answer that is not streamed."""

    text: str = ""
    tokens: list[Emitted] = field(default_factory=list)
    prompt: Sequence[PromptLogprob] = ()
    rounds: list[SeenRound] = field(default_factory=list)
    reason: Reason = "length"
    stop: str | int | None = None

    def take(self, event: ChoiceEvent) -> None:
        """Adds an event of this choice, in place."""
        match event:
            case Started():
                pass
            case Delta(_, piece, prompt, rounds):
                self.text += piece.text
                self.rounds += rounds
                self.tokens += piece.tokens
                self.prompt = self.prompt or prompt
            case Finished(_, reason, stop):
                self.reason, self.stop = reason, stop


@dataclass(slots=True)
class Tally:
    """What a request has cost so far; exact at every event.

    num_predicted: tokens that the client expected, over all choices; those that came are accepted.
    """

    num_prompt: int = 0
    num_cached: int = 0
    num_completion: int = 0
    num_reasoning: int = 0
    num_predicted: int = 0
    num_predicted_accepted: int = 0
    record: SpeculationRecord = field(default_factory=SpeculationRecord)
