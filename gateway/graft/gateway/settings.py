"""Settings of the gateway, read once at start."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar, Literal

from pydantic import Field, ValidationError, field_validator

from graft.common.service_settings import ServiceSettings
from graft.gateway.request import SpeculationField


class GatewaySettings(ServiceSettings):
    """What the gateway needs to know; addresses are ``host:port`` or ``dns:///name:port``."""

    section: ClassVar[str] = "gateway"

    host: str = Field("127.0.0.1", description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port of the REST API; 0 picks a free one.")
    grpc_port: int = Field(
        8001, ge=0, le=65535, description="Port of the gRPC API; 0 picks a free one."
    )
    verify: list[str] = Field(
        default_factory=lambda: ["127.0.0.1:7001"],
        min_length=1,
        description="Verify replicas: host:port, or dns:///name:port for all addresses of a name.",
    )
    draft: list[str] = Field(
        default_factory=lambda: ["127.0.0.1:7002"],
        description="Draft replicas, named like verify replicas; none is allowed.",
    )
    model: str = Field(
        "smollm2-135m-instruct",
        description="Model whose tokenizer and chat template are used; the one verify serves.",
    )
    served_name: str = Field(
        "", description="Name of the model in the API; empty takes the name of `model`."
    )
    chat_template: str = Field(
        "", description="Text of a Jinja chat template; empty takes the model's own."
    )
    tool_call_parser: Literal["auto", "hermes", "llama3_json", "mistral", "json"] = Field(
        "auto",
        description="How the model writes function calls; auto reads it off the chat template.",
    )
    reasoning_parser: Literal["auto", "off", "think", "deepseek_r1"] = Field(
        "auto",
        description="How the model marks its reasoning, which goes into reasoning_content; auto "
        "reads it off the chat template.",
    )
    speculation: str = Field(
        "auto",
        description="For requests that do not say: auto, off, a proposer, or a tier as JSON.",
    )
    tiers: Literal["fixed", "field", "goodput"] = Field(
        "goodput",
        description="Who chooses the tier of requests that name none: fixed keeps the default, "
        "field is the adaptive depth of SGLang, goodput the most tokens a second.",
    )
    tier_config: str = Field(
        "default",
        description="For tiers=field: default, conservative, aggressive, long_chains or an SGLang "
        "JSON file.",
    )
    tree_deadline_ms: int = Field(
        50, ge=0, le=10_000, description="How long a round waits for a tree."
    )
    replay_timeout_s: float = Field(
        60.0,
        ge=0,
        le=3600,
        description="How long a session whose verify replica died waits for another.",
    )
    request_timeout_s: float = Field(
        600.0, gt=0, le=86_400, description="How long a request may take in all."
    )
    progress_timeout_s: float = Field(
        60.0, gt=0, le=3600, description="How long a session may go without a new token."
    )
    poll_s: float = Field(1.0, gt=0, le=60, description="Time between two looks at every replica.")
    silent_s: float = Field(
        5.0,
        gt=0,
        le=600,
        description="A replica that does not answer for so long is taken for dead.",
    )
    stall_s: float = Field(
        30.0,
        gt=0,
        le=3600,
        description="A verify replica whose step takes longer gets no new sessions.",
    )
    resolve_s: float = Field(
        5.0, gt=0, le=3600, description="Time between two look-ups of dns:/// names."
    )
    max_queue: int = Field(
        512,
        ge=1,
        le=1_000_000,
        description="Choices served or waiting at once; more are refused with 503.",
    )
    max_choices: int = Field(
        128, ge=1, le=10_000, description="Choices of one request: prompts times n."
    )
    max_body_bytes: int = Field(
        16 << 20, ge=1024, le=1 << 30, description="Greatest size of a request body."
    )
    head_timeout_s: float = Field(
        30.0, gt=0, le=3600, description="How long the headers of a request may take to come."
    )
    ui: bool = Field(True, description="Serve the page that shows speculation at work, at /.")
    api_keys: list[str] = Field(
        default_factory=list, description="Keys that clients must show; none lets everybody in."
    )
    stream_interval: int = Field(
        1, ge=1, le=1024, description="Rounds that share one event of a stream."
    )
    keepalive_s: float = Field(
        15.0, gt=0, le=3600, description="Time between comments in a stream that is waiting."
    )
    trace_share: float = Field(
        1.0,
        ge=0.0,
        le=1.0,
        description="Of requests that come without a trace, the share that is traced.",
    )
    drain_s: float = Field(
        30.0, ge=0, le=3600, description="How long a shutdown waits for running answers."
    )
    cache: Path | None = Field(
        None,
        description="Folder of converted models; default GRAFT_CACHE or ~/.cache/graft/models.",
    )

    @field_validator("speculation")
    @classmethod
    def _speculation_reads(cls, value: str) -> str:
        if value.startswith("{"):
            try:
                SpeculationField.model_validate_json(value)
            except ValidationError as error:
                reason = error.errors(include_url=False, include_context=False)[0]["msg"]
                raise ValueError(f"is neither a proposer's name nor JSON: {reason}") from None
        return value

    @field_validator("api_keys")
    @classmethod
    def _keys_have_length(cls, value: list[str]) -> list[str]:
        if any(not key.strip() for key in value):
            raise ValueError("an API key is empty")
        return value
