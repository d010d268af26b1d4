"""UNO against a second implementation in float64, and against PEFT itself if it is installed
(pip install --no-deps peft accelerate).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from graft.common.errors import GraftError, InvalidArgument
from graft.common.sampling import Sampling
from graft.common.tree import Tree
from graft.draft.checkpoints.detect import Kind, open_checkpoint
from graft.draft.checkpoints.lora import adapter_folder, read_adapters
from graft.draft.nets.uno import UnoNet
from graft.draft.proposers.base import Sampled, Seat
from graft.draft.proposers.model import ModelOptions, state_of
from graft.draft.proposers.uno import NoiseTokens, UnoProposer, UnoShape, uno_shape
from graft.kernels.reference.uno import build_uno_trees
from graft.testing.adapters import DenseUno, write_adapter
from graft.testing.bits import agree
from graft.testing.lockstep import Lockstep, Script
from graft.testing.models import write_tiny_model
from graft.testing.plain import GREEDY, Plain
from graft.v1.sampling_pb2 import AcceptRule

LINEAR = uno_shape(None, 1, 5)
BUSH = uno_shape(3, 4, 9)
PROMPT = list(range(40, 62))
SAMPLED = Sampling(temperature=0.8, seed=11)
SHAPES = pytest.mark.parametrize("shape", [LINEAR, BUSH], ids=["linear", "tree"])
NOISE = NoiseTokens(0, 256, seed=3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tiny_model(tmp_path_factory.mktemp("target") / "tiny")


@pytest.fixture(scope="module")
def target(folder: Path) -> Plain:
    return Plain.load(folder)


def loaded(path: Path, target: Plain) -> UnoNet:
    checkpoint = open_checkpoint(path)
    adapters = read_adapters(
        checkpoint.config, checkpoint.tensors, target.target.config, target.ops
    )
    return UnoNet(target.target, adapters)


def proposer(net: UnoNet, target: Plain, shape: UnoShape, **options: Any) -> UnoProposer:
    made = ModelOptions(shape.tier("uno"), **options)
    return UnoProposer("uno", net, target.ops, made, NOISE)


@pytest.fixture
def net(tmp_path: Path, folder: Path, target: Plain) -> UnoNet:
    return loaded(write_adapter(tmp_path / "uno", folder), target)


def seen_logits(drafter: UnoProposer) -> list[torch.Tensor]:
    """Fills with the logits of every round from now on."""
    seen: list[torch.Tensor] = []
    score = drafter.net.logits
    drafter.net.logits = lambda hidden: seen.append(score(hidden)) or seen[-1]  # type: ignore
    return seen


@pytest.mark.parametrize("targets", [None, ["q_proj", "v_proj", "down_proj"]], ids=["all", "some"])
def test_rows_equal_a_second_implementation(
    tmp_path: Path, folder: Path, target: Plain, targets: list[str] | None
) -> None:
    path = write_adapter(tmp_path / "uno", folder, **({"targets": targets} if targets else {}))
    drafter = proposer(loaded(path, target), target, LINEAR)
    seen = seen_logits(drafter)
    script = Script.written(target, PROMPT, 12)
    mirror = script.mirror(len(PROMPT) + 1, 320)
    seat = Seat(mirror, drafter.options.tier, drafter.open(mirror))
    for count in (2, 4, 0):
        drafter.propose([seat])
        text = mirror.prefix.tokens.tolist()
        noise = NOISE.at(mirror.session_id, len(text), 4).tolist()
        expected = DenseUno(path, folder).logits([*text, *noise], noisy=4)[-5:]
        torch.testing.assert_close(seen[-1].double(), expected, rtol=1e-4, atol=1e-3)
        said = len(text) - len(PROMPT)
        if count:
            script.commit(mirror, script.answer[said : said + count])


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_rows_equal_peft(tmp_path: Path, folder: Path, target: Plain) -> None:
    """The prefix runs without the adapter, the noise behind it with it."""
    peft = pytest.importorskip("peft", exc_type=ImportError)
    from transformers import AutoModelForCausalLM, DynamicCache

    path = write_adapter(tmp_path / "uno", folder)
    drafter = proposer(loaded(path, target), target, LINEAR)
    seen = seen_logits(drafter)
    script = Script.written(target, PROMPT, 12)
    mirror = script.mirror(len(PROMPT) + 3, 320)
    drafter.propose([Seat(mirror, drafter.options.tier, drafter.open(mirror))])
    text = mirror.prefix.tokens.tolist()
    noise = NOISE.at(mirror.session_id, len(text), 4).tolist()
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, path).eval()
    cache = DynamicCache()
    with torch.inference_mode():
        with model.disable_adapter():
            clean = model(torch.tensor([text]), past_key_values=cache).logits[0, -1:]
        spec = model(torch.tensor([noise]), past_key_values=cache).logits[0]
    torch.testing.assert_close(seen[-1], torch.cat([clean, spec]), rtol=1e-4, atol=1e-3)


@SHAPES
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_first_drafted_token_is_always_right(
    net: UnoNet, target: Plain, shape: UnoShape, sampling: Sampling
) -> None:
    """It comes from the target's own weights; over 100 rounds the rest does not decay."""
    scripts = [Script.written(target, PROMPT, 330, sampling)]
    steps = Lockstep(proposer(net, target, shape), scripts, shape.tier("uno"), 320)
    counts = []
    while len(steps.left(0)) > 2:
        counts += steps.round()
    assert len(counts) > 100
    assert min(counts) >= 1
    assert np.mean(counts[-60:]) > np.mean(counts[:60]) - 0.4


def test_trees_are_those_of_the_reference(net: UnoNet, target: Plain) -> None:
    drafter = proposer(net, target, BUSH)
    seen = seen_logits(drafter)
    script = Script.written(target, PROMPT, 4)
    mirror = script.mirror(len(PROMPT) + 2, 320)
    (tree,) = drafter.propose([Seat(mirror, drafter.options.tier, drafter.open(mirror))])
    assert tree is not None and tree.scores is not None
    assert tree.num_nodes == 10 and tree.max_depth <= 4
    probs, tokens = torch.softmax(seen[-1][1:], dim=-1).topk(4)
    grown = build_uno_trees(tokens[None], probs[None], 9)
    ours = {
        tuple(tree.tokens[tree.ancestors(node)[2:]].tolist()): float(tree.scores[node])
        for node in range(2, tree.num_nodes)
    }
    clean = float(seen[-1][0].log_softmax(-1).max())
    parents = grown.parent[0].tolist()
    paths: list[tuple[int, ...]] = [()]
    for node, token in enumerate(grown.draft_tokens[0].tolist(), 1):
        paths.append((*paths[parents[node]], token))
        expected = clean + float(grown.masses[0, node - 1].log())
        assert ours[paths[-1]] == pytest.approx(expected, abs=1e-3)
    assert len(ours) == len(paths) - 1


def test_lanes_hold_what_a_prefill_would_have_written(net: UnoNet, target: Plain) -> None:
    """Noise leaves nothing behind, and prompts longer than a tail run in chunks."""
    drafter = proposer(net, target, LINEAR, chunk_rows=16)
    prompts = [PROMPT, PROMPT[:1], [*range(33, 126), *range(33, 60)]]
    scripts = [Script.written(target, prompt, 40, SAMPLED) for prompt in prompts]
    steps = Lockstep(drafter, scripts, drafter.options.tier, 320)
    for number in range(6):
        steps.round([number % 3, (number + 1) % 3])
        with torch.inference_mode():
            drafter.catch_up(steps.seats)
        trees = drafter.propose(steps.seats)
        for seat, tree in zip(steps.seats, trees, strict=True):
            fresh = Seat(seat.mirror, seat.tier, drafter.open(seat.mirror))
            with torch.inference_mode():
                drafter.catch_up([fresh])
            (other,) = drafter.propose([fresh])
            assert isinstance(tree, Tree) and isinstance(other, Tree)
            assert np.array_equal(tree.tokens, other.tokens)
            old, new = state_of(seat).lane, state_of(fresh).lane
            assert old.length == new.length == len(seat.mirror.prefix)
            for cache in (drafter.kv.cache.keys, drafter.kv.cache.values):
                left, right = (
                    cache[:, one.slots(0, one.length).astype(np.int64)] for one in (old, new)
                )
                assert agree(left, right)
            drafter.close(fresh)


@SHAPES
def test_company_changes_no_tree(net: UnoNet, target: Plain, shape: UnoShape) -> None:
    def steps() -> Lockstep:
        scripts = [Script.written(target, PROMPT[:n], 24, SAMPLED) for n in (3, 20, 9)]
        return Lockstep(proposer(net, target, shape), scripts, shape.tier("uno"), 320)

    together, alone = steps(), steps()
    for _ in range(5):
        assert together.round() == [alone.round([place])[0] for place in range(3)]


def test_plain_rows_have_the_targets_own_bits(net: UnoNet, target: Plain) -> None:
    drafter = proposer(net, target, LINEAR)
    seen = seen_logits(drafter)
    script = Script.written(target, PROMPT, 2)
    mirror = script.mirror(len(PROMPT) + 1, 320)
    drafter.propose([Seat(mirror, drafter.options.tier, drafter.open(mirror))])
    kv = target.new_kv(1024, 1024)
    logits = target._run(kv, mirror.prefix.tokens.tolist(), 0, None)
    assert torch.equal(seen[-1][0], logits[-1])


def test_noise_is_the_same_for_a_position_and_within_its_range() -> None:
    noise = NoiseTokens(1, 50, seed=7)
    first = noise.at(5, 100, 8)
    assert noise.at(5, 103, 5).tolist() == first[3:].tolist()
    assert noise.at(6, 100, 8).tolist() != first.tolist()
    many = noise.at(1, 0, 500)
    assert (int(many.min()), int(many.max())) == (1, 49)
    assert NoiseTokens(0, 50, mask=9).at(5, 1, 3).tolist() == [9, 9, 9]


def test_shapes_follow_the_flags_of_the_field() -> None:
    assert uno_shape(None, None, 8) == UnoShape(8, 1, 8)
    assert uno_shape(7, 32, 8) == UnoShape(8, 32, 8)
    assert uno_shape(15, 32, 60) == UnoShape(16, 32, 60)
    tier = uno_shape(15, 32, 60).tier("uno")
    assert (tier.num_steps, tier.topk, tier.num_draft_tokens) == (16, 32, 61)


REFUSED = {
    "narrow": ((None, 1, 1), r"drafts 1 token a round"),
    "few nodes": ((9, 4, 8), r"num_draft_tokens 8 is below the 10 rows"),
    "many nodes": ((7, 4, 129), r"129 is over the 128 that UNO takes"),
    "candidates": ((7, 32, 65), r"65 times eagle_topk 32 is over the 2048"),
    "no room": ((3, 4, 11), r"11 is over the 10 nodes of a UNO tree of num_steps 3"),
}


@pytest.mark.parametrize("flags,message", REFUSED.values(), ids=REFUSED.keys())
def test_shapes_that_the_field_refuses_are_refused(
    flags: tuple[int | None, int, int], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        uno_shape(*flags)


def test_adapters_may_lie_in_a_folder_of_their_own(tmp_path: Path, folder: Path) -> None:
    write_adapter(tmp_path / "repo" / "adapter", folder)
    found = adapter_folder(tmp_path / "repo")
    assert found == tmp_path / "repo" / "adapter"
    assert adapter_folder(found) == found
    assert open_checkpoint(found).kind is Kind.UNO


NAME = "base_model.model.model.layers.1.mlp.up_proj"
FAULTS = {
    "missing": (
        lambda w: w.pop(f"{NAME}.lora_B.weight"),
        r"lacks tensor base_model\.model\.model\.layers\.1\.mlp\.up_proj\.lora_B\.weight",
    ),
    "extra": (lambda w: w.update(stray=torch.zeros(2)), r"tensor stray left over"),
    "shape": (
        lambda w: w.update({f"{NAME}.lora_A.weight": torch.zeros(4, 7)}),
        r"up_proj\.lora_A\.weight has the shape \[4, 7\], expected \[4, 64\]",
    ),
}


@pytest.mark.parametrize("harm,message", FAULTS.values(), ids=FAULTS.keys())
def test_wrong_tensors_are_named(
    tmp_path: Path, folder: Path, target: Plain, harm: Any, message: str
) -> None:
    path = write_adapter(tmp_path / "uno", folder)
    weights = load_file(path / "adapter_model.safetensors")
    harm(weights)
    save_file(weights, path / "adapter_model.safetensors")
    with pytest.raises(GraftError, match=message):
        loaded(path, target)


CONFIGS: dict[str, tuple[Mapping[str, Any], str]] = {
    "kind": ({"peft_type": "IA3"}, r"IA3, expected LORA"),
    "dora": ({"use_dora": True}, r"DoRA, expected LORA"),
    "bias": ({"bias": "all"}, r"bias is 'all', expected none"),
    "pattern": ({"rank_pattern": {"q_proj": 8}}, r"rank_pattern is not offered"),
    "target": ({"target_modules": ["q_proj", "lm_head"]}, r"target_modules holds lm_head"),
    "regex": ({"target_modules": ".*_proj"}, r"expected a list of names"),
    "rank": ({"r": 0}, r"r is 0, expected a number from 1 on"),
    "alpha": ({"lora_alpha": None}, r"lora_alpha is None"),
}


@pytest.mark.parametrize("options,message", CONFIGS.values(), ids=CONFIGS.keys())
def test_configs_that_cannot_be_run_are_refused(
    tmp_path: Path, folder: Path, target: Plain, options: Mapping[str, Any], message: str
) -> None:
    path = write_adapter(tmp_path / "uno", folder, options=options)
    with pytest.raises(GraftError, match=message):
        loaded(path, target)


@pytest.mark.parametrize("rule", [AcceptRule.ACCEPT_RULE_REJECTION, AcceptRule.ACCEPT_RULE_BLOCK])
def test_rules_that_compare_probabilities_get_what_was_drawn(
    net: UnoNet, target: Plain, rule: AcceptRule.ValueType
) -> None:
    """The first token is drawn from the target's own law, so it is always accepted."""
    sampling = Sampling(temperature=0.9, seed=5, rule=rule)
    script = Script.written(target, PROMPT, 3)
    script.sampling = sampling
    drafter = proposer(net, target, BUSH)
    mirror = script.mirror(len(PROMPT) + 1, 320)
    (made,) = drafter.propose([Seat(mirror, drafter.options.tier, drafter.open(mirror))])
    assert isinstance(made, Sampled)
    assert made.tree.max_depth == made.tree.num_nodes - 1 == len(made.probs) == 4
    logs = target.log_probs(mirror.prefix.tokens.tolist())[-1]
    own = (logs / 0.9).softmax(-1)
    # Cut to its likeliest tokens, which hold nearly all of it.
    first = made.probs[0]
    assert np.allclose(first.probs, own[torch.from_numpy(first.tokens).long()], atol=0.01)
