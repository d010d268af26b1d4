"""An MTP layer in training: the function that drafters run, and losses where they belong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from graft.common.model_files import resolve
from graft.draft.checkpoints.borrowed import Borrowed, borrow_files
from graft.draft.checkpoints.detect import Kind, open_checkpoint
from graft.draft.checkpoints.mtp import load_mtp
from graft.testing.dense_mtp import DenseMtp
from graft.testing.models import write_tiny_model
from graft.testing.plain import Plain
from graft.testing.train_window import train_target, window_of
from graft.train.mtp import MtpTrainee, fresh_mtp
from graft.train.unroll import UnrollOptions

LAYERS, VOCAB = 3, 320
PROMPT = list(range(40, 52))
STEPS = 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tiny_model(tmp_path_factory.mktemp("target") / "tiny", layers=LAYERS)


@pytest.fixture(scope="module")
def plain(folder: Path) -> Plain:
    return Plain.load(folder)


@pytest.fixture(scope="module")
def borrowed(folder: Path) -> Borrowed:
    return borrow_files(resolve(str(folder), weights=True))


def trainee_of(borrowed: Borrowed, draft_tokens: int = VOCAB) -> MtpTrainee:
    """A fresh one, shaken a little and rounded to what a file can hold."""
    torch.manual_seed(1)
    net = fresh_mtp(borrowed, torch.float32, unit=1.0)
    with torch.no_grad():
        for one in net.parameters():
            one.add_(torch.randn_like(one) * 0.05)
            one.copy_(one.bfloat16())
    target = train_target(borrowed, (LAYERS,), draft_tokens)
    options = UnrollOptions(weights=(1.0,) * STEPS, shares=(1.0,) * STEPS)
    return MtpTrainee(net, target, borrowed.head_weight(), options)


def test_steps_are_those_of_the_drafter(
    tmp_path: Path, folder: Path, plain: Plain, borrowed: Borrowed
) -> None:
    trainee = trainee_of(borrowed)
    trainee.save(tmp_path / "mtp")
    tokens = [*PROMPT, *plain.text(PROMPT, 16)]
    batch = window_of(
        plain, borrowed, tokens, (LAYERS,), length=20, prompt_len=len(PROMPT), draft_tokens=VOCAB
    )
    with torch.no_grad():
        steps = [
            (trainee.net.normed(hidden) @ trainee.net.head.T).log_softmax(-1)
            for hidden, _ in trainee._steps(batch, (1.0,) * STEPS)
        ]
    dense = DenseMtp(tmp_path / "mtp", folder, "mimo")
    states = plain.states(tokens, (LAYERS,), True)
    for slot in (0, 7, 19):
        expected = dense.recurrent(
            tokens[1 : slot + 2], states[: slot + 1], tokens[slot + 2 : slot + 1 + STEPS]
        )
        for step, logs in enumerate(steps):
            torch.testing.assert_close(logs[0, slot].double(), expected[step], atol=2e-3, rtol=1e-3)


def test_what_is_saved_loads_as_a_drafter(tmp_path: Path, plain: Plain, borrowed: Borrowed) -> None:
    trainee_of(borrowed).save(tmp_path / "mtp")
    checkpoint = open_checkpoint(tmp_path / "mtp")
    assert checkpoint.kind is Kind.MTP
    net = load_mtp(checkpoint, borrowed, plain.ops)
    assert net.needs is not None and net.needs.layers == (LAYERS,)
    assert {path.name for path in (tmp_path / "mtp").iterdir()} == {
        "config.json",
        "model.safetensors",
    }


def test_only_rows_of_one_segment_teach(plain: Plain, borrowed: Borrowed) -> None:
    """Rows 0 to 7 and 8 on are two texts; a slot learns nothing across, and nothing of prompts."""
    trainee = trainee_of(borrowed)
    tokens = [*PROMPT, *plain.text(PROMPT, 12)]
    batch = window_of(
        plain, borrowed, tokens, (LAYERS,), length=16, prompt_len=len(PROMPT), draft_tokens=VOCAB
    )
    segments = (torch.arange(batch.tokens.shape[1]) >= 8).long()[None]
    batch = replace(batch, segments=segments)
    slots = torch.arange(16)[None]
    places = trainee._places(batch, slots, 1)
    assert places.rows[0].tolist() == list(range(2, 18))
    # Step 1 of slot p learns row p + 2: from 6 on the row is the other text's, until 8 is its own.
    assert (places.weights[0] == 0).tolist() == [slot in (6, 7) for slot in range(16)]
    # The token behind row 11 is the answer's first.
    weights = [0.25 if row < 11 else 1.0 for row in range(2, 18)]
    assert [w for w in places.weights[0].tolist() if w] == weights[:6] + weights[8:]


def test_training_teaches_the_chain(plain: Plain, borrowed: Borrowed) -> None:
    trainee = trainee_of(borrowed, draft_tokens=300)
    tokens = [*PROMPT, *plain.text(PROMPT, 20)]
    batch = window_of(
        plain, borrowed, tokens, (LAYERS,), length=28, prompt_len=len(PROMPT), draft_tokens=300
    )
    optimizer = torch.optim.AdamW(trainee.parameter_groups(), lr=3e-3)
    before = share(trainee.figures(batch)["agree_1"])
    for step in range(30):
        optimizer.zero_grad()
        trainee.loss(replace(batch, seed=step), 1.0).total.backward()
        optimizer.step()
    assert trainee.net.head.shape[0] == 300
    assert before < 0.3 and share(trainee.figures(batch)["agree_1"]) > 0.6


def share(sums: tuple[float, float]) -> float:
    return sums[0] / sums[1]
