"""Settings of the gateway, read once at start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import ClassVar

from pydantic import Field, field_validator

from graft.common.channel import Tls
from graft.common.config import Settings
from graft.common.log import LogFormat


class GatewaySettings(Settings):
    """What the gateway needs to know; addresses are ``host:port`` or ``dns:///name:port``."""

    section: ClassVar[str] = "gateway"

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65535)
    grpc_port: int = Field(8001, ge=0, le=65535)
    verify: list[str] = Field(default_factory=lambda: ["127.0.0.1:7001"], min_length=1)
    draft: list[str] = Field(default_factory=lambda: ["127.0.0.1:7002"])
    model: str = "smollm2-135m-instruct"
    served_name: str = ""
    chat_template: str = ""
    speculation: str = "auto"
    tree_deadline_ms: int = Field(50, ge=0, le=10_000)
    replay_timeout_s: float = Field(60.0, ge=0, le=3600)
    request_timeout_s: float = Field(600.0, gt=0, le=86_400)
    progress_timeout_s: float = Field(60.0, gt=0, le=3600)
    poll_s: float = Field(1.0, gt=0, le=60)
    silent_s: float = Field(5.0, gt=0, le=600)
    stall_s: float = Field(30.0, gt=0, le=3600)
    resolve_s: float = Field(5.0, gt=0, le=3600)
    max_queue: int = Field(512, ge=1, le=1_000_000)
    max_choices: int = Field(128, ge=1, le=10_000)
    max_body_bytes: int = Field(16 << 20, ge=1024, le=1 << 30)
    api_keys: list[str] = Field(default_factory=list)
    stream_interval: int = Field(1, ge=1, le=1024)
    keepalive_s: float = Field(15.0, gt=0, le=3600)
    insecure: bool = False
    tls_ca: Path | None = None
    tls_certificate: Path | None = None
    tls_key: Path | None = None
    log_level: str = "info"
    log_format: LogFormat = "auto"
    drain_s: float = Field(30.0, ge=0, le=3600)
    cache: Path | None = None

    @field_validator("speculation")
    @classmethod
    def _speculation_reads(cls, value: str) -> str:
        if value.startswith("{"):
            try:
                json.loads(value)
            except json.JSONDecodeError as error:
                raise ValueError(f"is neither a proposer's name nor JSON: {error}") from None
        return value

    @field_validator("api_keys")
    @classmethod
    def _keys_have_length(cls, value: list[str]) -> list[str]:
        if any(not key.strip() for key in value):
            raise ValueError("an API key is empty")
        return value

    def tls(self) -> Tls | None:
        """The TLS files, or None when none is given."""
        if self.tls_ca is None and self.tls_certificate is None:
            return None
        return Tls(self.tls_ca, self.tls_certificate, self.tls_key)
