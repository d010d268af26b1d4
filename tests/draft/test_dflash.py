"""DFlash against two other implementations: one written here, and the `dflash` package if it is
installed (pip install --no-deps dflash==0.1.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from graft.common.errors import GraftError
from graft.common.model_files import resolve
from graft.common.noise import gumbel
from graft.common.sampling import Sampling
from graft.common.tier import Tier
from graft.draft.checkpoints.borrowed import Borrowed, borrow_files
from graft.draft.checkpoints.detect import Kind, open_checkpoint
from graft.draft.checkpoints.dflash import default_layer_ids, load_dflash
from graft.draft.nets.dflash import DflashNet
from graft.draft.proposers.base import Seat
from graft.draft.proposers.dflash import DflashProposer
from graft.draft.proposers.model import ModelOptions, state_of
from graft.testing.bits import agree
from graft.testing.dense_dflash import DenseDflash
from graft.testing.dflash_checkpoints import DFLASH_LAYOUTS, write_dflash
from graft.testing.lockstep import Lockstep, Script
from graft.testing.models import IM_END, write_tiny_model
from graft.testing.plain import Plain

BLOCK = Tier("dflash", num_steps=5, topk=1, num_draft_tokens=6)
PROMPT = list(range(40, 75))
SAMPLED = Sampling(temperature=0.8, seed=11)
FULL, SLIDING = "full_attention", "sliding_attention"

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one layer": {"layers": 1},
    "three layers": {"layers": 3, "layer_ids": [4, 0, 2, 1]},
    "sliding": {"layer_types": [SLIDING, FULL], "window": 9},
    "sliding without window": {"layer_types": [FULL, SLIDING]},
    "sliding both ways": {
        "layer_types": [FULL, SLIDING],
        "window": 4,
        "options": {"is_causal": False},
    },
    "causal": {"options": {"is_causal": True}},
    "scaled": {"options": {"input_embedding_scale": 2.5}},
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


@pytest.fixture
def net(tmp_path: Path, folder: Path, target: Plain, borrowed: Borrowed) -> DflashNet:
    return loaded(write_dflash(tmp_path / "draft", folder), target, borrowed)


def loaded(path: Path, target: Plain, borrowed: Borrowed, **options: Any) -> DflashNet:
    return load_dflash(open_checkpoint(path), borrowed, target.ops, **options)


def proposer(net: DflashNet, target: Plain, window: int = 0, **options: int) -> DflashProposer:
    return DflashProposer("dflash", net, target.ops, ModelOptions(BLOCK, **options), window)


def block_logits(net: DflashNet, target: Plain, script: Script, length: int) -> torch.Tensor:
    """What `net` makes of one session, its context taken in over several rounds."""
    drafter = proposer(net, target)
    mirror = script.mirror(length - 5, target.target.vocab_size)
    seat = Seat(mirror, BLOCK, drafter.open(mirror))
    seen: list[torch.Tensor] = []
    score = net.logits
    net.logits = lambda hidden: seen.append(score(hidden)) or seen[-1]  # type: ignore
    for count in (0, 1, 4):
        if count:
            said = len(mirror.prefix) - len(script.prompt)
            script.commit(mirror, script.answer[said : said + count])
        assert drafter.propose([seat])[0] is not None
    net.logits = score  # type: ignore[method-assign]
    return seen[-1]


def same_as_dense(path: Path, folder: Path, net: DflashNet, target: Plain) -> None:
    script = Script.written(target, PROMPT, 20, need=net.needs)
    length = len(PROMPT) + 10
    logits = block_logits(net, target, script, length)
    assert script.states is not None
    root = [*script.prompt, *script.answer][length - 1]
    expected = DenseDflash(path, folder).logits(root, script.states[: length - 1])
    torch.testing.assert_close(logits.double(), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_blocks_equal_a_second_implementation(
    tmp_path: Path, folder: Path, target: Plain, borrowed: Borrowed, options: Mapping[str, Any]
) -> None:
    path = write_dflash(tmp_path / "draft", folder, **options)
    same_as_dense(path, folder, loaded(path, target, borrowed), target)


@pytest.mark.parametrize("layout", DFLASH_LAYOUTS)
def test_every_layout_means_the_same(
    tmp_path: Path, folder: Path, target: Plain, borrowed: Borrowed, layout: str
) -> None:
    path = write_dflash(tmp_path / "draft", folder, layout, layer_ids=[1, 3])
    assert open_checkpoint(path).kind is Kind.DFLASH
    net = loaded(path, target, borrowed)
    assert net.needs is not None and net.needs.layers == (2, 4)
    assert net.block.size == 6
    same_as_dense(path, folder, net, target)


def test_a_side_file_gives_the_mask_a_row_of_its_own(
    tmp_path: Path, folder: Path, target: Plain, borrowed: Borrowed
) -> None:
    path = write_dflash(tmp_path / "draft", folder, mask_row=True, options={"mask_token_id": 5})
    same_as_dense(path, folder, loaded(path, target, borrowed, pickle=True), target)
    with pytest.raises(GraftError, match=r"mask_embedding.pt is a pickle file"):
        loaded(path, target, borrowed)


@pytest.mark.parametrize("layout", ["z-lab", "nested"])
def test_a_mask_without_an_id_is_found_by_its_spelling(
    tmp_path: Path, folder: Path, target: Plain, borrowed: Borrowed, layout: str
) -> None:
    options = {"mask_token_id": None, "mask_token": "<|im_end|>"}
    path = write_dflash(tmp_path / "draft", folder, layout, options=options)
    net = loaded(path, target, borrowed)
    assert torch.equal(net.weights.mask, borrowed.embedding()[IM_END])


def test_a_cut_vocabulary_names_the_targets_tokens(
    tmp_path: Path, folder: Path, target: Plain, borrowed: Borrowed
) -> None:
    path = write_dflash(tmp_path / "draft", folder, "speculators", draft_vocab_size=120)
    net = loaded(path, target, borrowed)
    same_as_dense(path, folder, net, target)
    script = Script.written(target, PROMPT, 4, need=net.needs)
    drafter = proposer(net, target)
    mirror = script.mirror(len(PROMPT) + 1, 320)
    (tree,) = drafter.propose([Seat(mirror, BLOCK, drafter.open(mirror))])
    assert tree is not None and net.token_ids is not None
    assert set(tree.tokens[1:].tolist()) <= set(net.token_ids.tolist())


def test_layers_are_captured_where_the_field_captures_them() -> None:
    assert default_layer_ids(36, 5) == [1, 9, 17, 25, 33]
    assert default_layer_ids(32, 1) == [16]


def test_unset_layers_take_the_default(
    tmp_path: Path, folder: Path, target: Plain, borrowed: Borrowed
) -> None:
    path = write_dflash(tmp_path / "draft", folder, layers=3)
    needs = loaded(path, target, borrowed).needs
    assert needs is not None
    assert (needs.layers, needs.final_norm) == ((2, 3, 4), False)


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_a_row_is_ranked_by_the_noise_of_its_own_position(
    tmp_path: Path, folder: Path, target: Plain, borrowed: Borrowed, sampling: Sampling
) -> None:
    path = write_dflash(tmp_path / "draft", folder)
    net = loaded(path, target, borrowed)
    script = Script.written(target, PROMPT, 8, sampling, net.needs)
    drafter = proposer(net, target)
    mirror = script.mirror(len(PROMPT) + 3, 320)
    (tree,) = drafter.propose([Seat(mirror, BLOCK, drafter.open(mirror))])
    assert tree is not None and script.states is not None
    slots = len(mirror.prefix) - 1
    logits = DenseDflash(path, folder).logits(mirror.prefix.root, script.states[:slots]).numpy()
    for row, token in enumerate(tree.tokens[1:].tolist()):
        noise = sampling.temperature * gumbel(sampling.seed, len(mirror.prefix) + row, 320)
        assert token == int(np.argmax(logits[row] + noise))


def test_lanes_hold_what_a_prefill_would_have_written(
    tmp_path: Path, folder: Path, target: Plain, borrowed: Borrowed
) -> None:
    """What a block wrote is gone with the next commit."""
    net = loaded(write_dflash(tmp_path / "draft", folder), target, borrowed)
    drafter = proposer(net, target, chunk_rows=8)
    prompts = [PROMPT, PROMPT[:2], list(range(60, 79))]
    scripts = [Script.written(target, prompt, 30, SAMPLED, net.needs) for prompt in prompts]
    steps = Lockstep(drafter, scripts, BLOCK, 320)
    for number in range(8):
        steps.round([number % 3, (number + 1) % 3])
        for seat in steps.seats:
            fresh = Seat(seat.mirror, BLOCK, drafter.open(seat.mirror))
            with torch.inference_mode():
                drafter.catch_up([seat, fresh])
            old, new = state_of(seat).lane, state_of(fresh).lane
            assert old.length == new.length == len(seat.mirror.prefix) - 1
            for cache in (drafter.kv.cache.keys, drafter.kv.cache.values):
                left, right = (
                    cache[:, one.slots(0, one.length).astype(np.int64)] for one in (old, new)
                )
                assert agree(left, right)
            drafter.close(fresh)


def test_company_changes_no_block(net: DflashNet, target: Plain) -> None:
    def steps() -> Lockstep:
        scripts = [Script.written(target, PROMPT[:n], 24, SAMPLED, net.needs) for n in (3, 20, 9)]
        return Lockstep(proposer(net, target), scripts, BLOCK, 320)

    together, alone = steps(), steps()
    for _ in range(6):
        assert together.round() == [alone.round([place])[0] for place in range(3)]


def test_a_window_keeps_recent_pages_only(
    tmp_path: Path, folder: Path, target: Plain, borrowed: Borrowed
) -> None:
    """A block then sees what a drafter sees that joined within the window, and memory stays."""
    path = write_dflash(tmp_path / "draft", folder)
    net = loaded(path, target, borrowed)
    script = Script.written(target, PROMPT, 90, need=net.needs)
    drafter = proposer(net, target, window=24)
    mirror = script.mirror(len(PROMPT) + 1, 320)
    seat = Seat(mirror, BLOCK, drafter.open(mirror))
    lane = state_of(seat).lane
    drafter.propose([seat])
    assert (lane.base, lane.length) == (len(PROMPT) - 24, len(PROMPT))
    for _ in range(20):
        said = len(mirror.prefix) - len(PROMPT)
        script.commit(mirror, script.answer[said : said + 4])
        (tree,) = drafter.propose([seat])
        assert 24 <= lane.num_cached < 24 + 16
        assert len(lane.pages) <= 4
    assert tree is not None and script.states is not None
    whole = proposer(net, target)
    late = script.mirror(len(mirror.prefix), 320, start=lane.base)
    (other,) = whole.propose([Seat(late, BLOCK, whole.open(late))])
    assert other is not None and np.array_equal(tree.tokens, other.tokens)


def test_a_tier_cuts_the_chain_and_not_the_block(net: DflashNet, target: Plain) -> None:
    script = Script.written(target, PROMPT, 8, need=net.needs)
    drafter = proposer(net, target)
    mirror = script.mirror(len(PROMPT) + 3, 320)
    trees = []
    for tier in (BLOCK, Tier("dflash", 3, 1, 4), Tier("dflash", 9, 1, 3)):
        trees.append(drafter.propose([Seat(mirror, tier, drafter.open(mirror))])[0])
    sizes = [tree.num_nodes for tree in trees if tree is not None]
    assert sizes == [6, 4, 3]
    assert trees[0] is not None and trees[1] is not None
    assert trees[0].tokens[:4].tolist() == trees[1].tokens.tolist()


def test_acceptance_does_not_decay(net: DflashNet, target: Plain) -> None:
    """Over 100 rounds and more. A random drafter is seldom right, so its noise has to help."""
    sampling = Sampling(temperature=3.0, seed=4)
    script = Script.written(target, PROMPT, 400, sampling, net.needs)
    steps = Lockstep(proposer(net, target), [script], BLOCK, 320)
    counts: list[int] = []
    while len(steps.left(0)) > 1:
        counts += steps.round()
    assert len(counts) > 100
    assert np.mean(counts[-100:]) > np.mean(counts[:100]) - 0.3
    assert np.mean(counts) > 0.3


FAULTS = {
    "missing": (lambda w: w.pop("fc.weight"), r"lacks tensor fc\.weight"),
    "extra": (lambda w: w.update(stray=torch.zeros(2)), r"tensor stray left over"),
    "shape": (
        lambda w: w.update({"norm.weight": torch.zeros(7)}),
        r"norm\.weight has the shape \[7\], expected \[64\]",
    ),
    "layer": (
        lambda w: w.pop("layers.1.self_attn.k_norm.weight"),
        r"lacks tensor layers\.1\.self_attn\.k_norm\.weight",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_wrong_tensors_are_named(
    tmp_path: Path, folder: Path, target: Plain, borrowed: Borrowed, fault: str
) -> None:
    path = write_dflash(tmp_path / "draft", folder)
    harm, message = FAULTS[fault]
    weights = load_file(path / "model.safetensors")
    harm(weights)
    save_file(weights, path / "model.safetensors")
    with pytest.raises(GraftError, match=message):
        loaded(path, target, borrowed)


CONFIGS = {
    "DFlash2": ({"architectures": ["DFlash2DraftModel"]}, r"of DFlash2 are not offered"),
    "no mask": (
        {"mask_token_id": None},
        r"names no mask_token_id and has no mask_embedding\.pt, .* has no token <\|MASK\|>",
    ),
    "mask outside": ({"mask_token_id": 320}, r"mask_token_id 320, the target's embedding ends"),
    "layer": ({"target_layer_ids": [1, 9]}, r"asks for hidden state 10, the target has 0 to 6"),
    "block": ({"block_size": 1}, r"a block of 1 drafts nothing"),
    "layer types": ({"layer_types": [FULL]}, r"layer_types has 1 entries, expected 2"),
}


@pytest.mark.parametrize("options,message", CONFIGS.values(), ids=CONFIGS.keys())
def test_configs_that_cannot_be_run_are_refused(
    tmp_path: Path,
    folder: Path,
    target: Plain,
    borrowed: Borrowed,
    options: Mapping[str, Any],
    message: str,
) -> None:
    path = write_dflash(tmp_path / "draft", folder, options=options)
    with pytest.raises(GraftError, match=message):
        loaded(path, target, borrowed)


@pytest.mark.parametrize(
    "name", ["plain", "sliding", "sliding without window", "sliding both ways", "causal"]
)
def test_blocks_equal_the_dflash_package(
    tmp_path: Path, folder: Path, target: Plain, borrowed: Borrowed, name: str
) -> None:
    package = pytest.importorskip("dflash.model")
    path = write_dflash(tmp_path / "draft", folder, **VARIANTS[name])
    net = loaded(path, target, borrowed)
    script = Script.written(target, PROMPT, 20, need=net.needs)
    length = len(PROMPT) + 10
    logits = block_logits(net, target, script, length)
    model = package.DFlashDraftModel.from_pretrained(path, dtype=torch.float32).eval()
    weights = load_file(folder / "model.safetensors")
    root = [*script.prompt, *script.answer][length - 1]
    ids = torch.tensor([root] + [300] * 5)
    assert script.states is not None
    with torch.inference_mode():
        hidden = model(
            position_ids=torch.arange(length - 1 + 6)[None],
            noise_embedding=weights["model.embed_tokens.weight"][ids][None],
            target_hidden=torch.from_numpy(script.states[: length - 1])[None],
        )[0, 1:]
        head = torch.nn.Linear(64, 320, bias=False)
        head.weight.copy_(weights["lm_head.weight"])
        expected = model.compute_logits(hidden, head)
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-3)
