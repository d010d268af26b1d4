"""The embedded model writes the text that transformers writes with the same float32 weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from graft.common.errors import Unsupported
from graft.common.model_files import EMBEDDED, ModelFiles, resolve
from graft.kernels.ops import Ops, select
from graft.models.load import Target, load_target
from graft.testing.steps import Layout, Piece

pytestmark = [pytest.mark.embedded, pytest.mark.timeout(900)]

PROMPTS = (
    "What is the capital of France?",
    "Write a haiku about autumn rain.",
    "Explain what a hash table is to a child.",
    "List five fruits and their colours.",
    "Translate to Spanish: the cat sleeps on the warm roof.",
    "Write a Python function that reverses a list.",
    "Who wrote Pride and Prejudice?",
    "What is 17 times 23? Show the steps.",
    "Summarise the water cycle in two sentences.",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
    "Name three uses of copper.",
    "Write a short letter to a friend who moved away.",
    "What should I see in Kyoto in one day?",
    "Fix the grammar: he go to school yesterday and have fun.",
    "Continue the story: The lighthouse keeper heard a knock at midnight.",
    "Compare TCP and UDP.",
    "Was ist der Unterschied zwischen Wetter und Klima?",
    "Give a JSON object that describes a book.",
    "How do vaccines work?",
)


@pytest.fixture(scope="module")
def files() -> ModelFiles:
    return resolve(EMBEDDED, weights=True)


@pytest.fixture(scope="module")
def theirs(files: ModelFiles) -> Any:
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(files.folder, dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="module", params=["torch", "native"])
def target(request: pytest.FixtureRequest, files: ModelFiles) -> Target:
    try:
        ops: Ops = select("cpu", threads=1, prefer=request.param)
    except Unsupported as error:
        pytest.skip(str(error))
    return load_target(files, ops, context_length=512)


def prompt_ids(folder: Path, question: str) -> list[int]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    system = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
    text = (
        f"<|im_start|>system\n{system}<|im_end|>\n"
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    )
    ids: list[int] = tokenizer.encode(text).ids
    return ids


def greedy_together(target: Target, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """All prompts in one ragged batch, greedily, each until its end of text."""
    config, decoder = target.config, target.decoder
    layout = Layout(config.num_layers, config.num_kv_heads, config.head_dim, len(prompts), 192)
    texts: list[list[int]] = [[] for _ in prompts]
    pieces = [Piece(number, 0, ids) for number, ids in enumerate(prompts)]
    while pieces:
        tokens, rows = layout.rows(pieces)
        last = torch.tensor([len(piece.tokens) for piece in pieces]).cumsum(0) - 1
        chosen = decoder.logits(decoder.forward(tokens, rows, layout.kv, last)).argmax(1).tolist()
        going = []
        for piece, token in zip(pieces, chosen, strict=True):
            text = texts[piece.sequence]
            text.append(token)
            if token not in target.eos_token_ids and len(text) < max_tokens:
                going.append(Piece(piece.sequence, piece.start + len(piece.tokens), [token]))
        pieces = going
    return texts


def greedy_of_transformers(model: Any, ids: list[int], max_tokens: int) -> list[int]:
    prompt = torch.tensor([ids])
    with torch.no_grad():
        written = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_tokens,
            do_sample=False,
        )
    tokens: list[int] = written[0, len(ids) :].tolist()
    return tokens


def compare(target: Target, theirs: Any, folder: Path, questions: tuple[str, ...], n: int) -> None:
    prompts = [prompt_ids(folder, question) for question in questions]
    found = greedy_together(target, prompts, n)
    expected = [greedy_of_transformers(theirs, ids, n) for ids in prompts]
    assert found == expected


def test_two_short_answers_are_those_of_transformers(
    target: Target, theirs: Any, files: ModelFiles
) -> None:
    compare(target, theirs, files.folder, PROMPTS[:2], 16)


@pytest.mark.slow
def test_twenty_answers_are_those_of_transformers(
    target: Target, theirs: Any, files: ModelFiles
) -> None:
    compare(target, theirs, files.folder, PROMPTS, 64)


@pytest.mark.slow
def test_converted_weights_are_those_that_transformers_reads_from_the_gguf(
    theirs: Any, files: ModelFiles
) -> None:
    assert files.gguf is not None
    read = load_gguf_checkpoint(str(files.gguf), return_tensors=True, model_to_load=theirs)
    ours = load_file(files.folder / "model.safetensors")
    assert read["tensors"].keys() == ours.keys()
    for name, weight in read["tensors"].items():
        torch.testing.assert_close(ours[name], torch.as_tensor(weight), atol=0, rtol=0, msg=name)
