"""Drafts with a network: catches up with what was committed, then grows a tree for every session.

Every forward carries all sessions of the batch. Catch-up is not tied to commits: whatever the
lane lacks of the prefix is run before the next tree, be it one round's tokens, those of rounds
that were missed, or the whole prompt of a session just joined.

Knows lanes, features and trees; what is computed is behind `DraftNet`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from graft.common import log
from graft.common.tier import Tier
from graft.common.tree import FloatArray, Tree
from graft.draft.bush import Plot, grow_bush
from graft.draft.expand import Growth, Shape, Stem
from graft.draft.foresee import widened
from graft.draft.kv import DraftKv, Lane, OutOfPages
from graft.draft.law import Noise
from graft.draft.levels import grow_levels
from graft.draft.mirror import Mirror
from graft.draft.nets.base import DraftNet
from graft.draft.proposers.base import ProposerInfo, Sampled, Seat
from graft.draft.ran import Ran
from graft.draft.rows import prefix_part, step_rows
from graft.kernels.ops import Ops

_log = log.get("model")


@dataclass(frozen=True, slots=True)
class ModelOptions:
    """How a model proposer runs.

    tier: default depth, width and nodes.
    kv_tokens: tokens of all sessions whose keys and values may be held.
    chunk_rows: most rows of a catch-up forward. A lane that lacks more than that is behind: it
        catches up a chunk at a time while rounds go on, so that a long prompt holds nobody up.
    window_rows: rows of features that are kept behind a lane, for a state that is opened anew.
    detail: a sentence for people. tokenizer_digest: that of the drafter's tokenizer.
    """

    tier: Tier
    kv_tokens: int = 65536
    chunk_rows: int = 256
    window_rows: int = 1024
    detail: str = ""
    tokenizer_digest: str = ""


@dataclass(slots=True, eq=False)
class ModelState:
    """What a session keeps between trees.

    hidden: [hidden], what `forward` gave for the last committed slot; None before it was run.
    ran: what passed through the network for its last tree; None when none was grown since the last
        catch-up.
    ahead: the prefix is not committed, only likely to be.
    """

    lane: Lane
    noise: Noise
    hidden: Tensor | None = None
    ran: Ran | None = None
    ahead: bool = False


class ModelProposer:
    """One draft network at the service of many sessions."""

    def __init__(self, name: str, net: DraftNet, ops: Ops, options: ModelOptions) -> None:
        self.name = name
        self.net = net
        self.ops = ops
        self.options = options
        self.kv = DraftKv(net.kv_shape, options.kv_tokens)

    def describe(self) -> ProposerInfo:
        """The default tier, and what the network was built for."""
        return ProposerInfo(
            self.options.tier,
            detail=self.options.detail,
            vocab_size=self.net.vocab_size,
            tokenizer_digest=self.options.tokenizer_digest,
            needs=self.net.needs,
        )

    def open(self, mirror: Mirror) -> object:
        """An empty lane; the prefix is run with the first tree."""
        noise = Noise(mirror.sampling.seed, self.net.vocab_size, self.net.token_ids)
        start = 0 if mirror.features is None else mirror.features.start
        return ModelState(Lane(base=start, length=start), noise)

    def commit(self, seat: Seat, tokens: Sequence[int]) -> None:
        """Nothing yet: all sessions catch up together in `propose`."""

    def close(self, seat: Seat) -> None:
        """Gives the pages back."""
        self.kv.release(state_of(seat).lane)

    def propose(self, batch: Sequence[Seat]) -> Sequence[Tree | Sampled | None]:
        """One tree a seat; None where the network lacks features, pages or context."""
        with torch.inference_mode():
            return self.trees(batch)

    def trees(self, batch: Sequence[Seat], wide: bool = False) -> list[Tree | Sampled | None]:
        """What `propose` says; wide: with what may follow each node, one level deeper."""
        made = self._rounds(batch, wide)
        left = [place for place in range(len(batch)) if place not in made]
        if left:
            rest = [batch[place] for place in left]
            ready = self.catch_up(rest)
            made |= dict(zip(left, self.grow(rest, ready, wide), strict=True))
        return [made[place] for place in range(len(batch))]

    def _rounds(self, batch: Sequence[Seat], wide: bool) -> dict[int, Tree | Sampled | None]:
        """Trees of the seats that catch up and grow in one call: by place, for networks that do.

        Long gaps, tokens drawn by chance, and whatever lacks something are left to the others.
        """
        recurrent = self.net.recurrent
        if recurrent is None:
            return {}
        room = self.options.chunk_rows
        trees: dict[int, Tree | Sampled | None] = {}
        calls: dict[bool, dict[int, Plot]] = {False: {}, True: {}}
        for place, seat in enumerate(batch):
            self._begin(seat)
            found = self._plot(seat, room, wide)
            if found is not None:
                plot, fused = found
                calls[fused][place] = plot
                room -= len(plot.tokens)
        for fused, plots in calls.items():
            if not plots:
                continue
            grown = grow_bush(recurrent, [*plots.values()], self.kv.cache, fused)
            for (place, plot), (tree, ran, root) in zip(plots.items(), grown, strict=True):
                state = state_of(batch[place])
                state.lane.length += len(plot.tokens)
                state.hidden, state.ran = root, ran
                self._forget_features(batch[place])
                trees[place] = tree
        return trees

    def _plot(self, seat: Seat, room: int, wide: bool) -> tuple[Plot, bool] | None:
        """What the seat lacks and then grows, and whether its features have been fused.

        None for more than `room` rows, and for all that does not fit a single call.
        """
        state, goal = state_of(seat), self.goal(seat)
        length = state.lane.length
        shape = self._shape(seat, goal, wide)
        if (
            shape is None
            or seat.mirror.sampling.needs_draft_probs
            or not length <= goal <= length + room
            or (goal == length and state.hidden is None)
        ):
            return None
        beside = self.beside(seat, length, goal)
        if beside is None:
            return None
        try:
            self.kv.reserve(state.lane, goal + shape.num_run)
        except OutOfPages:
            return None  # without its tree, the lane may have room for what it lacks
        shift = self.net.shift
        tokens = seat.mirror.prefix.tokens[length + shift : goal + shift]
        features, fused = beside
        root = state.hidden if goal == length else None
        return Plot(self._stem(seat), shape, tokens, features, root), fused

    def beside(self, seat: Seat, first: int, stop: int) -> tuple[FloatArray, bool] | None:
        """[stop - first, states]: what stands beside the tokens of slots, and if it is fused.

        None while it is not there.
        """
        store = seat.mirror.features
        if store is None or stop > self._known(seat):
            return None
        return store.rows(first, stop), store.fused

    def behind(self, seat: Seat) -> int:
        """Rows that are lacking of what is known and can be run, where they are over a chunk."""
        lacking = min(self.goal(seat), self._known(seat)) - state_of(seat).lane.length
        return lacking if lacking > self.options.chunk_rows else 0

    def follow(self, seats: Sequence[Seat]) -> None:
        """Runs one chunk of what the lanes lack."""
        with torch.inference_mode():
            if lacking := self._lacking(seats):
                self._run_chunk(seats, lacking)

    def catch_up(self, batch: Sequence[Seat]) -> list[int]:
        """Runs what the lanes lack of their prefixes; the places in `batch` that lack nothing now.

        Prefixes that do not fit and features that are not there leave a lane as it is.
        """
        lacking = self._lacking(batch)
        while lacking:
            self._run_chunk(batch, lacking)
        ready = []
        for place, seat in enumerate(batch):
            state = state_of(seat)
            if state.lane.length == self.goal(seat) and state.hidden is not None:
                ready.append(place)
            self._forget_features(seat)
        return ready

    def _lacking(self, batch: Sequence[Seat]) -> dict[int, int]:
        """By place, how far the lanes that lack something can be run, with pages for it."""
        lacking: dict[int, int] = {}
        for place, seat in enumerate(batch):
            state = state_of(seat)
            self._begin(seat)
            stop = min(self.goal(seat), self._known(seat))
            try:
                self.kv.reserve(state.lane, stop)
            except OutOfPages as error:
                _log.warning("session drafts nothing", proposer=self.name, reason=str(error))
                continue
            if stop > state.lane.length:
                lacking[place] = stop
        return lacking

    def _begin(self, seat: Seat) -> None:
        """Takes over what stays of the last tree and lets go of the rest."""
        state = state_of(seat)
        if state.ahead:
            return
        self.keep(seat)
        self._align(seat)
        state.ran = None
        state.noise.forget(len(seat.mirror.prefix))

    def _forget_features(self, seat: Seat) -> None:
        """Lets go of rows that lie far behind the lane."""
        features, length = seat.mirror.features, state_of(seat).lane.length
        window = self.options.window_rows
        if features is not None and length - features.start > 2 * window:
            features.forget(length - window)

    def goal(self, seat: Seat) -> int:
        """The length of a lane that holds all that is committed."""
        return len(seat.mirror.prefix) - self.net.shift

    def keep(self, seat: Seat) -> None:
        """Takes keys and values of accepted nodes over from the last tree, where they are exact.

        Nodes that ran on the drafter's own states in place of the target's are not.
        """

    def move(self, lane: Lane, num_run: int, followed: Sequence[int]) -> None:
        """Takes run nodes, on one path from the root, over to the end of the lane, in place.

        followed: their numbers among the `num_run` nodes in the lane's scratch, in order.
        """
        scratch = lane.slots(lane.length, lane.length + num_run)
        target = lane.slots(lane.length, lane.length + len(followed))
        places = zip(scratch[list(followed)], target, strict=True)
        moves = [(source, wanted) for source, wanted in places if source != wanted]
        if moves:
            source, wanted = torch.tensor(moves, dtype=torch.int32).unbind(1)
            self.ops.keep(self.kv.cache, source.contiguous(), wanted.contiguous())
        lane.length += len(followed)

    def grow(
        self, batch: Sequence[Seat], ready: Sequence[int], wide: bool = False
    ) -> Sequence[Tree | Sampled | None]:
        """Trees for the places in `ready`, grown side by side."""
        trees: list[Tree | Sampled | None] = [None] * len(batch)
        whole, levels = [], {}
        for (shape, drawn), places in self._groups(batch, ready, wide).items():
            if drawn or self.net.recurrent is None:
                levels[shape, drawn] = places
            else:
                whole += [(place, shape) for place in places]
        if whole and self.net.recurrent is not None:
            plots = [self._grown_from(batch[place], shape) for place, shape in whole]
            grown = grow_bush(self.net.recurrent, plots, self.kv.cache, fused=True)
            for (place, _), one in zip(whole, grown, strict=True):
                trees[place], state_of(batch[place]).ran = one.tree, one.ran
        if levels:
            growths = [
                Growth([self._stem(batch[place]) for place in places], shape, self.net.token_ids)
                for (shape, _), places in levels.items()
            ]
            order = [place for places in levels.values() for place in places]
            grow_levels(self.net, growths, _hidden_of(batch, order), self.kv.cache)
            for growth, places in zip(growths, levels.values(), strict=True):
                for line, (place, tree) in enumerate(zip(places, growth.proposals(), strict=True)):
                    trees[place], state_of(batch[place]).ran = tree, growth.ran(line)
        return trees

    def _groups(
        self, batch: Sequence[Seat], ready: Sequence[int], wide: bool
    ) -> dict[tuple[Shape, bool], list[int]]:
        """Places by the shape of their trees, and whether tokens are drawn by chance.

        A place that cannot have a tree is in none.
        """
        groups: dict[tuple[Shape, bool], list[int]] = {}
        for place in ready:
            lane = state_of(batch[place]).lane
            shape = self._shape(batch[place], self.goal(batch[place]), wide)
            if shape is None:
                continue
            try:
                self.kv.reserve(lane, lane.length + shape.num_run)
            except OutOfPages as error:
                _log.warning("session drafts nothing", proposer=self.name, reason=str(error))
                continue
            drawn = batch[place].mirror.sampling.needs_draft_probs
            groups.setdefault((shape, drawn), []).append(place)
        return groups

    def _shape(self, seat: Seat, length: int, wide: bool) -> Shape | None:
        """What the tree behind a lane of `length` may be; None where it cannot have one."""
        ids = self.net.token_ids
        drawn = seat.mirror.sampling.needs_draft_probs
        topk = children = 1 if drawn else seat.tier.topk
        tier = widened(seat.tier) if wide else seat.tier
        if wide:
            children = tier.topk
        room = self.net.context_length - length + 1
        steps = min(tier.num_steps, tier.num_draft_tokens - 1, room)
        if steps < 1:
            return None
        width = self.net.vocab_size if ids is None else len(ids)
        return Shape(topk, steps, tier.num_draft_tokens, children).bounded(width)

    def _grown_from(self, seat: Seat, shape: Shape) -> Plot:
        """The plot of a lane that lacks nothing."""
        hidden = hidden_of(seat)
        nothing = np.empty((0, len(hidden)), np.float32)
        return Plot(self._stem(seat), shape, np.empty(0, np.int32), nothing, hidden)

    def _stem(self, seat: Seat) -> Stem:
        mirror, state = seat.mirror, state_of(seat)
        return Stem(
            lane=state.lane,
            root=mirror.prefix.root,
            prefix_length=len(mirror.prefix),
            sampling=mirror.sampling,
            noise=state.noise,
            vocab_size=mirror.limits.vocab_size,
        )

    def _known(self, seat: Seat) -> int:
        """The length a lane can have with the features that are here, within the context."""
        if self.net.needs is None:
            return self.net.context_length
        features, lane = seat.mirror.features, state_of(seat).lane
        if features is None:
            return lane.length
        return max(lane.length, min(features.length, self.net.context_length))

    def _align(self, seat: Seat) -> None:
        """Starts the lane over where the features now begin, when it lacks some that are gone."""
        features, state = seat.mirror.features, state_of(seat)
        if features is not None and features.start > state.lane.length:
            self.kv.release(state.lane)
            state.lane.base = state.lane.length = features.start
            state.hidden = None

    def _run_chunk(self, batch: Sequence[Seat], lacking: dict[int, int]) -> None:
        """One forward over at most `chunk_rows` rows; places that are done leave `lacking`."""
        parts, tokens, features = [], [], []
        taken: list[tuple[int, int]] = []
        room = self.options.chunk_rows
        for place, stop in lacking.items():
            seat, lane = batch[place], state_of(batch[place]).lane
            end = min(stop, lane.length + room)
            if end <= lane.length:
                break
            room -= end - lane.length
            parts.append(prefix_part(lane, lane.length, end))
            shift = self.net.shift
            tokens.append(seat.mirror.prefix.tokens[lane.length + shift : end + shift])
            if self.net.needs is not None:
                features.append(self._fused(seat, lane.length, end))
            taken.append((place, end))
        hidden = self.net.forward(
            # Ids beyond the drafter's embedding are padding of the target's, and no words.
            torch.from_numpy(np.minimum(np.concatenate(tokens), self.net.vocab_size - 1)),
            torch.cat(features) if features else None,
            step_rows(parts),
            self.kv.cache,
        )
        row = -1
        for (place, end), part in zip(taken, parts, strict=True):
            row += len(part.positions)
            state = state_of(batch[place])
            state.lane.length = end
            state.hidden = hidden[row].clone()
            if end == lacking[place]:
                del lacking[place]

    def _fused(self, seat: Seat, first: int, stop: int) -> Tensor:
        store = seat.mirror.features
        assert store is not None, "a network that needs features ran without"
        rows = torch.from_numpy(np.array(store.rows(first, stop), np.float32))
        return rows if store.fused else self.net.fuse(rows)


def state_of(seat: Seat) -> ModelState:
    """The seat's state, as `open` made it."""
    assert isinstance(seat.state, ModelState), "a seat of another proposer"
    return seat.state


def hidden_of(seat: Seat) -> Tensor:
    """[hidden]: what `forward` gave for the seat's last slot."""
    hidden = state_of(seat).hidden
    assert hidden is not None, "a tree grows from a lane that was never run"
    return hidden


def _hidden_of(batch: Sequence[Seat], places: Sequence[int]) -> Tensor:
    """[places, hidden]."""
    return torch.stack([hidden_of(batch[place]) for place in places])
