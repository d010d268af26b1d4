"""What each speculative flag of SGLang and vLLM is called here, or why it is not.

The one place where this is written: `graft flags` prints it, and docs/flag-map.md is generated
from it. Knows the names of settings; knows no service and reads no value.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Origin(Enum):
    """Where a flag comes from."""

    SGLANG = "SGLang flags"
    SGLANG_VARIABLE = "SGLang environment variables"
    VLLM = "Keys of vLLM's `--speculative-config`"


class Verdict(Enum):
    """What becomes of a flag."""

    HONOURED = "honoured"
    REFUSED = "refused"
    INACTIVE = "inactive"


@dataclass(frozen=True, slots=True)
class Row:
    """One flag.

    name: as its own documentation writes it; a trailing * stands for a family.
    setting: `service.field` of the setting that does the same; empty unless honoured.
    value: what that setting has to be, where the flag's own value is not simply taken over.
    note: the reason, or for an honoured flag what differs; words without a full stop.
    """

    origin: Origin
    name: str
    verdict: Verdict
    setting: str = ""
    value: str = ""
    note: str = ""

    @property
    def answer(self) -> str:
        """The verdict as one phrase."""
        if self.verdict is not Verdict.HONOURED:
            return f"{self.verdict.value}: {self.note}"
        given = f" = {self.value}" if self.value else ""
        note = f" ({self.note})" if self.note else ""
        return f"honoured as {self.setting}{given}{note}"


def _honoured(origin: Origin, name: str, setting: str, value: str = "", note: str = "") -> Row:
    return Row(origin, name, Verdict.HONOURED, setting, value, note)


def _refused(origin: Origin, name: str, reason: str) -> Row:
    return Row(origin, name, Verdict.REFUSED, note=reason)


def _inactive(origin: Origin, name: str, reason: str) -> Row:
    return Row(origin, name, Verdict.INACTIVE, note=reason)


_FLAG, _VARIABLE, _KEY = Origin.SGLANG, Origin.SGLANG_VARIABLE, Origin.VLLM
_ALGORITHM = "--speculative-algorithm"
_NGRAM = "--speculative-ngram-"
_NO_CORPUS = "text comes from sessions only; no corpus is read"
_NO_RANGES = "no table of depths by batch size alone; `gateway.tiers` watches load and acceptance"
_ADDRESSES = "verify and draft are services that speak a protocol of their own"
_NO_SUFFIX = "SuffixDecoding is not offered; ngram is the nearest"

ROWS: tuple[Row, ...] = (
    _honoured(_FLAG, _ALGORITHM, "draft.proposers", note="in lower case; mtp for NEXTN"),
    _refused(_FLAG, f"{_ALGORITHM} DSPARK", "not offered"),
    _refused(_FLAG, f"{_ALGORITHM} FROZEN_KV_MTP", "not offered"),
    _honoured(
        _FLAG,
        "--speculative-draft-model-path",
        "draft.draft_model_path",
        note="proposers=NAME=PATH gives each its own",
    ),
    _honoured(_FLAG, "--speculative-draft-model", "draft.draft_model_path", note="the alias"),
    _honoured(_FLAG, "--speculative-draft-model-revision", "draft.draft_model_revision"),
    _inactive(
        _FLAG, "--speculative-draft-load-format", "the format is read from the checkpoint's files"
    ),
    _honoured(
        _FLAG,
        "--speculative-draft-model-quantization",
        "draft.draft_model_quantization",
        note="none, q8_0 (blocks of 8 bits made on load), or stored (a GGUF file's own)",
    ),
    _honoured(
        _FLAG,
        "--speculative-num-steps",
        "draft.num_steps",
        note="a request may say its own; no meaning to ngram and dflash",
    ),
    _honoured(
        _FLAG,
        "--speculative-eagle-topk",
        "draft.eagle_topk",
        note="a request may say its own; no meaning to ngram and dflash",
    ),
    _honoured(
        _FLAG,
        "--speculative-num-draft-tokens",
        "draft.num_draft_tokens",
        note="root included, except by uno; dflash's block; verify.max_nodes is the limit",
    ),
    _honoured(
        _FLAG,
        "--speculative-dflash-block-size",
        "draft.dflash_block_size",
        note="the checkpoint has its own",
    ),
    _honoured(
        _FLAG,
        "--speculative-accept-threshold-single",
        "verify.threshold_single",
        note="needs accept_rule target_only; below 1 is lossy",
    ),
    _honoured(
        _FLAG,
        "--speculative-accept-threshold-acc",
        "verify.threshold_acc",
        note="needs accept_rule target_only; below 1 is lossy",
    ),
    _honoured(
        _FLAG, "--speculative-use-rejection-sampling", "verify.accept_rule", value="rejection"
    ),
    _honoured(_FLAG, "--speculative-use-block-verification", "verify.accept_rule", value="block"),
    _honoured(
        _FLAG,
        "--speculative-token-map",
        "draft.token_map",
        note="eagle only; needs draft.allow_pickle",
    ),
    _inactive(
        _FLAG, "--speculative-attention-mode", "prompts and trees go through the same attention"
    ),
    _inactive(
        _FLAG,
        "--speculative-draft-attention-backend",
        "attention is one of the kernels that draft.kernels chooses together",
    ),
    _refused(
        _FLAG, "--speculative-draft-kv-cache-dtype", "a drafter's keys and values are float32"
    ),
    _honoured(
        _FLAG,
        "--speculative-draft-window-size",
        "draft.draft_window_size",
        note="dflash only; others see all of the prefix",
    ),
    _refused(
        _FLAG,
        "--speculative-draft-sink-size",
        "the window of dflash keeps recent tokens only, and other drafters have none",
    ),
    _honoured(_FLAG, "--enable-multi-layer-eagle", "draft.enable_multi_layer_eagle"),
    _honoured(_FLAG, "--speculative-adaptive", "gateway.tiers", note="`field` is this policy"),
    _honoured(
        _FLAG, "--speculative-adaptive-config", "gateway.tier_config", note="the file as it is"
    ),
    _honoured(_FLAG, "--uno-lora-path", "draft.uno_lora_path"),
    _honoured(_FLAG, f"{_NGRAM}min-bfs-breadth", "draft.ngram_min_bfs_breadth"),
    _honoured(_FLAG, f"{_NGRAM}max-bfs-breadth", "draft.ngram_max_bfs_breadth"),
    _honoured(_FLAG, f"{_NGRAM}match-type", "draft.ngram_match_type"),
    _honoured(_FLAG, f"{_NGRAM}max-trie-depth", "draft.ngram_max_trie_depth"),
    _honoured(
        _FLAG,
        f"{_NGRAM}capacity",
        "draft.ngram_capacity",
        note="of each trie; draft.ngram_share says who shares one",
    ),
    _refused(_FLAG, f"{_NGRAM}external-corpus-path", _NO_CORPUS),
    _refused(_FLAG, f"{_NGRAM}external-sam-budget", _NO_CORPUS),
    _refused(_FLAG, f"{_NGRAM}external-corpus-max-tokens", _NO_CORPUS),
    _refused(_FLAG, "--speculative-domino-candidate-pool-size", "Domino is not offered"),
    _refused(_FLAG, "--speculative-dspark-*", "DSPARK is not offered"),
    _inactive(
        _FLAG, "--decoupled-spec-role", "graft verify and graft draft are commands of their own"
    ),
    _inactive(
        _FLAG,
        "--decoupled-spec-bind-endpoint",
        f"{_ADDRESSES}; host and port of each say where it listens",
    ),
    _inactive(
        _FLAG,
        "--decoupled-spec-connect-endpoints",
        f"{_ADDRESSES}; gateway.verify and gateway.draft list them",
    ),
    _inactive(_FLAG, "--decoupled-spec-rank", "replicas have no ranks; sessions name their own"),
    _refused(
        _FLAG,
        "--spec-trace-dir",
        "no trace files are written; the request field speculation_trace streams the rounds",
    ),
    _honoured(
        _VARIABLE,
        "SGLANG_SIMULATE_ACC_LEN",
        "verify.simulate_accept_length",
        note="0 is off; clients need verify.simulate_allow_clients",
    ),
    _honoured(_VARIABLE, "SGLANG_SIMULATE_ACC_METHOD", "verify.simulate_method"),
    _honoured(_VARIABLE, "SGLANG_SIMULATE_ACC_TOKEN_MODE", "verify.simulate_token_mode"),
    _inactive(
        _VARIABLE,
        "SGLANG_SPEC_SKIP_ZERO_STEP_DRAFT_EXTEND",
        "a drafter that missed rounds runs them before its next tree",
    ),
    _inactive(
        _VARIABLE, "SGLANG_ENABLE_OVERLAP_PLAN_STREAM", "there is no second stream to plan on"
    ),
    _inactive(
        _VARIABLE,
        "SGLANG_OPT_USE_GUMBEL_SAMPLE",
        "the coupled rule always chooses by Gumbel noise",
    ),
    _inactive(
        _VARIABLE,
        "SGLANG_ENABLE_MTP_BOUNDARY_KV_FIX",
        "positions whose later ids were guesses are always run again",
    ),
    _inactive(
        _VARIABLE,
        "SGLANG_RAGGED_VERIFY_MODE",
        "each tree of a step always has its own number of nodes",
    ),
    _honoured(_KEY, "method", "draft.proposers", note="by Graft's names"),
    _honoured(_KEY, "model", "draft.draft_model_path"),
    _honoured(
        _KEY,
        "num_speculative_tokens",
        "draft.num_draft_tokens",
        value="K + 1",
        note="nodes, with the root; a chain also needs draft.num_steps = K",
    ),
    _honoured(
        _KEY,
        "prompt_lookup_min",
        "draft.ngram_min_match",
        note="ngram looks matches up in a trie, and drafts trees",
    ),
    _honoured(
        _KEY,
        "prompt_lookup_max",
        "draft.ngram_max_trie_depth",
        value="K + 1",
        note="a match is shorter than the trie is deep; the depth bounds drafts as well",
    ),
    _honoured(
        _KEY,
        "rejection_sample_method",
        "verify.accept_rule",
        value="rejection for standard, block for block",
        note="synthetic is verify.simulate_accept_length",
    ),
    _inactive(
        _KEY,
        "draft_sample_method",
        "drafts are drawn under the rules rejection and block, and ranked under the others",
    ),
    *(
        _refused(_KEY, f"suffix_decoding_{name}", _NO_SUFFIX)
        for name in ("max_tree_depth", "max_cached_requests", "min_token_prob")
    ),
    _refused(
        _KEY,
        "suffix_decoding_max_spec_factor",
        f"{_NO_SUFFIX}, with draft.ngram_spec_factor",
    ),
    _refused(
        _KEY, "use_heterogeneous_vocab", "a drafter with another tokenizer is refused at start"
    ),
    _refused(_KEY, "num_speculative_tokens_per_batch_size", _NO_RANGES),
    _refused(
        _KEY,
        "draft_tensor_parallel_size",
        "a drafter runs on one device; draft replicas share sessions, not tensors",
    ),
)
