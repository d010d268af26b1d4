"""A head in training computes what a draft service computes from the files it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

from graft.draft.checkpoints.borrowed import Borrowed, borrow
from graft.draft.checkpoints.detect import open_checkpoint
from graft.draft.checkpoints.eagle3 import load_eagle3
from graft.draft.nets.eagle3 import Eagle3Net as DraftNet
from graft.kernels.ops import select
from graft.testing.models import write_tiny_model
from graft.testing.steps import Layout, Piece
from graft.testing.training import MemoryCorpus, law_maker, tiny_trainee
from graft.train.unroll import Eagle3Trainee, UnrollOptions
from graft.train.windows import Windows, WindowShape

LENGTH = 24


@pytest.fixture(scope="module")
def borrowed(tmp_path_factory: pytest.TempPathFactory) -> Borrowed:
    torch.set_num_threads(1)
    return borrow(str(write_tiny_model(tmp_path_factory.mktemp("target"), layers=7)))


def rounded(trainee: Eagle3Trainee) -> Eagle3Trainee:
    """In place: weights as the files will hold them."""
    net = trainee.net
    with torch.no_grad():
        net.fc.copy_((net.fc * net.state_scale).bfloat16().float() / net.state_scale)
        for one in net.parameters():
            if one is not net.fc:
                one.copy_(one.bfloat16().float())
    return trainee


def loaded(trainee: Eagle3Trainee, borrowed: Borrowed, folder: Path) -> DraftNet:
    trainee.save(folder)
    return load_eagle3(open_checkpoint(folder), borrowed, select("cpu", 1, "torch"))


def chain_logits(net: DraftNet, tokens: Tensor, features: Tensor, slot: int, steps: int) -> Tensor:
    """[steps, draft vocab]: what a draft service makes of a prefix and the tokens behind it."""
    shape = net.kv_shape
    layout = Layout(shape.num_layers, shape.num_kv_heads, shape.head_dim)
    ids, rows = layout.rows([Piece(0, 0, tokens[: slot + 1].tolist())])
    hidden = net.forward(ids, net.fuse(features[: slot + 1]), rows, layout.kv)[-1:]
    logits = [net.logits(hidden)]
    for step in range(1, steps):
        ids, rows = layout.rows([Piece(0, slot + step, [int(tokens[slot + step])])])
        hidden = net.forward(ids, hidden, rows, layout.kv)
        logits.append(net.logits(hidden))
    return torch.cat(logits)


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_every_unrolled_step_equals_a_drafted_chain(
    tmp_path: Path, borrowed: Borrowed, share: float
) -> None:
    shares = (1.0, share, share, share)
    trainee = rounded(tiny_trainee(borrowed, options=UnrollOptions(shares=shares)))
    net = loaded(trainee, borrowed, tmp_path)
    corpus = MemoryCorpus([LENGTH + 6], trainee.layers)
    windows = Windows(
        corpus, corpus.refs, trainee.layers, WindowShape(LENGTH, trainee.margin, 1), None
    )
    batch = windows.batch(0)
    with torch.inference_mode():
        for step, (hidden, places) in enumerate(trainee._steps(batch, shares)):
            ours = trainee.net.normed(hidden) @ trainee.net.head.T
            assert places.slots.shape[1] == round(LENGTH * shares[step])
            for at, slot in enumerate(places.slots[0].tolist()):
                theirs = chain_logits(
                    net, batch.following[0], batch.states[0].flatten(1), slot, step + 1
                )
                assert torch.allclose(ours[0, at], theirs[-1], atol=2e-3, rtol=1e-3)


def test_half_precision_stays_near(tmp_path: Path, borrowed: Borrowed) -> None:
    exact = rounded(tiny_trainee(borrowed))
    half = tiny_trainee(borrowed, dtype=torch.bfloat16)
    half.load_state_dict(exact.state_dict())
    corpus = MemoryCorpus([40], exact.layers)
    windows = Windows(corpus, corpus.refs, exact.layers, WindowShape(24, 4, 1), None)
    with torch.inference_mode():
        for (one, _), (other, _) in zip(
            exact._steps(windows.batch(0), (1.0,) * 4),
            half._steps(windows.batch(0), (1.0,) * 4),
            strict=True,
        ):
            assert (one - other).norm() < 0.03 * one.norm()


def test_rows_of_another_segment_are_out_of_sight(borrowed: Borrowed) -> None:
    """Two sequences in one window come to what each comes to alone."""
    trainee = tiny_trainee(borrowed)
    corpus = MemoryCorpus([13, 17], trainee.layers)
    shape = WindowShape(28, trainee.margin, 1)
    both = Windows(corpus, corpus.refs, trainee.layers, shape, None).batch(0)
    alone = Windows(
        corpus, corpus.refs[1:], trainee.layers, WindowShape(16, trainee.margin, 1), None
    ).batch(0)
    with torch.inference_mode():
        pairs = zip(
            trainee._steps(both, (1.0,) * 4), trainee._steps(alone, (1.0,) * 4), strict=True
        )
        for step, ((joined, places), (single, own)) in enumerate(pairs):
            inside = 16 - step - 1
            assert torch.allclose(joined[0, 12 : 12 + inside], single[0, :inside], atol=1e-4)
            assert torch.equal(places.weights[0, 12:28], own.weights[0])
            # The last slots of a sequence have nothing to guess.
            assert not places.weights[0, 12 - step - 1 : 12].any()


def test_prompts_count_less_and_undrafted_tokens_not_at_all(borrowed: Borrowed) -> None:
    trainee = tiny_trainee(borrowed)
    corpus = MemoryCorpus([40], trainee.layers)
    windows = Windows(corpus, corpus.refs, trainee.layers, WindowShape(24, 4, 1), None)
    batch = windows.batch(0)
    _, places = next(iter(trainee._steps(batch, (1.0,))))
    for slot, weight in enumerate(places.weights[0].tolist()):
        token = int(batch.following[0, slot + 1])
        expected = 0.25 if slot + 2 < 3 else 1.0
        assert weight == (expected if token in trainee.target.draft_tokens else 0.0)


@pytest.mark.parametrize("accept", ["greedy", "coupled", "overlap"])
def test_a_few_steps_learn_a_batch_by_heart(borrowed: Borrowed, accept: str) -> None:
    options = UnrollOptions(accept=accept, accept_from=0.0)
    trainee = tiny_trainee(borrowed, options=options)
    corpus = MemoryCorpus([60, 60], trainee.layers)
    laws = corpus.laws(law_maker(borrowed, trainee.target.draft_tokens))
    windows = Windows(corpus, corpus.refs, trainee.layers, WindowShape(56, 4, 2), 0, laws)
    optimizer = torch.optim.AdamW(trainee.parameters(), lr=3e-3)
    seen = []
    for _ in range(25):
        loss = trainee.loss(windows.batch(0), 1.0)
        loss.total.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.figures["agree_1"])
    assert sum(seen[-3:]) / 3 > seen[0] + 0.3


def test_the_layers_of_a_shallow_target_are_named_in_the_file(
    tmp_path: Path, borrowed: Borrowed
) -> None:
    trainee = tiny_trainee(borrowed)
    trainee.save(tmp_path / "deep")
    assert "eagle_config" not in json.loads((tmp_path / "deep/config.json").read_text())
    shallow = borrow(str(write_tiny_model(tmp_path / "target", layers=2)))
    other = tiny_trainee(shallow)
    net = loaded(other, shallow, tmp_path / "two")
    assert net.needs is not None and net.needs.layers == other.layers == (0, 1, 2)
    # vLLM reads the ids at the top and SGLang those inside, one lower for the same state.
    said = json.loads((tmp_path / "two/config.json").read_text())
    ids = "eagle_aux_hidden_state_layer_ids"
    assert (said[ids], said["eagle_config"][ids]) == ([0, 1, 2], [-1, 0, 1])


def test_a_head_goes_on_from_its_file_with_another_vocabulary(
    tmp_path: Path, borrowed: Borrowed
) -> None:
    first = rounded(tiny_trainee(borrowed, num_drafted=120))
    first.save(tmp_path)
    other = tiny_trainee(borrowed, num_drafted=90)
    with torch.no_grad():
        for one in other.net.parameters():
            one.normal_()
        other.net.state_scale.mul_(1.7)
    other.read(tmp_path)
    assert torch.equal(other.net.head, first.net.head[:90])
    states = torch.randn(5, other.net.fc.shape[1])
    assert torch.allclose(other.net.fuse(states), first.net.fuse(states), atol=1e-4, rtol=1e-3)
    for name in ("qkv", "output", "gate_up", "down", "mlp_norm", "final_norm"):
        assert torch.equal(getattr(other.net, name), getattr(first.net, name))
