"""MTP against a second implementation that runs every prefix from scratch, in float64."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from graft.common.errors import GraftError
from graft.common.model_files import resolve
from graft.common.sampling import Sampling
from graft.common.tier import Tier
from graft.draft.checkpoints.borrowed import Borrowed, borrow_files
from graft.draft.checkpoints.detect import Kind, open_checkpoint
from graft.draft.checkpoints.mtp import load_mtp, load_multi_layer
from graft.draft.nets.mtp import MultiLayerNet
from graft.draft.proposers.base import Seat
from graft.draft.proposers.model import ModelOptions, ModelProposer, state_of
from graft.draft.proposers.multi_layer import MultiLayerProposer
from graft.testing.bits import agree
from graft.testing.dense_mtp import DenseMtp
from graft.testing.lockstep import Lockstep, Script
from graft.testing.models import write_tiny_model
from graft.testing.mtp_checkpoints import MTP_LAYOUTS, write_mtp
from graft.testing.plain import Plain

BUSH = Tier("mtp", num_steps=3, topk=3, num_draft_tokens=12)
CHAIN = Tier("mtp", num_steps=3, topk=1, num_draft_tokens=4)
PROMPT = list(range(40, 62))
SAMPLED = Sampling(temperature=0.8, seed=11)
RECURRENT = pytest.mark.parametrize("layout", ["nextn", "nextn alone", "mimo"])
MULTI_LAYER = pytest.mark.parametrize("layout", ["nextn", "mimo_v2", "step3p5"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tiny_model(tmp_path_factory.mktemp("target") / "tiny", layers=2)


@pytest.fixture(scope="module")
def target(folder: Path) -> Plain:
    return Plain.load(folder)


@pytest.fixture(scope="module")
def borrowed(folder: Path) -> Borrowed:
    return borrow_files(resolve(str(folder), weights=True))


def multi_layer(
    path: Path, target: Plain, borrowed: Borrowed, **options: int
) -> MultiLayerProposer:
    net = load_multi_layer(open_checkpoint(path), borrowed, target.ops)
    return MultiLayerProposer("mtp", net, target.ops, ModelOptions(CHAIN, **options))


@pytest.mark.parametrize("layout", MTP_LAYOUTS)
def test_every_layout_is_recognised(tmp_path: Path, folder: Path, layout: str) -> None:
    path = write_mtp(tmp_path / "draft", folder, layout)
    assert open_checkpoint(path).kind is Kind.MTP


@RECURRENT
def test_a_recurrent_step_equals_a_recomputed_prefix(
    tmp_path: Path, folder: Path, target: Plain, borrowed: Borrowed, layout: str
) -> None:
    path = write_mtp(tmp_path / "draft", folder, layout)
    net = load_mtp(open_checkpoint(path), borrowed, target.ops)
    assert net.needs is not None and (net.needs.layers, net.needs.final_norm) == ((2,), True)
    script = Script.written(target, PROMPT, 12, need=net.needs)
    drafter = ModelProposer("mtp", net, target.ops, ModelOptions(BUSH))
    mirror = script.mirror(len(PROMPT) + 2, 320)
    seat = Seat(mirror, BUSH, drafter.open(mirror))
    drafter.propose([seat])
    script.commit(mirror, script.answer[2:5])
    (tree,) = drafter.propose([seat])
    assert tree is not None and tree.scores is not None and script.states is not None
    assert tree.num_nodes == 12
    dense, slots = DenseMtp(path, folder, layout), len(mirror.prefix) - 1
    tokens = mirror.prefix.tokens[1:].tolist()
    for node in range(1, tree.num_nodes):
        chosen = tree.tokens[tree.ancestors(node)[1:]].tolist()
        logs = dense.recurrent(tokens, script.states[:slots], chosen[:-1])
        expected = sum(float(row[token]) for row, token in zip(logs, chosen, strict=True))
        assert tree.scores[node] == pytest.approx(expected, abs=2e-3)


@MULTI_LAYER
def test_multi_layer_chains_equal_a_recomputed_prefix(
    tmp_path: Path, folder: Path, target: Plain, borrowed: Borrowed, layout: str
) -> None:
    """After several commits of different lengths, and within chunks shorter than the prompt."""
    path = write_mtp(tmp_path / "draft", folder, layout, steps=3)
    drafter = multi_layer(path, target, borrowed, chunk_rows=9)
    needs = drafter.net.needs
    assert needs is not None and (needs.layers, needs.final_norm) == ((2,), False)
    script = Script.written(target, PROMPT, 30, need=needs)
    dense = DenseMtp(path, folder, layout)
    mirror = script.mirror(len(PROMPT) + 1, 320)
    seat = Seat(mirror, CHAIN, drafter.open(mirror))
    assert script.states is not None
    for count in (1, 3, 2, 1, 1, 4, 2):
        (tree,) = drafter.propose([seat])
        assert tree is not None
        expected = dense.multi_layer(mirror.prefix.tokens.tolist(), script.states, 3)
        assert tree.tokens[1:].tolist() == expected
        assert state_of(seat).lane.length == len(mirror.prefix) - 1
        said = len(mirror.prefix) - len(PROMPT)
        script.commit(mirror, script.answer[said : said + count])


@MULTI_LAYER
def test_lanes_hold_what_a_prefill_would_have_written(
    tmp_path: Path, folder: Path, target: Plain, borrowed: Borrowed, layout: str
) -> None:
    """Also where ids were only drafted when a slot was first run, and after missed rounds."""
    path = write_mtp(tmp_path / "draft", folder, layout, steps=3)
    drafter = multi_layer(path, target, borrowed)
    prompts = [PROMPT, PROMPT[:2], list(range(60, 79))]
    scripts = [Script.written(target, one, 30, SAMPLED, drafter.net.needs) for one in prompts]
    steps = Lockstep(drafter, scripts, CHAIN, 320)
    for number in range(6):
        steps.round([number % 3, (number + 1) % 3])
        trees = drafter.propose(steps.seats)
        for seat, tree in zip(steps.seats, trees, strict=True):
            fresh = Seat(seat.mirror, CHAIN, drafter.open(seat.mirror))
            (other,) = drafter.propose([fresh])
            assert tree is not None and other is not None
            assert np.array_equal(tree.tokens, other.tokens)
            old, new = state_of(seat).lane, state_of(fresh).lane
            assert old.length == new.length == len(seat.mirror.prefix) - 1
            for cache in (drafter.kv.cache.keys, drafter.kv.cache.values):
                left, right = (
                    cache[:, one.slots(0, one.length).astype(np.int64)] for one in (old, new)
                )
                assert agree(left, right)
            drafter.close(fresh)


def test_worked_rotation(tmp_path: Path, folder: Path, target: Plain, borrowed: Borrowed) -> None:
    """The field's example: after a commit of two, runner s sees ids rotated s times."""
    path = write_mtp(tmp_path / "draft", folder, "mimo_v2", steps=3)
    drafter = multi_layer(path, target, borrowed)
    seen: list[tuple[int, list[int], list[int]]] = []

    class Watched(MultiLayerNet):
        def run(self, step, tokens, hidden, rows, kv):  # type: ignore[no-untyped-def]
            seen.append((step, tokens.tolist(), rows.positions.tolist()))
            return super().run(step, tokens, hidden, rows, kv)

    drafter.net.__class__ = Watched
    script = Script.written(target, PROMPT[:4], 8, need=drafter.net.needs)
    x = [*script.prompt, *script.answer]
    mirror = script.mirror(5, 320)
    seat = Seat(mirror, CHAIN, drafter.open(mirror))
    (tree,) = drafter.propose([seat])
    assert tree is not None
    d = tree.tokens[1:].tolist()
    assert seen == [
        (0, x[1:5], [0, 1, 2, 3]),
        (1, [*x[2:5], d[0]], [0, 1, 2, 3]),
        (2, [*x[3:5], d[0], d[1]], [0, 1, 2, 3]),
    ]
    seen.clear()
    script.commit(mirror, x[5:7])
    (tree,) = drafter.propose([seat])
    assert tree is not None
    d = tree.tokens[1:].tolist()
    # Slots 4 and 5 are new; 2 and 3 are run again, for their later ids are known only now.
    assert seen == [
        (0, x[3:7], [2, 3, 4, 5]),
        (1, [*x[4:7], d[0]], [2, 3, 4, 5]),
        (2, [*x[5:7], d[0], d[1]], [2, 3, 4, 5]),
    ]


def test_company_changes_no_chain(
    tmp_path: Path, folder: Path, target: Plain, borrowed: Borrowed
) -> None:
    path = write_mtp(tmp_path / "draft", folder, "step3p5", steps=3)

    def steps() -> Lockstep:
        drafter = multi_layer(path, target, borrowed)
        needs = drafter.net.needs
        scripts = [Script.written(target, PROMPT[:n], 24, SAMPLED, needs) for n in (3, 20, 9)]
        return Lockstep(drafter, scripts, CHAIN, 320)

    together, alone = steps(), steps()
    for _ in range(6):
        assert together.round() == [alone.round([place])[0] for place in range(3)]


@pytest.mark.parametrize("layout", ["nextn", "mimo_v2"])
def test_acceptance_does_not_decay(
    tmp_path: Path, folder: Path, target: Plain, borrowed: Borrowed, layout: str
) -> None:
    path = write_mtp(tmp_path / "draft", folder, layout, steps=3)
    drafter = multi_layer(path, target, borrowed)
    sampling = Sampling(temperature=3.0, seed=4)
    script = Script.written(target, PROMPT, 300, sampling, drafter.net.needs)
    steps = Lockstep(drafter, [script], CHAIN, 320)
    counts: list[int] = []
    while len(steps.left(0)) > 1:
        counts += steps.round()
    assert len(counts) > 100
    assert np.mean(counts[-100:]) > np.mean(counts[:100]) - 0.3


def harmed(path: Path, harm: Any) -> Path:
    weights = load_file(path / "model.safetensors")
    harm(weights)
    save_file(weights, path / "model.safetensors")
    return path


STEP = "model.layers.2"
FAULTS = {
    "missing": (
        lambda w: w.pop(f"{STEP}.eh_proj.weight"),
        rf"lacks tensor {STEP}\.eh_proj\.weight",
    ),
    "missing norm": (
        lambda w: w.pop(f"{STEP}.shared_head.norm.weight"),
        rf"lacks tensor {STEP}\.shared_head\.norm\.weight",
    ),
    "extra": (
        lambda w: w.update({f"{STEP}.stray.weight": torch.zeros(2)}),
        rf"tensor {STEP}\.stray\.weight left over",
    ),
    "shape": (
        lambda w: w.update({f"{STEP}.enorm.weight": torch.zeros(7)}),
        rf"{STEP}\.enorm\.weight has the shape \[7\], expected \[64\]",
    ),
    "experts": (
        lambda w: w.update({f"{STEP}.mlp.experts.0.up_proj.weight": torch.zeros(2)}),
        r"belongs to a block with experts, which is not offered",
    ),
    "latent attention": (
        lambda w: w.update({f"{STEP}.self_attn.kv_a_proj_with_mqa.weight": torch.zeros(2)}),
        r"belongs to a block with latent attention, which is not offered",
    ),
}


@pytest.mark.parametrize("harm,message", FAULTS.values(), ids=FAULTS.keys())
def test_wrong_tensors_are_named(
    tmp_path: Path, folder: Path, target: Plain, borrowed: Borrowed, harm: Any, message: str
) -> None:
    path = harmed(write_mtp(tmp_path / "draft", folder), harm)
    with pytest.raises(GraftError, match=message):
        load_mtp(open_checkpoint(path), borrowed, target.ops)


@pytest.mark.parametrize("layout", ["mimo_v2", "step3p5"])
def test_wrong_tensors_of_several_steps_are_named(
    tmp_path: Path, folder: Path, target: Plain, borrowed: Borrowed, layout: str
) -> None:
    path = write_mtp(tmp_path / "draft", folder, layout, steps=2)
    gone = [name for name in load_file(path / "model.safetensors") if ".up_proj" in name][1]
    harmed(path, lambda w: w.pop(gone))
    with pytest.raises(GraftError, match=rf"lacks tensor {gone}"):
        load_multi_layer(open_checkpoint(path), borrowed, target.ops)


def test_the_wrong_way_to_run_a_layout_is_refused(
    tmp_path: Path, folder: Path, target: Plain, borrowed: Borrowed
) -> None:
    several = write_mtp(tmp_path / "several", folder, "nextn", steps=2)
    with pytest.raises(GraftError, match=r"num_nextn_predict_layers 2, expected 1"):
        load_mtp(open_checkpoint(several), borrowed, target.ops)
    own = write_mtp(tmp_path / "own", folder, "mimo_v2", steps=2)
    with pytest.raises(GraftError, match=r"enable_multi_layer_eagle runs it"):
        load_mtp(open_checkpoint(own), borrowed, target.ops)
    mimo = write_mtp(tmp_path / "mimo", folder, "mimo")
    with pytest.raises(GraftError, match=r"enable_multi_layer_eagle does not go with it"):
        load_multi_layer(open_checkpoint(mimo), borrowed, target.ops)
    with pytest.raises(GraftError, match=r"num_steps 5 is over the 2"):
        load_multi_layer(open_checkpoint(own), borrowed, target.ops, num_steps=5)


def test_fewer_steps_than_there_are_may_be_run(
    tmp_path: Path, folder: Path, target: Plain, borrowed: Borrowed
) -> None:
    path = write_mtp(tmp_path / "draft", folder, "step3p5", steps=3)
    net = load_multi_layer(open_checkpoint(path), borrowed, target.ops, num_steps=2)
    assert net.num_steps == 2
