"""Settings of a draft replica, read once at start."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from graft.common.service_settings import ServiceSettings
from graft.draft.proposers.ngram import MatchType, NgramOptions, Share

_NGRAM_NODES = 12


class DraftSettings(ServiceSettings):
    """How a draft replica listens, what it proposes with, and how much of it."""

    section: ClassVar[str] = "draft"

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(7002, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    proposers: list[str] = Field(
        ["ngram"],
        min_length=1,
        description="Proposers to load; the first is the default. name=PATH gives one its own "
        "checkpoint; merged=eagle3+ngram puts two into one tree.",
    )
    draft_model_path: str = Field(
        "", description="Checkpoint of the model proposers: a folder or a Hugging Face id."
    )
    draft_model_revision: str = Field(
        "", description="Branch, tag or commit of a --draft-model-path on the hub."
    )
    model: str = Field(
        "", description="The target, for drafters that borrow its embedding and head."
    )
    num_steps: int | None = Field(
        None, ge=1, le=1023, description="Depth of a tree by default; each proposer has its own."
    )
    eagle_topk: int | None = Field(
        None, ge=1, le=1024, description="Children of a node by default; 1 drafts chains."
    )
    num_draft_tokens: int | None = Field(
        None, ge=2, le=1024, description="Nodes of a tree by default, root included."
    )
    lookahead: int = Field(
        0,
        ge=0,
        le=63,
        description="Likely outcomes prepared while verify works, by default; for verify replicas "
        "on other cores. 0 drafts when a round has ended.",
    )
    token_map: str = Field(
        "",
        description="FR-Spec token map of an EAGLE drafter: a .pt file, or owner/name/file.pt "
        "on the hub.",
    )
    dflash_block_size: int | None = Field(
        None,
        ge=2,
        le=1024,
        description="Tokens of a DFlash block, the newest committed one included; the checkpoint "
        "has its own.",
    )
    draft_window_size: int | None = Field(
        None,
        ge=1,
        description="Recent committed tokens that a DFlash block sees at least; all by default.",
    )
    enable_multi_layer_eagle: bool = Field(
        False, description="Run a layer set of its own for every token ahead (MTP checkpoints)."
    )
    uno_lora_path: str = Field(
        "", description="Adapter of the UNO proposer: a folder or a Hugging Face id."
    )
    uno_mask_token_id: int | None = Field(
        None, ge=1, description="UNO draws noise from ids below this one; from all by default."
    )
    uno_noise: Literal["uniform", "mask"] = Field(
        "uniform", description="UNO guesses on random tokens, or on the mask token alone."
    )
    uno_noise_seed: int = Field(0, ge=0, description="Seed of UNO's random tokens.")
    allow_pickle: bool = Field(
        False, description="Read .bin and .pt files, by a reader that runs no code in them."
    )
    draft_model_quantization: Literal["none", "q8_0", "stored"] = Field(
        "none",
        description="Round the drafter's matrices to blocks of 8 bits: a quarter of the bytes, for "
        "a little acceptance; with stored STANDALONE keeps the blocks of its GGUF file, if it has "
        "one. UNO, which is its target, and torch kernels keep float32.",
    )
    torch_compile: bool = Field(
        False,
        description="Compile the draft step of EAGLE, EAGLE-3, MTP of one layer and STANDALONE by "
        "torch.compile; without effect on native kernels.",
    )
    kernels: Literal["auto", "native", "torch"] = Field(
        "auto", description="Kernels of model proposers; auto takes native ones where built."
    )
    kv_tokens: int = Field(
        65536, ge=16, description="Tokens of all sessions that a model proposer keeps in memory."
    )
    ngram_min_bfs_breadth: int = Field(
        1, ge=1, description="Children taken after the longest match."
    )
    ngram_max_bfs_breadth: int = Field(
        10, ge=1, description="Children taken after the shortest match."
    )
    ngram_match_type: Literal["BFS", "PROB"] = Field(
        "BFS", description="Expand matches by recency (BFS) or by frequency (PROB)."
    )
    ngram_max_trie_depth: int = Field(
        18, ge=2, le=256, description="Tokens of an indexed window; matches are shorter by one."
    )
    ngram_min_match: int = Field(
        1, ge=1, description="Tokens a match must have before anything is proposed."
    )
    ngram_spec_factor: float = Field(
        2.0, ge=0, description="Drafted nodes for each token of the longest match; 0 is no limit."
    )
    ngram_capacity: int = Field(
        10_000_000, ge=3, le=2**31 - 1, description="Nodes of one n-gram trie."
    )
    ngram_share: Literal["off", "tenant", "all"] = Field(
        "off",
        description="Whose text n-gram drafts may come from: the session's own, its tenant's "
        "(equal cache salts), or everybody's.",
    )
    threads: int = Field(
        1, ge=1, description="Threads of model proposers; n-gram look-up always uses one."
    )
    max_sessions: int = Field(1024, ge=1, description="Sessions attended at once.")
    connect_timeout_s: float = Field(
        5.0, gt=0, le=600, description="Time a verify replica has to answer a new connection."
    )
    feature_codec: Literal["bf16", "int8"] = Field(
        "bf16", description="How the target's hidden states travel to proposers that need them."
    )
    feature_window: int = Field(
        0, ge=0, description="Recent hidden states a proposer asks for when it joins; 0 is all."
    )
    feature_fused: bool = Field(
        False,
        description="Have verify apply the drafter's projection before hidden states travel; "
        "verify has it by --fused-features.",
    )
    metrics_port: int = Field(
        0, ge=0, le=65535, description="Port of /metrics on the same host; 0 is off."
    )
    trace_rounds: float = Field(
        0.1,
        ge=0.0,
        le=1.0,
        description="Of a traced session's rounds, the share with a span of their own.",
    )
    stall_s: float = Field(
        10.0, gt=0, description="A proposer that takes longer loses its sessions to other drafters."
    )
    drain_s: float = Field(5.0, ge=0, description="Time running sessions get at shutdown.")

    @property
    def ngram(self) -> NgramOptions:
        """Options of the NGRAM proposer.

        Raises:
            InvalidArgument: the numbers do not go together.
        """
        return NgramOptions(
            min_breadth=self.ngram_min_bfs_breadth,
            max_breadth=self.ngram_max_bfs_breadth,
            match_type=MatchType(self.ngram_match_type),
            max_trie_depth=self.ngram_max_trie_depth,
            capacity=self.ngram_capacity,
            min_match=self.ngram_min_match,
            spec_factor=self.ngram_spec_factor,
            share=Share(self.ngram_share),
            num_draft_tokens=self.num_draft_tokens or _NGRAM_NODES,
        )
