"""Runs inside a peer's own environment and answers prompts with it, one JSON line a block.

Imports nothing of this project, so it works wherever the peer is installed. The first argument is
one JSON object: peer, mode, model, threads. A line in is a list of jobs to answer at once: tokens,
max_tokens, temperature and seed of each. A line out has, for each, the number of tokens written, of
forwards after the prompt's, and of drafted tokens accepted at each depth; 0 and none where the peer
does not say.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

Job = dict[str, Any]
Counts = tuple[int, int, list[int]]
Write = Callable[[list[int], int, float, int], int]
WriteAll = Callable[[list[Job]], list[Counts]]

_LOOKUP_TOKENS = 8
_CHAIN_TOKENS = 4
_CONTEXT = 4096
_BATCH = 16
_KV_BYTES = 1 << 29


def alone(write: Write) -> WriteAll:
    """For a peer that answers one job at a time and says nothing of its rounds."""

    def write_all(jobs: list[Job]) -> list[Counts]:
        return [
            (write(job["tokens"], job["max_tokens"], job["temperature"], job["seed"]), 0, [])
            for job in jobs
        ]

    return write_all


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


def vllm(model: str, mode: str, threads: int) -> WriteAll:
    """vLLM's CPU build in float32, plain, with n-gram speculation or with an EAGLE-3 head.

    The engine lives in this process, which already has the OpenMP library that vLLM asks for and
    the number of threads. No thread is bound: a core that others use too would hold up all.
    """
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    # A variable of the user's would take the place of the size given below.
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)
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
        speculation = {"method": "eagle3", "model": head, "num_speculative_tokens": _CHAIN_TOKENS}
    loaded = library.LLM(
        model,
        dtype="float32",
        max_model_len=_CONTEXT,
        max_num_seqs=_BATCH,
        kv_cache_memory_bytes=_KV_BYTES,
        # Compiling takes minutes here, and does not pay on a model of this size.
        enforce_eager=True,
        speculative_config=speculation,
        enable_prefix_caching=False,
        per_request_spec_decode_metrics="summary" if speculation else "none",
    )

    def write_all(jobs: list[Job]) -> list[Counts]:
        laws = [
            library.SamplingParams(
                max_tokens=job["max_tokens"], temperature=job["temperature"], seed=job["seed"]
            )
            for job in jobs
        ]
        prompts = [inputs.TokensPrompt(prompt_token_ids=job["tokens"]) for job in jobs]
        answers = loaded.generate(prompts, laws, use_tqdm=False)
        return [_counts(answer.outputs[0]) for answer in answers]

    return write_all


def _counts(answer: Any) -> Counts:
    """Of one answer of vLLM. It counts rounds that verified; the others gave one token each."""
    count = len(answer.token_ids)
    if answer.spec_decode_metrics is None:
        return count, 0, []
    # How many rounds accepted 0, 1, 2 ... tokens.
    rounds: list[int] = answer.spec_decode_metrics.to_dict()["acceptance_histogram"]
    per_depth = [sum(rounds[depth:]) for depth in range(1, len(rounds))]
    verified = sum(rounds)
    return count, verified + max(0, count - 1 - verified - sum(per_depth)), per_depth


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


def load(peer: str, model: str, mode: str, threads: int) -> WriteAll:
    """The peer with its model in memory."""
    if peer == "vllm":
        return vllm(model, mode, threads)
    loaders = {"transformers": transformers, "llama.cpp": llama_cpp, "openvino": openvino}
    return alone(loaders[peer](model, mode, threads))


def main() -> None:
    """Loads the peer, says so, and answers until stdin ends."""
    settings = json.loads(sys.argv[1])
    # Libraries print as they like; only our lines may reach the other end.
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    write = load(settings["peer"], settings["model"], settings["mode"], settings["threads"])
    lines.write(json.dumps({"ready": True}) + "\n")
    for line in sys.stdin:
        lines.write(json.dumps({"answers": write(json.loads(line))}) + "\n")


if __name__ == "__main__":
    main()
