"""Runs inside a peer's own environment and answers prompts with it, one JSON line each.

Imports nothing of this project, so it works wherever the peer is installed. The first argument is
one JSON object: peer, mode, model, threads. A line in holds tokens, max_tokens, temperature and
seed; a line out the number of tokens written.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

Write = Callable[[list[int], int, float, int], int]

_LOOKUP_TOKENS = 8
_CONTEXT = 4096


def transformers(model: str, mode: str, threads: int) -> Write:
    """Greedy or sampled generation in float32, plain or with prompt lookup."""
    torch: Any = importlib.import_module("torch")
    library: Any = importlib.import_module("transformers")
    torch.set_num_threads(threads)
    loaded = library.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    extra = {"prompt_lookup_num_tokens": _LOOKUP_TOKENS} if mode == "prompt lookup" else {}

    def write(tokens: list[int], max_tokens: int, temperature: float, seed: int) -> int:
        torch.manual_seed(seed)
        law: dict[str, Any] = {"do_sample": False}
        if temperature:
            law = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        prompt = torch.tensor([tokens])
        with torch.inference_mode():
            written = loaded.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=max_tokens,
                **law,
                **extra,
            )
        return int(written.shape[1]) - len(tokens)

    return write


def llama_cpp(model: str, mode: str, threads: int) -> Write:
    """llama.cpp on the GGUF file as stored, plain or with prompt lookup."""
    library: Any = importlib.import_module("llama_cpp")
    draft = None
    if mode == "prompt lookup":
        lookup: Any = importlib.import_module("llama_cpp.llama_speculative")
        draft = lookup.LlamaPromptLookupDecoding(num_pred_tokens=_LOOKUP_TOKENS)
    loaded = library.Llama(
        model,
        n_ctx=_CONTEXT,
        n_threads=threads,
        n_threads_batch=threads,
        draft_model=draft,
        verbose=False,
    )

    def write(tokens: list[int], max_tokens: int, temperature: float, seed: int) -> int:
        loaded.reset()
        answer = loaded.create_completion(
            tokens,
            max_tokens=max_tokens,
            temperature=temperature,
            seed=seed,
            top_k=0,
            top_p=1.0,
            min_p=0.0,
            repeat_penalty=1.0,
        )
        return int(answer["usage"]["completion_tokens"])

    return write


def vllm(model: str, mode: str, threads: int) -> Write:
    """vLLM's CPU build in float32, plain, with n-gram speculation or with an EAGLE-3 head."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{threads - 1}")
    library: Any = importlib.import_module("vllm")
    inputs: Any = importlib.import_module("vllm.inputs")
    speculation: dict[str, Any] | None = None
    if mode == "ngram":
        speculation = {
            "method": "ngram",
            "num_speculative_tokens": _LOOKUP_TOKENS,
            "prompt_lookup_max": 4,
        }
    elif mode.startswith("eagle3="):
        head = mode.removeprefix("eagle3=")
        speculation = {"method": "eagle3", "model": head, "num_speculative_tokens": 3}
    loaded = library.LLM(
        model,
        dtype="float32",
        max_model_len=_CONTEXT,
        # Compiling takes minutes here, and does not pay on a model of this size.
        enforce_eager=True,
        speculative_config=speculation,
        enable_prefix_caching=False,
    )

    def write(tokens: list[int], max_tokens: int, temperature: float, seed: int) -> int:
        law = library.SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
        prompt = inputs.TokensPrompt(prompt_token_ids=tokens)
        answer = loaded.generate([prompt], law, use_tqdm=False)[0]
        return len(answer.outputs[0].token_ids)

    return write


def openvino(model: str, mode: str, threads: int) -> Write:
    """OpenVINO GenAI on the GGUF file, plain or with prompt lookup."""
    library: Any = importlib.import_module("openvino_genai")
    base: Any = importlib.import_module("openvino")
    numpy: Any = importlib.import_module("numpy")
    options: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
    if mode == "prompt lookup":
        options["prompt_lookup"] = True
    loaded = library.LLMPipeline(model, "CPU", **options)

    def write(tokens: list[int], max_tokens: int, temperature: float, seed: int) -> int:
        law = library.GenerationConfig()
        law.max_new_tokens = max_tokens
        law.do_sample = temperature > 0
        law.rng_seed = seed
        if temperature:
            law.temperature = temperature
        if mode == "prompt lookup":
            law.num_assistant_tokens = _LOOKUP_TOKENS
            law.max_ngram_size = 3
        answer = loaded.generate(base.Tensor(numpy.array([tokens], dtype=numpy.int64)), law)
        return len(answer.tokens[0])

    return write


_LOADERS = {
    "transformers": transformers,
    "llama.cpp": llama_cpp,
    "vllm": vllm,
    "openvino": openvino,
}


def main() -> None:
    """Loads the peer, says so, and answers until stdin ends."""
    settings = json.loads(sys.argv[1])
    # Libraries print as they like; only our lines may reach the other end.
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    write = _LOADERS[settings["peer"]](settings["model"], settings["mode"], settings["threads"])
    lines.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        job = json.loads(line)
        count = write(job["tokens"], job["max_tokens"], job["temperature"], job["seed"])
        lines.write(json.dumps({"tokens": count}) + "\n")


if __name__ == "__main__":
    main()
