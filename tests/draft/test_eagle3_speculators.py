"""EAGLE-3 against the library that trains it: `speculators` from PyPI, where it is installed.

    pip install --no-deps speculators datasets multiprocess dill xxhash hs-connectors pandas
        pyarrow python-dateutil six pytz tzdata

Its dependencies pin versions that Graft does not, so it is no part of the dev extra.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from graft.common.model_files import resolve
from graft.common.tier import Tier
from graft.draft.checkpoints.borrowed import borrow_files
from graft.draft.checkpoints.detect import open_checkpoint
from graft.draft.checkpoints.eagle3 import load_eagle3
from graft.draft.proposers.base import Seat
from graft.draft.proposers.model import ModelOptions, ModelProposer, state_of
from graft.testing.checkpoints import write_eagle3
from graft.testing.lockstep import Script
from graft.testing.models import write_tiny_model
from graft.testing.plain import Plain

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")
library = pytest.importorskip("speculators.models.eagle3", exc_type=ImportError)

BUSH = Tier("eagle3", num_steps=2, topk=3, num_draft_tokens=13)
PROMPT = [72, 101, 108, 108, 111, 44, 32, 119]
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_before_residual": {"options": {"norm_before_residual": True}},
    "norm_before_fc": {"options": {"norm_before_fc": True}},
    "fc_norm": {"options": {"fc_norm": True}},
    "norm_output": {"options": {"norm_output": True}},
    "two layers": {"layers": 2},
}


def their_logits(path: Path, target: Path, tokens: list[int], features: Tensor) -> list[Tensor]:
    """[slots, draft vocab] of the first step, and of a second one over the library's own states.

    The second step's row p holds the token of slot p + 1 and sees slots 0..p and itself.
    """
    config = json.loads((path / "config.json").read_text())
    keys = ("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    made = library.Eagle3SpeculatorConfig(
        transformer_layer_config={
            **config["transformer_layer_config"],
            "attn_implementation": "eager",
        },
        **{key: config[key] for key in keys if key in config},
    )
    made.transformer_layer_config._attn_implementation = "eager"
    model = library.Eagle3DraftModel(made).eval()
    weights = load_file(path / "model.safetensors")
    weights["embed_tokens.weight"] = load_file(target / "model.safetensors")[
        "model.embed_tokens.weight"
    ]
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert all(name.startswith("verifier_") for name in missing)
    seen: list[Tensor] = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    with torch.inference_mode():
        model(
            hidden_states=features[None],
            input_ids=torch.tensor([tokens]),
            document_ids=torch.zeros(1, len(tokens), dtype=torch.long),
            ttt_steps=2,
        )
    return seen


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS.keys())
def test_logits_equal_those_of_the_library(tmp_path: Path, options: Mapping[str, Any]) -> None:
    torch.set_num_threads(1)
    folder = write_tiny_model(tmp_path / "tiny", layers=6)
    target = Plain.load(folder)
    path = write_eagle3(tmp_path / "draft", folder, "speculators", **options)
    borrowed = borrow_files(resolve(str(folder), weights=True))
    net = load_eagle3(open_checkpoint(path), borrowed, target.ops)
    script = Script.written(target, PROMPT, 12, need=net.needs)
    assert script.states is not None and net.token_ids is not None
    x = [*script.prompt, *script.answer]
    mirror = script.mirror(len(PROMPT) + 3, 320)
    drafter = ModelProposer("eagle3", net, target.ops, ModelOptions(BUSH))
    seat = Seat(mirror, BUSH, drafter.open(mirror))
    (tree,) = drafter.propose([seat])
    hidden = state_of(seat).hidden
    assert tree is not None and tree.scores is not None and hidden is not None
    slots = len(mirror.prefix) - 1
    column = {int(token): i for i, token in enumerate(net.token_ids)}
    for child in tree.children(0):
        token = int(tree.tokens[child])
        ids = [*x[1 : slots + 1], token]
        first, second = their_logits(
            path, folder, ids, torch.from_numpy(script.states[: slots + 1].copy())
        )
        ours = net.logits(hidden[None])[0]
        torch.testing.assert_close(ours, first[slots - 1], rtol=1e-4, atol=1e-3)
        logs = second[slots - 1].log_softmax(-1)
        for node in tree.children(child):
            step = float(tree.scores[node]) - float(tree.scores[child])
            assert step == pytest.approx(float(logs[column[int(tree.tokens[node])]]), abs=2e-3)
    assert np.max(tree.depth) == 2
