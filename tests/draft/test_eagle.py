"""EAGLE and EAGLE-3 against a second implementation, slot by slot and path by path.

What is compared: logits after catch-up, and the score of every node of a tree, with a dense
float64 network that knows nothing of pages, batches or trees.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from graft.common.feature_codec import decode, encode
from graft.common.model_files import resolve
from graft.common.sampling import Sampling
from graft.common.tier import Tier
from graft.common.tree import FloatArray
from graft.draft.checkpoints.borrowed import Borrowed, borrow_files
from graft.draft.checkpoints.detect import open_checkpoint
from graft.draft.checkpoints.eagle import load_eagle, read_token_map
from graft.draft.checkpoints.eagle3 import load_eagle3, projection_of
from graft.draft.features import FeatureStore
from graft.draft.nets.eagle import EagleNet
from graft.draft.nets.eagle3 import Eagle3Net
from graft.draft.proposers.base import Seat
from graft.draft.proposers.model import ModelOptions, ModelProposer, state_of
from graft.testing.bits import agree
from graft.testing.checkpoints import EAGLE3_LAYOUTS, write_eagle, write_eagle3, write_token_map
from graft.testing.dense import DenseEagle, DenseEagle3, DenseHead
from graft.testing.lockstep import Lockstep, Script
from graft.testing.models import write_tiny_model
from graft.testing.plain import GREEDY, Plain
from graft.v1.features_pb2 import FeatureCodec

BUSH = Tier("eagle", num_steps=4, topk=3, num_draft_tokens=14)
PROMPT = [72, 101, 108, 108, 111, 44, 32, 119]
BF16, INT8 = FeatureCodec.FEATURE_CODEC_BF16, FeatureCodec.FEATURE_CODEC_INT8
SAMPLED = Sampling(temperature=1.0, seed=11)

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_before_residual": {"options": {"norm_before_residual": True}},
    "norm_before_fc": {"options": {"norm_before_fc": True}},
    "fc_norm": {"options": {"fc_norm": True}},
    "legacy norms": {"options": {"use_aux_norm": True}},
    "norm_output": {"options": {"norm_output": True}},
    "explicit layers": {"layer_ids": [0, 2, 4]},
    "shared head": {"draft_vocab_size": None},
    "two layers": {"layers": 2},
    "own width": {"hidden": 32},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tiny_model(tmp_path_factory.mktemp("target") / "tiny", layers=6)


@pytest.fixture(scope="module")
def target(folder: Path) -> Plain:
    return Plain.load(folder)


@pytest.fixture(scope="module")
def borrowed(folder: Path) -> Borrowed:
    return borrow_files(resolve(str(folder), weights=True))


def eagle(path: Path, target: Plain, borrowed: Borrowed) -> EagleNet:
    return load_eagle(open_checkpoint(path), borrowed, target.ops)


def eagle3(path: Path, target: Plain, borrowed: Borrowed) -> Eagle3Net:
    return load_eagle3(open_checkpoint(path), borrowed, target.ops)


def proposer(net: EagleNet | Eagle3Net, target: Plain, tier: Tier = BUSH) -> ModelProposer:
    return ModelProposer("eagle", net, target.ops, ModelOptions(tier))


def same_as_dense(net: EagleNet | Eagle3Net, dense: DenseHead, target: Plain) -> None:
    """Catch-up logits and every node's score, for one session in the middle of its text."""
    script = Script.written(target, PROMPT, 12, need=net.needs)
    drafter = proposer(net, target)
    mirror = script.mirror(len(PROMPT) + 3, target.target.vocab_size)
    seat = Seat(mirror, BUSH, drafter.open(mirror))
    (tree,) = drafter.propose([seat])
    assert tree is not None and tree.scores is not None and tree.num_nodes == 14
    assert script.states is not None
    slots = len(mirror.prefix) - 1
    tokens = mirror.prefix.tokens[1:].tolist()
    hidden = state_of(seat).hidden
    assert hidden is not None
    first, _ = dense.run(tokens, script.states[:slots])
    torch.testing.assert_close(net.logits(hidden[None])[0].double(), first, rtol=1e-4, atol=1e-3)
    columns = {int(v): i for i, v in enumerate(net.token_ids)} if net.token_ids is not None else {}
    for node in range(1, tree.num_nodes):
        path = tree.tokens[tree.ancestors(node)[1:]].tolist()
        root, rest = dense.run(tokens, script.states[:slots], path[:-1])
        logs = [row.log_softmax(-1) for row in (root, *rest)]
        expected = sum(
            float(row[columns.get(token, token)]) for row, token in zip(logs, path, strict=True)
        )
        assert tree.scores[node] == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_eagle3_equals_a_second_implementation(
    tmp_path: Path, folder: Path, target: Plain, borrowed: Borrowed, options: Mapping[str, Any]
) -> None:
    path = write_eagle3(tmp_path / "draft", folder, **options)
    same_as_dense(eagle3(path, target, borrowed), DenseEagle3(path, folder), target)


@pytest.mark.parametrize("layout", EAGLE3_LAYOUTS)
def test_every_layout_of_eagle3_means_the_same(
    tmp_path: Path, folder: Path, target: Plain, borrowed: Borrowed, layout: str
) -> None:
    path = write_eagle3(tmp_path / "draft", folder, layout)
    same_as_dense(eagle3(path, target, borrowed), DenseEagle3(path, folder), target)


@pytest.mark.parametrize("fc_bias", [True, False])
@pytest.mark.parametrize("layout", ["sglang", "qwen2"])
def test_eagle_equals_a_second_implementation(
    tmp_path: Path, folder: Path, target: Plain, borrowed: Borrowed, layout: str, fc_bias: bool
) -> None:
    path = write_eagle(tmp_path / "draft", folder, layout, fc_bias=fc_bias, layers=2)
    same_as_dense(eagle(path, target, borrowed), DenseEagle(path, folder), target)


def test_a_token_map_cuts_the_head_and_nothing_else(
    tmp_path: Path, folder: Path, target: Plain, borrowed: Borrowed
) -> None:
    path = write_eagle(tmp_path / "draft", folder)
    ids = read_token_map(write_token_map(tmp_path / "freq.pt", folder), 320)
    whole = eagle(path, target, borrowed)
    cut = load_eagle(open_checkpoint(path), borrowed, target.ops, ids)
    hidden = torch.randn(5, 64)
    assert torch.equal(cut.logits(hidden), whole.logits(hidden)[:, ids])
    script = Script.written(target, PROMPT, 4, need=cut.needs)
    drafter = proposer(cut, target)
    mirror = script.mirror(len(PROMPT) + 1, 320)
    (tree,) = drafter.propose([Seat(mirror, BUSH, drafter.open(mirror))])
    assert tree is not None
    assert set(tree.tokens[1:].tolist()) <= set(ids.tolist())


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_lanes_hold_what_a_prefill_would_have_written(
    tmp_path: Path, folder: Path, target: Plain, borrowed: Borrowed, sampling: Sampling
) -> None:
    net = eagle3(write_eagle3(tmp_path / "draft", folder), target, borrowed)
    drafter = proposer(net, target)
    prompts = [PROMPT, PROMPT[:2], list(range(40, 75))]
    scripts = [Script.written(target, prompt, 30, sampling, net.needs) for prompt in prompts]
    steps = Lockstep(drafter, scripts, BUSH, 320)
    for number in range(10):
        steps.round([number % 3, (number + 1) % 3])
        with torch.inference_mode():
            assert len(drafter.catch_up(steps.seats)) == 3
        for seat in steps.seats:
            fresh = Seat(seat.mirror, BUSH, drafter.open(seat.mirror))
            with torch.inference_mode():
                drafter.catch_up([fresh])
            old, new = state_of(seat), state_of(fresh)
            assert old.lane.length == new.lane.length == len(seat.mirror.prefix) - 1
            for cache in (drafter.kv.cache.keys, drafter.kv.cache.values):
                left, right = (
                    cache[:, one.lane.slots(0, one.lane.length).astype(np.int64)]
                    for one in (old, new)
                )
                assert agree(left, right)
            assert old.hidden is not None and new.hidden is not None
            assert agree(old.hidden, new.hidden)
            drafter.close(fresh)


def test_features_that_are_late_are_waited_for(
    tmp_path: Path, folder: Path, target: Plain, borrowed: Borrowed
) -> None:
    net = eagle3(write_eagle3(tmp_path / "draft", folder), target, borrowed)
    script = Script.written(target, PROMPT, 12, need=net.needs)
    drafter = proposer(net, target)
    mirror = script.mirror(len(PROMPT) + 4, 320)
    complete, mirror.features = mirror.features, None
    seat = Seat(mirror, BUSH, drafter.open(mirror))
    assert drafter.propose([seat]) == [None]
    mirror.features = complete
    late = drafter.propose([seat])[0]
    fresh = drafter.propose([Seat(mirror, BUSH, drafter.open(mirror))])[0]
    assert late is not None and fresh is not None
    assert np.array_equal(late.tokens, fresh.tokens)
    assert late.scores is not None and np.array_equal(late.scores, fresh.scores)


def test_a_window_of_features_is_enough_to_draft(
    tmp_path: Path, folder: Path, target: Plain, borrowed: Borrowed
) -> None:
    """A drafter that joins late sees less; its slots keep their true positions."""
    net = eagle3(write_eagle3(tmp_path / "draft", folder), target, borrowed)
    script = Script.written(target, list(range(40, 75)), 12, need=net.needs)
    drafter = proposer(net, target)
    mirror = script.mirror(40, 320, start=21)
    seat = Seat(mirror, BUSH, drafter.open(mirror))
    for count in (1, 3, 2):
        assert drafter.propose([seat])[0] is not None
        lane = state_of(seat).lane
        assert (lane.base, lane.length) == (21, len(mirror.prefix) - 1)
        said = len(mirror.prefix) - 35
        script.commit(mirror, script.answer[said : said + count])


def test_worked_alignment_of_prefill_and_extend(
    tmp_path: Path, folder: Path, target: Plain, borrowed: Borrowed
) -> None:
    """Prompt x0..x3, first token x4; then x5, x6 accepted and x7 the bonus: slots hold what the
    field's worked example says.
    """
    net = eagle(write_eagle(tmp_path / "draft", folder), target, borrowed)
    seen: list[tuple[list[int], list[int], np.ndarray[Any, Any]]] = []

    class Watched(EagleNet):
        def forward(self, tokens, hidden, rows, kv):  # type: ignore[no-untyped-def]
            seen.append((tokens.tolist(), rows.positions.tolist(), hidden.numpy().copy()))
            return super().forward(tokens, hidden, rows, kv)

    net.__class__ = Watched
    script = Script.written(target, PROMPT[:4], 8, need=net.needs)
    x = [*script.prompt, *script.answer]
    drafter = proposer(net, target, Tier("eagle", 3, 2, 5))
    mirror = script.mirror(5, 320)
    seat = Seat(mirror, Tier("eagle", 3, 2, 5), drafter.open(mirror))
    drafter.propose([seat])
    tokens, positions, features = seen[0]
    assert (tokens, positions) == (x[1:5], [0, 1, 2, 3])
    assert script.states is not None and np.array_equal(features, script.states[:4])
    assert [call[1] for call in seen[1:]] == [[4, 4], [5, 5]]
    seen.clear()
    script.commit(mirror, x[5:8])
    drafter.propose([seat])
    tokens, positions, features = seen[0]
    assert (tokens, positions) == (x[5:8], [4, 5, 6])
    assert np.array_equal(features, script.states[4:7])
    assert seen[1][1] == [7, 7]


@pytest.mark.parametrize("options", [{}, {"norm_before_fc": True}, {"fc_norm": True}])
def test_states_that_verify_projected_draft_the_same(
    tmp_path: Path,
    folder: Path,
    target: Plain,
    borrowed: Borrowed,
    options: Mapping[str, Any],
) -> None:
    path = write_eagle3(tmp_path / "draft", folder, options=options)
    net = eagle3(path, target, borrowed)
    projection = projection_of(open_checkpoint(path), borrowed)
    assert projection is not None and net.needs is not None
    assert net.needs.fused_id == projection.fused_id
    script = Script.written(target, PROMPT, 6, need=net.needs)
    mirror = script.mirror(len(PROMPT) + 2, 320)
    raw = mirror.features
    assert raw is not None
    fused = FeatureStore(64, fused=True)
    fused.append(net.fuse(torch.from_numpy(raw.rows(0, raw.length).copy())).numpy())
    trees = []
    for store in (raw, fused):
        mirror.features = store
        drafter = proposer(net, target)
        trees.append(drafter.propose([Seat(mirror, BUSH, drafter.open(mirror))])[0])
    assert trees[0] is not None and trees[1] is not None
    assert np.array_equal(trees[0].tokens, trees[1].tokens)
    assert np.array_equal(trees[0].scores, trees[1].scores)  # type: ignore[arg-type]


def test_acceptance_does_not_decay_over_300_rounds(
    tmp_path: Path, folder: Path, target: Plain, borrowed: Borrowed
) -> None:
    """And the last lane still equals a prefill: nothing drifts, however long a session runs."""
    net = eagle3(write_eagle3(tmp_path / "draft", folder), target, borrowed)
    tier = Tier("eagle", num_steps=2, topk=8, num_draft_tokens=30)
    script = Script.written(target, PROMPT, 450, SAMPLED, net.needs)
    drafter = proposer(net, target, tier)
    steps = Lockstep(drafter, [script], tier, 320)
    counts = [steps.round()[0] for _ in range(300)]
    assert np.mean(counts[-100:]) > np.mean(counts[:100]) - 0.2
    seat = steps.seats[0]
    fresh = Seat(seat.mirror, tier, drafter.open(seat.mirror))
    last, anew = (drafter.propose([one])[0] for one in (seat, fresh))
    assert last is not None and anew is not None
    assert np.array_equal(last.tokens, anew.tokens)
    assert last.scores is not None and anew.scores is not None
    assert agree(torch.from_numpy(last.scores), torch.from_numpy(anew.scores))


def test_coarse_projected_states_draft_as_well_as_fine_ones(
    tmp_path: Path, folder: Path, target: Plain, borrowed: Borrowed
) -> None:
    """int8 rows behind the projection against bf16 rows before it: accept lengths within 2 %."""
    net = eagle3(write_eagle3(tmp_path / "draft", folder), target, borrowed)
    tier = Tier("eagle", num_steps=2, topk=8, num_draft_tokens=40)
    random = np.random.default_rng(2)
    fine, coarse = [], []
    for seed in range(6):
        prompt = random.integers(32, 127, 12).tolist()
        law = Sampling(temperature=0.7, seed=seed)
        script = Script.written(target, prompt, 90, law, net.needs)
        assert script.states is not None
        with torch.inference_mode():
            projected = net.fuse(torch.from_numpy(script.states)).numpy()
        fine.append(dataclasses.replace(script, states=sent(script.states, BF16)))
        coarse.append(dataclasses.replace(script, states=sent(projected, INT8), fused=True))
    lengths = []
    for scripts in (fine, coarse):
        steps = Lockstep(proposer(net, target, tier), scripts, tier, 320)
        lengths.append(1 + np.mean([steps.round() for _ in range(25)]))
    assert lengths[0] > 1.1
    assert lengths[1] == pytest.approx(lengths[0], rel=0.02)


def sent(rows: FloatArray, codec: FeatureCodec.ValueType) -> FloatArray:
    """What arrives of rows that travel by a codec."""
    return decode(encode(rows, codec).tobytes(), *rows.shape, codec)
