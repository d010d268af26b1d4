"""Logits of every family equal transformers', however the rows are cut into steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from graft.common.errors import Unsupported
from graft.common.model_files import ModelFiles
from graft.kernels.ops import Ops, select
from graft.models.decoder import Capture, Decoder
from graft.models.load import Target, load_target
from graft.testing.models import FAMILIES, write_tiny_model
from graft.testing.steps import Layout, Piece

LENGTH = 160
TOLERANCE = 1e-4


@dataclass(frozen=True)
class Pair:
    """One tiny model, loaded by us and by transformers."""

    target: Target
    theirs: Any

    @property
    def decoder(self) -> Decoder:
        return self.target.decoder

    def layout(self, num_sequences: int = 1) -> Layout:
        config = self.target.config
        return Layout(
            config.num_layers, config.num_kv_heads, config.head_dim, num_sequences, LENGTH + 32
        )

    def ours(self, layout: Layout, pieces: list[Piece]) -> Tensor:
        tokens, rows = layout.rows(pieces)
        decoder = self.decoder
        return decoder.logits(decoder.forward(tokens, rows, layout.kv, None))

    def expected(self, tokens: list[int]) -> Tensor:
        with torch.no_grad():
            logits: Tensor = self.theirs(torch.tensor([tokens])).logits[0]
        return logits


def load_pair(folder: Path, ops: Ops) -> Pair:
    theirs = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    return Pair(load_target(ModelFiles(folder, folder.name), ops), theirs.eval())


def tokens_of(seed: int, length: int = LENGTH) -> list[int]:
    ids: list[int] = np.random.default_rng(seed).integers(0, 259, length).tolist()
    return ids


@pytest.fixture(scope="module", params=["torch", "native"])
def ops(request: pytest.FixtureRequest) -> Ops:
    try:
        return select("cpu", threads=1, prefer=request.param)
    except Unsupported as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def pair_of(ops: Ops, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Pair]:
    torch.set_num_threads(1)

    @cache
    def pair(family: str, **overrides: Any) -> Pair:
        folder = tmp_path_factory.mktemp(family)
        write_tiny_model(folder, family, overrides=dict(overrides))
        return load_pair(folder, ops)

    return pair


@pytest.mark.parametrize("family", FAMILIES)
def test_a_prefill_in_one_step_has_the_logits_of_transformers(
    pair_of: Callable[..., Pair], family: str
) -> None:
    pair, tokens = pair_of(family), tokens_of(1)
    found = pair.ours(pair.layout(), [Piece(0, 0, tokens)])
    torch.testing.assert_close(found, pair.expected(tokens), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_chunks_shared_with_another_sequence_have_the_logits_of_transformers(
    pair_of: Callable[..., Pair], family: str
) -> None:
    pair, first, second = pair_of(family), tokens_of(2), tokens_of(3)
    layout, found = pair.layout(num_sequences=2), []
    for start in range(0, LENGTH, 40):
        chunk = Piece(1, start, first[start : start + 40])
        other = Piece(0, start, second[start : start + 40])
        found.append(pair.ours(layout, [other, chunk])[40:])
    torch.testing.assert_close(torch.cat(found), pair.expected(first), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_token_a_step_has_the_logits_of_transformers(
    pair_of: Callable[..., Pair], family: str
) -> None:
    pair, tokens = pair_of(family), tokens_of(4)
    layout = pair.layout()
    found = [pair.ours(layout, [Piece(0, 0, tokens[:150])])]
    found += [pair.ours(layout, [Piece(0, at, tokens[at : at + 1])]) for at in range(150, LENGTH)]
    torch.testing.assert_close(torch.cat(found), pair.expected(tokens), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_node_has_the_logits_of_its_path_as_a_chain(
    pair_of: Callable[..., Pair], family: str
) -> None:
    pair, prefix = pair_of(family), tokens_of(5, 150)
    nodes = [65, 66, 67, 68, 69, 70, 71]
    parents = [-1, 0, 1, 1, 0, 4, 5]
    layout = pair.layout()
    pair.ours(layout, [Piece(0, 0, prefix)])
    found = pair.ours(layout, [Piece(0, len(prefix), nodes, parents)])
    for node in range(len(nodes)):
        path: list[int] = []
        at = node
        while at >= 0:
            path.insert(0, nodes[at])
            at = parents[at]
        expected = pair.expected(prefix + path)[-1]
        torch.testing.assert_close(found[node], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_has_the_same_bits_in_a_batch_a_chunk_a_tree_and_alone(
    pair_of: Callable[..., Pair], ops: Ops, family: str
) -> None:
    if not ops.batch_invariant:
        pytest.skip(f"{ops.name} does not promise it")
    pair, tokens, other = pair_of(family), tokens_of(12), tokens_of(13)
    alone = pair.layout()
    expected = torch.cat([pair.ours(alone, [Piece(0, at, [tokens[at]])]) for at in range(LENGTH)])
    assert torch.equal(pair.ours(pair.layout(), [Piece(0, 0, tokens)]), expected)
    shared, found = pair.layout(num_sequences=2), []
    for start in range(0, 140, 35):
        mine = Piece(1, start, tokens[start : start + 35])
        found.append(pair.ours(shared, [Piece(0, start, other[start : start + 5]), mine])[5:])
    assert torch.equal(torch.cat(found), expected[:140])
    rest = tokens[140:]
    parents = list(range(-1, len(rest) - 1))
    tree = Piece(1, 140, [*rest, 7, 8], [*parents, 3, 0])
    assert torch.equal(pair.ours(shared, [tree])[: len(rest)], expected[140:])


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_layers_in_one_call_have_the_bits_of_layers_op_by_op(
    pair_of: Callable[..., Pair], ops: Ops, family: str
) -> None:
    pair, tokens = pair_of(family), tokens_of(14)
    decoder = pair.decoder

    class Singly:
        """The same ops without the call that runs all layers."""

        def __getattr__(self, name: str) -> Any:
            return getattr(ops, name)

        def stack(self, layers: Any) -> None:
            return None

    singly = Decoder(decoder.config, decoder.weights, cast(Ops, Singly()))
    ids, rows = pair.layout().rows([Piece(0, 0, tokens)])
    found = [one.forward(ids, rows, pair.layout().kv, None) for one in (decoder, singly)]
    assert torch.equal(found[0], found[1])


def test_a_window_hides_what_lies_before_it(pair_of: Callable[..., Pair]) -> None:
    windowed, open_ = pair_of("mistral"), pair_of("mistral", sliding_window=None)
    tokens = tokens_of(6)
    narrow = windowed.ours(windowed.layout(), [Piece(0, 0, tokens)])
    wide = open_.ours(open_.layout(), [Piece(0, 0, tokens)])
    assert windowed.target.config.windows == (48, 48)
    torch.testing.assert_close(narrow[:48], wide[:48], atol=1e-5, rtol=0)
    assert (narrow[LENGTH - 1] - wide[LENGTH - 1]).abs().max() > 0.1


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwen_layers_past_max_window_layers_slide(
    pair_of: Callable[..., Pair], family: str
) -> None:
    pair = pair_of(family, use_sliding_window=True, sliding_window=40, max_window_layers=1)
    tokens = tokens_of(7)
    assert pair.target.config.windows == (0, 40)
    found = pair.ours(pair.layout(), [Piece(0, 0, tokens)])
    torch.testing.assert_close(found, pair.expected(tokens), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"head_dim": 24}),
        ("llama", {"num_key_value_heads": 1}),
        ("llama", {"num_key_value_heads": 4}),
        ("mistral", {"head_dim": 8}),
        ("qwen3", {"tie_word_embeddings": True}),
        ("yarn", {"rope_scaling": None, "rope_theta": 1e6}),
    ],
)
def test_other_sizes_have_the_logits_of_transformers(
    ops: Ops, tmp_path: Path, family: str, overrides: dict[str, Any]
) -> None:
    pair, tokens = (
        load_pair(write_tiny_model(tmp_path, family, overrides=overrides), ops),
        tokens_of(8),
    )
    found = pair.ours(pair.layout(), [Piece(0, 0, tokens)])
    torch.testing.assert_close(found, pair.expected(tokens), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.7, "beta_fast": 16.0},
        {"rope_type": "yarn", "factor": 8.0, "mscale": 0.707, "mscale_all_dim": 1.2},
        {"rope_type": "yarn", "factor": 2.0, "truncate": False},
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "default"},
    ],
)
def test_rope_options_have_the_logits_of_transformers(
    ops: Ops, tmp_path: Path, scaling: dict[str, Any]
) -> None:
    if scaling["rope_type"] == "yarn":
        scaling = {"original_max_position_embeddings": 64, **scaling}
    folder = write_tiny_model(tmp_path, "llama", overrides={"rope_scaling": scaling})
    pair, tokens = load_pair(folder, ops), tokens_of(9)
    found = pair.ours(pair.layout(), [Piece(0, 0, tokens)])
    torch.testing.assert_close(found, pair.expected(tokens), atol=TOLERANCE, rtol=0)


def test_only_the_rows_asked_for_come_back(pair_of: Callable[..., Pair]) -> None:
    pair, tokens = pair_of("llama"), tokens_of(10)
    layout = pair.layout()
    ids, rows = layout.rows([Piece(0, 0, tokens)])
    wanted = torch.tensor([LENGTH - 1, 3])
    hidden = pair.decoder.forward(ids, rows, layout.kv, wanted)
    everything = pair.decoder.forward(ids, rows, layout.kv, None)
    assert hidden.shape == (2, 64)
    torch.testing.assert_close(hidden, everything[wanted])


@pytest.mark.parametrize("final_norm", [True, False])
def test_captured_states_are_those_of_transformers(
    pair_of: Callable[..., Pair], final_norm: bool
) -> None:
    pair, tokens = pair_of("qwen3"), tokens_of(11)
    layout = pair.layout()
    ids, rows = layout.rows([Piece(0, 0, tokens)])
    capture = Capture((2, 0, 1), torch.tensor([5, 150]), final_norm)
    hidden, captured = pair.decoder.forward_capturing(ids, rows, layout.kv, None, capture)
    with torch.no_grad():
        states = pair.theirs(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    torch.testing.assert_close(captured[:, 1], states[0][0][[5, 150]], atol=1e-5, rtol=0)
    torch.testing.assert_close(captured[:, 2], states[1][0][[5, 150]], atol=1e-4, rtol=0)
    last = captured[:, 0]
    if not final_norm:
        assert (last - hidden[[5, 150]]).abs().max() > 0.1
        last = pair.theirs.model.norm(last).detach()
    torch.testing.assert_close(last, states[2][0][[5, 150]], atol=1e-4, rtol=0)
    torch.testing.assert_close(
        pair.decoder.logits(hidden), pair.expected(tokens), atol=TOLERANCE, rtol=0
    )


def test_a_state_past_the_last_layer_is_refused(pair_of: Callable[..., Pair]) -> None:
    pair = pair_of("llama")
    layout = pair.layout()
    ids, rows = layout.rows([Piece(0, 0, [1, 2])])
    with pytest.raises(ValueError, match="hidden state 3 was asked for, the target has 0 to 2"):
        pair.decoder.forward_capturing(ids, rows, layout.kv, None, Capture((3,), torch.tensor([0])))
