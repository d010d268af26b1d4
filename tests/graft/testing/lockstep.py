"""Drafting without services: sessions whose target has written its text beforehand.

A round proposes for all sessions at once, accepts what equals the written text, and commits it to
the mirrors, with the target's hidden states where the proposer asks for them. Knows mirrors,
trees and features; opens no socket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from graft.common.prefix import Prefix
from graft.common.sampling import Sampling
from graft.common.tier import Tier
from graft.common.tree import FloatArray, Tree, TreeLimits, check
from graft.draft.features import FeatureNeed, FeatureStore
from graft.draft.mirror import Mirror
from graft.draft.proposers.base import Proposer, Seat
from graft.kernels.ops import StepRows
from graft.models.decoder import Capture
from graft.testing.plain import GREEDY, Plain


def states_of(plain: Plain, tokens: Sequence[int], need: FeatureNeed) -> FloatArray:
    """[tokens, layers * hidden]: what the target's layers hold at every position."""
    count = len(tokens)
    places = torch.arange(count, dtype=torch.int32)
    rows = StepRows(
        positions=places,
        write_slots=places.clone(),
        sequence=torch.zeros_like(places),
        page_table=torch.zeros(1, 1, dtype=torch.int32),
        prefix_len=places + 1,
        extra_ptr=torch.zeros(count + 1, dtype=torch.int32),
        extra_slots=torch.zeros(0, dtype=torch.int32),
    )
    run = torch.tensor(list(tokens), dtype=torch.int32)
    capture = Capture(need.layers, torch.arange(count), need.final_norm)
    with torch.inference_mode():
        _, states = plain.target.decoder.forward_capturing(
            run, rows, plain.new_kv(1024, 1024), None, capture
        )
    return np.array(states.flatten(1).numpy(), np.float32)


@dataclass(slots=True, eq=False)
class Script:
    """One session: its prompt, all that the target will say, and the states at every position.

    fused: the states have passed the drafter's projection.
    """

    prompt: list[int]
    answer: list[int]
    sampling: Sampling = GREEDY
    states: FloatArray | None = None
    fused: bool = False

    @classmethod
    def written(
        cls,
        plain: Plain,
        prompt: Sequence[int],
        count: int,
        sampling: Sampling = GREEDY,
        need: FeatureNeed | None = None,
    ) -> Script:
        """Lets the target write `count` tokens."""
        answer = plain.text(list(prompt), count, sampling)
        states = None if need is None else states_of(plain, [*prompt, *answer], need)
        return cls(list(prompt), answer, sampling, states)

    def mirror(self, length: int, vocab_size: int, start: int = 0) -> Mirror:
        """The session when `length` tokens are committed; features from `start` on."""
        tokens = [*self.prompt, *self.answer][:length]
        made = Mirror(
            session_id=1,
            prefix=Prefix(tokens),
            prompt_length=len(self.prompt),
            sampling=self.sampling,
            limits=TreeLimits(64, 32, vocab_size),
            room=10_000,
        )
        if self.states is not None:
            made.features = FeatureStore(self.states.shape[1], start, self.fused)
            made.features.append(self.states[start : length - 1])
        return made

    def commit(self, mirror: Mirror, tokens: Sequence[int]) -> None:
        """Commits, and hands over the states of what the target has run meanwhile."""
        length = len(mirror.prefix)
        after = length + len(tokens)
        mirror.commit(tokens, after, mirror.prefix.digest_after(tokens))
        if self.states is not None and mirror.features is not None:
            mirror.features.append(self.states[length - 1 : after - 1])


def accepted(tree: Tree | None, following: Sequence[int]) -> int:
    """Drafted tokens on the path that the text takes."""
    node = count = 0
    while tree is not None and count < len(following):
        match = [one for one in tree.children(node) if tree.tokens[one] == following[count]]
        if not match:
            break
        node, count = match[0], count + 1
    return count


@dataclass(slots=True, eq=False)
class Lockstep:
    """Sessions of one proposer, each at its own place in its own text."""

    proposer: Proposer
    scripts: list[Script]
    tier: Tier
    vocab_size: int
    seats: list[Seat] = field(default_factory=list)

    def __post_init__(self) -> None:
        for script in self.scripts:
            mirror = script.mirror(len(script.prompt) + 1, self.vocab_size)
            self.seats.append(Seat(mirror, self.tier, self.proposer.open(mirror)))

    def left(self, place: int) -> list[int]:
        """What the session's target has still to say."""
        said = len(self.seats[place].mirror.prefix) - len(self.scripts[place].prompt)
        return self.scripts[place].answer[said:]

    def round(self, places: Sequence[int] | None = None) -> list[int]:
        """One round of these sessions (all by default); accepted drafted tokens of each."""
        going = [one for one in (places or range(len(self.seats))) if len(self.left(one)) > 1]
        trees = self.proposer.propose([self.seats[one] for one in going])
        counts = []
        for place, tree in zip(going, trees, strict=True):
            assert tree is None or isinstance(tree, Tree)
            if tree is not None:
                check(tree, self.seats[place].mirror.limits)
            counts.append(accepted(tree, self.left(place)[:-1]))
            self.commit(place, counts[-1] + 1)
        return counts

    def commit(self, place: int, count: int) -> None:
        """Commits the next `count` tokens of a session, drafted or not."""
        tokens = self.left(place)[:count]
        self.scripts[place].commit(self.seats[place].mirror, tokens)
        self.proposer.commit(self.seats[place], tokens)
