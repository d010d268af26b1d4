"""Settings of the verify service."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field

from graft.common.errors import InvalidArgument
from graft.common.service_settings import ServiceSettings
from graft.common.tree import HARD_MAX_NODES


class VerifySettings(ServiceSettings):
    """One verify replica. A zero where the comment says so means "decide by what is there"."""

    section: ClassVar[str] = "verify"

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(7001, ge=0, le=65535, description="Port; 0 takes a free one.")
    model: str = Field(
        "smollm2-135m-instruct", description="Embedded name, Hugging Face id, folder or GGUF file."
    )
    precision: Literal["auto", "fp32", "q8_0", "q4_1"] = Field(
        "fp32",
        description="How weights are held: float32, or a GGUF file's blocks as stored; "
        "auto takes the blocks where there are kernels for them.",
    )
    device: str = Field("cpu", description="Where the target runs; only cpu in this build.")
    kernels: Literal["auto", "native", "torch"] = Field(
        "auto", description="Native CPU kernels, their torch fallback, or what is there."
    )
    threads: int = Field(2, ge=1, le=1024, description="Threads of the target's kernels.")
    kv_tokens: int = Field(0, ge=0, description="KV budget in tokens; 0 derives it from memory.")
    memory_gb: float = Field(0.0, ge=0.0, description="Memory budget; 0 takes what is there.")
    page_tokens: int = Field(16, ge=1, le=4096, description="Tokens of a KV page.")
    max_running: int = Field(16, ge=1, le=4096, description="Sessions served at once.")
    max_waiting: int = Field(256, ge=0, le=1 << 20, description="Sessions that may wait.")
    max_nodes: int = Field(
        64, ge=1, le=HARD_MAX_NODES, description="Nodes of a tree, root included."
    )
    max_depth: int = Field(32, ge=0, le=HARD_MAX_NODES - 1, description="Depth of a tree.")
    max_trees: int = Field(32, ge=1, le=64, description="Trees held for a session.")
    max_held_trees: int = Field(
        2048, ge=1, le=1 << 20, description="Trees pushed ahead that are held, of all sessions."
    )
    trim_trees: bool = Field(
        True, description="Cut the least promising nodes where a crowded step costs more for them."
    )
    chunk_tokens: int = Field(
        128, ge=1, description="Prompt tokens that share a step with decoding sessions."
    )
    max_step_rows: int = Field(512, ge=2, description="Rows of one forward pass, of all sessions.")
    context_length: int = Field(0, ge=0, description="Tokens of a session; 0 takes the model's.")
    feature_memory_mb: int = Field(
        256,
        ge=0,
        description="Room for recent hidden states, for drafters that join late; 0 keeps none.",
    )
    fused_features: Path | None = Field(
        None, description="A drafter's projection, applied here so that less has to travel."
    )
    lane: bool = Field(
        True,
        description="Let drafters and gateways of this machine and user go on over a Unix socket, "
        "which takes less time a round than gRPC; never with TLS.",
    )
    metrics_port: int = Field(0, ge=0, le=65535, description="Port of /metrics; 0 is off.")
    trace_rounds: float = Field(
        0.1,
        ge=0.0,
        le=1.0,
        description="Of a traced session's rounds, the share with a span of their own.",
    )
    drain_s: float = Field(30.0, ge=0.0, description="How long a shutdown waits for sessions.")
    stall_s: float = Field(
        60.0, gt=0.0, description="A step that takes longer makes the replica NOT_SERVING."
    )
    grammar_compile_s: float = Field(
        1.5,
        ge=0.0,
        le=60.0,
        description="Seconds that a grammar or a JSON schema may take to compile; 0 offers none.",
    )
    accept_rule: Literal["coupled", "target_only", "rejection", "block"] = Field(
        "coupled", description="Accept rule of sessions that name none."
    )
    threshold_single: float = Field(
        1.0,
        gt=0.0,
        le=1.0,
        description="target_only: a drafted token this likely is accepted; below 1 is lossy.",
    )
    threshold_acc: float = Field(
        1.0,
        gt=0.0,
        le=1.0,
        description="target_only: divides the target's mass on drafted tokens; below 1 is lossy.",
    )
    simulate_accept_length: float = Field(
        0.0,
        ge=0.0,
        description="For benchmarks: draws accept lengths of this mean, bonus included, instead of "
        "deciding them, so the text means nothing; 0 is off.",
    )
    simulate_method: Literal["match-expected", "multinomial"] = Field(
        "match-expected", description="How a simulated length is drawn."
    )
    simulate_token_mode: Literal["fixed", "real-draft-token"] = Field(
        "fixed",
        description="What a simulated round writes: token 100, or the drafts and the bonus.",
    )
    simulate_allow_clients: bool = Field(
        False, description="Take sessions although their text means nothing."
    )

    def check_limits(self) -> None:
        """Checks what no single field can say.

        Raises:
            InvalidArgument: two limits contradict each other; the message names both.
        """
        if self.max_step_rows <= self.max_running:
            raise InvalidArgument(
                f"verify.max_step_rows is {self.max_step_rows}, expected more than max_running "
                f"({self.max_running}): every session needs a row, and a prompt one beside them",
                field="max_step_rows",
            )
        if self.accept_rule != "target_only" and min(self.threshold_single, self.threshold_acc) < 1:
            raise InvalidArgument(
                f"verify.threshold_single and threshold_acc have no meaning under the "
                f"{self.accept_rule} rule, expected 1, or accept_rule target_only",
                field="threshold_single" if self.threshold_single < 1 else "threshold_acc",
            )
        if 0 < self.simulate_accept_length < 1:
            raise InvalidArgument(
                f"verify.simulate_accept_length is {self.simulate_accept_length:g}, expected 0, or "
                "at least 1: a round commits the bonus whatever happens",
                field="simulate_accept_length",
            )
