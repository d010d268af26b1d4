"""DFlash in training: the blocks that drafters guess, and losses where they belong."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from graft.common.model_files import resolve
from graft.draft.checkpoints.borrowed import Borrowed, borrow_files
from graft.draft.checkpoints.detect import Kind, open_checkpoint
from graft.draft.checkpoints.dflash import load_dflash
from graft.testing.dense_dflash import DenseDflash
from graft.testing.models import write_tiny_model
from graft.testing.plain import Plain
from graft.testing.train_window import train_target, window_of
from graft.train.dflash import Blocks, DflashOptions, DflashTrainee
from graft.train.dflash_start import Sample, fresh_dflash
from graft.train.trainee import Batch

VOCAB, MASK = 320, 300
LAYERS = (1, 3, 4)
PROMPT = list(range(40, 52))
OPTIONS = DflashOptions(block_size=4, num_anchors=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tiny_model(tmp_path_factory.mktemp("target") / "tiny", layers=6)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Plain:
    return Plain.load(folder)


@pytest.fixture(scope="module")
def borrowed(folder: Path) -> Borrowed:
    return borrow_files(resolve(str(folder), weights=True))


@pytest.fixture
def trainee(borrowed: Borrowed) -> DflashTrainee:
    """A fresh one, shaken a little and rounded to what a file can hold."""
    torch.manual_seed(1)
    hidden = borrowed.config.hidden_size
    states, words = torch.randn(99, len(LAYERS) * hidden), torch.randn(99, hidden)
    sample = Sample(states, words, borrowed.embedding()[MASK])
    net = fresh_dflash(borrowed, LAYERS, sample, 2, torch.float32)
    with torch.no_grad():
        for one in net.parameters():
            one.add_(torch.randn_like(one) * 0.05)
            one.copy_(one.bfloat16())
        # What is saved is fc in the units of states.
        net.state_scale.fill_(0.5)
    target = train_target(borrowed, LAYERS, VOCAB)
    return DflashTrainee(net, target, borrowed.head_weight(), MASK, OPTIONS)


def batch_of(plain: Plain, borrowed: Borrowed, length: int = 24, more: int = 4) -> Batch:
    tokens = [*PROMPT, *plain.text(PROMPT, length + more - len(PROMPT))]
    return window_of(
        plain,
        borrowed,
        tokens,
        LAYERS,
        length=length,
        prompt_len=len(PROMPT),
        draft_tokens=VOCAB,
    )


def test_blocks_are_those_of_the_drafter(
    tmp_path: Path, folder: Path, plain: Plain, borrowed: Borrowed, trainee: DflashTrainee
) -> None:
    trainee.save(tmp_path / "dflash")
    batch = batch_of(plain, borrowed)
    anchors = torch.tensor([[1, 13, 23]])
    blocks = Blocks(anchors, anchors[..., None] + torch.arange(3), torch.ones(1, 3, 3))
    with torch.no_grad():
        logits = trainee.drafted(batch, blocks) @ trainee.head.T
    dense = DenseDflash(tmp_path / "dflash", folder)
    states = batch.states[0].flatten(1).numpy()
    for place, anchor in enumerate(anchors[0].tolist()):
        expected = dense.logits(int(batch.tokens[0, anchor]), states[:anchor])
        torch.testing.assert_close(logits[0, place].double(), expected, rtol=1e-4, atol=1e-3)


def test_what_is_saved_loads_as_a_drafter(
    tmp_path: Path, plain: Plain, borrowed: Borrowed, trainee: DflashTrainee
) -> None:
    trainee.save(tmp_path / "dflash")
    checkpoint = open_checkpoint(tmp_path / "dflash")
    assert checkpoint.kind is Kind.DFLASH
    net = load_dflash(checkpoint, borrowed, plain.ops)
    assert net.needs is not None and net.needs.layers == LAYERS
    assert net.block.size == OPTIONS.block_size


def test_masks_learn_rows_behind_their_anchor_within_its_text(
    plain: Plain, borrowed: Borrowed, trainee: DflashTrainee
) -> None:
    batch = batch_of(plain, borrowed)
    segments = (torch.arange(batch.tokens.shape[1]) >= 15).long()[None]
    batch = replace(batch, segments=segments)
    blocks = trainee.blocks(batch, 24)
    assert blocks.anchors[0].tolist() == list(range(24))
    assert blocks.rows[0, 13].tolist() == [13, 14, 15]
    decay = [1.0, math.exp(-1 / 2), math.exp(-2 / 2)]
    weights = blocks.weights[0]
    # Row 10 has a token of the prompt behind it, row 11 the answer's first.
    assert not weights[:11].any()
    torch.testing.assert_close(weights[11], torch.tensor(decay))
    # Row 13's third mask would be a word of the other text.
    torch.testing.assert_close(weights[13], torch.tensor([*decay[:2], 0.0]))
    assert weights[15:].all()


def test_anchors_are_drawn_among_rows_of_answers(
    plain: Plain, borrowed: Borrowed, trainee: DflashTrainee
) -> None:
    batch = batch_of(plain, borrowed)
    drawn = [trainee.blocks(replace(batch, seed=seed), 6).anchors[0] for seed in range(4)]
    assert all(int(one.min()) >= len(PROMPT) - 1 for one in drawn)
    assert all(len(set(one.tolist())) == 6 for one in drawn)
    assert len({tuple(one.tolist()) for one in drawn}) > 1


def test_a_block_sees_nothing_of_its_anchor_states_or_later(
    plain: Plain, borrowed: Borrowed, trainee: DflashTrainee
) -> None:
    batch = batch_of(plain, borrowed)
    anchors = torch.tensor([[14]])
    blocks = Blocks(anchors, anchors[..., None] + torch.arange(3), torch.ones(1, 1, 3))
    other = batch.states.clone()
    other[:, 14:] = 7.0
    with torch.no_grad():
        before = trainee.drafted(batch, blocks)
        after = trainee.drafted(replace(batch, states=other), blocks)
        other[:, 13] = 7.0
        changed = trainee.drafted(replace(batch, states=other), blocks)
    assert torch.equal(before, after)
    assert not torch.allclose(before, changed)


def test_a_batch_of_prompts_alone_teaches_nothing(
    plain: Plain, borrowed: Borrowed, trainee: DflashTrainee
) -> None:
    batch = batch_of(plain, borrowed)
    loss = trainee.loss(replace(batch, answer=torch.zeros_like(batch.answer)), 1.0)
    assert loss.total == 0
    loss.total.backward()
    assert all(one.grad is None or not one.grad.any() for one in trainee.parameters())


def test_training_teaches_the_blocks(
    plain: Plain, borrowed: Borrowed, trainee: DflashTrainee
) -> None:
    batch = batch_of(plain, borrowed)
    optimizer = torch.optim.AdamW(trainee.parameter_groups(), lr=3e-3)
    before = share(trainee.figures(batch)["accept_length"])
    for step in range(40):
        optimizer.zero_grad()
        trainee.loss(replace(batch, seed=step), 1.0).total.backward()
        optimizer.step()
    assert before < 1.3 and share(trainee.figures(batch)["accept_length"]) > 2.0


def share(sums: tuple[float, float]) -> float:
    return sums[0] / sums[1]
