"""Published layouts: what a folder is, what a config key means, errors that name a tensor."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from graft.common.errors import GraftError, InvalidArgument, Mismatch, ModelNotFound, Unsupported
from graft.common.model_files import resolve
from graft.draft.checkpoints.borrowed import Borrowed, borrow_files
from graft.draft.checkpoints.detect import Kind, detect, open_checkpoint
from graft.draft.checkpoints.eagle import load_eagle, read_token_map
from graft.draft.checkpoints.eagle3 import captured_layers, eagle3_config, load_eagle3
from graft.draft.checkpoints.tensors import open_tensors
from graft.draft.server import make_proposers
from graft.draft.settings import DraftSettings
from graft.kernels.ops import Ops, select
from graft.testing.checkpoints import (
    EAGLE3_LAYOUTS,
    EAGLE_LAYOUTS,
    write_eagle,
    write_eagle3,
    write_token_map,
)
from graft.testing.models import write_tiny_model

_IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_tiny_model(tmp_path_factory.mktemp("target") / "tiny", layers=6)


@pytest.fixture(scope="module")
def borrowed(folder: Path) -> Borrowed:
    return borrow_files(resolve(str(folder), weights=True))


@pytest.fixture(scope="module")
def ops() -> Ops:
    return select("cpu")


def edit(path: Path, change: Callable[[dict[str, Tensor]], Any]) -> Path:
    """Rewrites the tensors of a checkpoint."""
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file({name: x.contiguous() for name, x in tensors.items()}, path / "model.safetensors")
    return path


def edit_config(path: Path, **keys: Any) -> Path:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **keys}))
    return path


@pytest.mark.parametrize("layout", EAGLE3_LAYOUTS)
def test_every_eagle3_layout_is_recognised(tmp_path: Path, folder: Path, layout: str) -> None:
    path = write_eagle3(tmp_path / "draft", folder, layout)
    assert open_checkpoint(path).kind is Kind.EAGLE3


@pytest.mark.parametrize("layout", EAGLE_LAYOUTS)
def test_every_eagle_layout_is_recognised(tmp_path: Path, folder: Path, layout: str) -> None:
    path = write_eagle(tmp_path / "draft", folder, layout)
    assert open_checkpoint(path, allow_pickle=True).kind is Kind.EAGLE


def test_a_small_decoder_is_recognised(folder: Path) -> None:
    assert open_checkpoint(folder).kind is Kind.STANDALONE


def test_other_kinds_are_told_apart_by_config_and_names() -> None:
    assert detect({"dflash_config": {}}, {"fc.weight"}) is Kind.DFLASH
    assert detect({"speculators_model_type": "dflash"}, set()) is Kind.DFLASH
    assert detect({"architectures": ["MiMoMTP"]}, set()) is Kind.MTP
    assert detect({}, {"model.layers.61.eh_proj.weight"}) is Kind.MTP
    assert detect({}, {"classifier.weight"}) is None


def test_a_folder_of_something_else_is_refused(tmp_path: Path) -> None:
    save_file({"classifier.weight": torch.zeros(2, 2)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelNotFound, match="no drafter that is known here"):
        open_checkpoint(tmp_path)


BROKEN: dict[str, tuple[Callable[[dict[str, Tensor]], Any], str]] = {
    "missing": (lambda t: t.pop("midlayer.mlp.up_proj.weight"), "lacks tensor .*up_proj"),
    "missing norm": (lambda t: t.pop("norm.weight"), "lacks tensor norm.weight"),
    "missing d2t": (lambda t: t.pop("d2t"), "lacks tensor d2t"),
    "shape": (
        lambda t: t.update({"fc.weight": torch.zeros(64, 128)}),
        r"fc.weight has the shape \[64, 128\], expected \[64, 192\]",
    ),
    "extra": (
        lambda t: t.update({"layers.7.mlp.up_proj.weight": torch.zeros(1)}),
        "layers.7.mlp.up_proj.weight left over",
    ),
    "d2t range": (lambda t: t["d2t"].add_(300), r"d2t leads outside 0\.\.319"),
    "d2t twice": (lambda t: t["d2t"].copy_(-torch.arange(120)), "one token twice"),
    "t2d": (lambda t: t["t2d"].logical_not_(), "t2d and d2t name different tokens"),
}


@pytest.mark.parametrize("change, sentence", BROKEN.values(), ids=BROKEN.keys())
def test_a_broken_eagle3_checkpoint_is_named(
    tmp_path: Path,
    folder: Path,
    borrowed: Borrowed,
    ops: Ops,
    change: Callable[[dict[str, Tensor]], Any],
    sentence: str,
) -> None:
    path = edit(write_eagle3(tmp_path / "draft", folder), change)
    with pytest.raises(ModelNotFound, match=sentence):
        load_eagle3(open_checkpoint(path), borrowed, ops)


def test_a_broken_eagle_checkpoint_is_named(
    tmp_path: Path, folder: Path, borrowed: Borrowed, ops: Ops
) -> None:
    path = write_eagle(tmp_path / "draft", folder, "qwen2")
    edit(path, lambda t: t.pop("layers.0.mlp.down_proj.weight"))
    with pytest.raises(ModelNotFound, match=r"lacks tensor layers\.0\.mlp\.down_proj\.weight"):
        load_eagle(open_checkpoint(path), borrowed, ops)


def test_a_file_cut_short_is_named(tmp_path: Path, folder: Path) -> None:
    path = write_eagle3(tmp_path / "draft", folder) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelNotFound, match="damaged or cut short"):
        open_checkpoint(path.parent)


MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "vocab": ({"vocab_size": 400}, "vocab_size 400, the target tiny has 320"),
    "hidden": ({"target_hidden_size": 96}, "target_hidden_size 96, the target tiny has 64"),
}


@pytest.mark.parametrize("keys, sentence", MISFITS.values(), ids=MISFITS.keys())
def test_a_head_for_another_target_says_what_differs(
    tmp_path: Path,
    folder: Path,
    borrowed: Borrowed,
    ops: Ops,
    keys: Mapping[str, Any],
    sentence: str,
) -> None:
    path = edit_config(write_eagle3(tmp_path / "draft", folder), **keys)
    with pytest.raises(Mismatch, match=sentence):
        load_eagle3(open_checkpoint(path), borrowed, ops)


# (config, layers of the target, its model_type) -> states in Hugging Face numbering
CAPTURED: list[tuple[dict[str, Any], int, str, tuple[int, ...]]] = [
    ({}, 32, "llama", (2, 16, 29)),
    ({"eagle_config": {_IDS: [1, 29, 57]}}, 61, "deepseek_v3", (2, 30, 58)),
    ({"eagle_config": {_IDS: [2, 30, 58]}}, 61, "deepseek_v3", (2, 30, 58)),
    ({"eagle_config": {_IDS: [1, 17, 33]}}, 36, "gpt_oss", (2, 18, 34)),
    ({"eagle_config": {_IDS: [1, 18, 36]}}, 36, "gpt_oss", (1, 18, 36)),
    ({"eagle_config": {_IDS: [1, 15, 28]}}, 32, "llama", (2, 16, 29)),
    ({_IDS: [29, 2, 16, 2]}, 32, "llama", (2, 16, 29)),
    ({"speculators_model_type": "eagle3", _IDS: [2, 16, 29]}, 32, "llama", (2, 16, 29)),
]


@pytest.mark.parametrize("config, num_layers, family, layers", CAPTURED)
def test_layer_ids_of_every_convention_become_hugging_face_states(
    config: dict[str, Any], num_layers: int, family: str, layers: tuple[int, ...]
) -> None:
    assert captured_layers(config, num_layers, family) == layers


def test_layers_that_a_target_lacks_are_refused() -> None:
    with pytest.raises(ModelNotFound, match="hidden state 33, the target has 0 to 32"):
        captured_layers({"eagle_config": {_IDS: [2, 32]}}, 32, "llama")
    with pytest.raises(ModelNotFound, match="hidden state -1"):
        captured_layers({}, 2, "llama")


def test_both_norms_before_fc_exclude_each_other(borrowed: Borrowed) -> None:
    config = {**borrowed.raw, "norm_before_fc": True, "fc_norm": True}
    with pytest.raises(Unsupported, match="norm_before_fc and fc_norm"):
        eagle3_config(config, borrowed)


class _Evil:
    def __reduce__(self) -> Any:
        return os.system, ("echo never",)


def test_pickle_files_need_a_flag_and_run_no_code(tmp_path: Path, folder: Path) -> None:
    path = write_eagle(tmp_path / "draft", folder, "safeailab")
    with pytest.raises(Unsupported, match=r"pytorch_model\.bin.*allow_pickle"):
        open_tensors(path)
    assert "fc.weight" in open_tensors(path, allow_pickle=True)
    torch.save({"fc.weight": _Evil()}, path / "pytorch_model.bin")
    with pytest.raises(GraftError, match="holds more than tensors"):
        open_tensors(path, allow_pickle=True)


@pytest.mark.parametrize("as_list", [True, False])
def test_token_maps_come_as_list_or_tensor(tmp_path: Path, folder: Path, as_list: bool) -> None:
    path = write_token_map(tmp_path / "freq.pt", folder, 120, as_list)
    ids = read_token_map(path, 320)
    assert len(ids) == 120 and ids.dtype is torch.int64


@pytest.mark.parametrize(
    "content, sentence",
    [
        ([1, 2, 320], "names token 320"),
        ([1, -2], "names token -2"),
        ([3, 3], "names a token twice"),
        ([], "no list of token ids"),
        ({"a": 1}, "no list of token ids"),
        ([1.5], "no list of token ids"),
    ],
)
def test_a_token_map_of_something_else_is_refused(
    tmp_path: Path, content: Any, sentence: str
) -> None:
    torch.save(content, tmp_path / "freq.pt")
    with pytest.raises(ModelNotFound, match=sentence):
        read_token_map(tmp_path / "freq.pt", 320)


def tiers(**flags: Any) -> list[tuple[str, int, int, int]]:
    made = make_proposers(DraftSettings.load(None, flags))
    found = [one.describe().default_tier for one in made]
    return [(t.proposer, t.num_steps, t.topk, t.num_draft_tokens) for t in found]


def test_unset_shapes_resolve_as_the_field_does(tmp_path: Path, folder: Path) -> None:
    head = write_eagle3(tmp_path / "draft", folder)
    named = {"proposers": [f"eagle3={head}", f"standalone={folder}", "ngram"], "model": str(folder)}
    assert tiers(**named) == [
        ("eagle3", 5, 4, 8),
        ("standalone", 3, 1, 4),
        ("ngram", 11, 10, 12),
    ]
    chain = {"proposers": [f"eagle3={head}"], "model": str(folder), "eagle_topk": 1}
    assert tiers(**chain) == [("eagle3", 5, 1, 6)]
    assert tiers(**chain, num_steps=2, num_draft_tokens=9) == [("eagle3", 2, 1, 3)]
    assert tiers(**{**chain, "eagle_topk": 2}, num_steps=9) == [("eagle3", 9, 2, 10)]


def test_settings_that_do_not_go_together_are_refused(tmp_path: Path, folder: Path) -> None:
    head = write_eagle3(tmp_path / "draft", folder)
    with pytest.raises(InvalidArgument, match="needs a checkpoint"):
        tiers(proposers=["eagle3"])
    with pytest.raises(InvalidArgument, match="model names the target"):
        tiers(proposers=["eagle3"], draft_model_path=str(head))
    with pytest.raises(InvalidArgument, match="for proposer eagle3, not standalone"):
        tiers(proposers=["standalone"], draft_model_path=str(head))
    with pytest.raises(ModelNotFound, match="there is no draft checkpoint"):
        tiers(proposers=["eagle3"], draft_model_path=str(tmp_path / "nowhere"))
    with pytest.raises(InvalidArgument, match="did you mean eagle3"):
        tiers(proposers=["eagl3"])


def test_a_drafter_with_other_words_is_refused(tmp_path: Path, folder: Path) -> None:
    other = write_tiny_model(tmp_path / "other", seed=3)
    words = json.loads((other / "tokenizer.json").read_text())
    words["added_tokens"][0]["content"] = "<|other|>"
    (other / "tokenizer.json").write_text(json.dumps(words))
    with pytest.raises(Mismatch, match="another tokenizer"):
        tiers(proposers=["standalone"], draft_model_path=str(other), model=str(folder))
