"""What every service's settings hold: TLS files, where spans go, how logs are written."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from graft.common.channel import Tls
from graft.common.config import Settings
from graft.common.log import LogFormat
from graft.common.tracing import ENDPOINT_VARIABLES


class ServiceSettings(Settings):
    """Base of the settings of gateway, verify and draft, which list their own fields first."""

    insecure: bool = Field(False, description="Allow plain-text gRPC beyond this machine.")
    tls_ca: Path | None = Field(None, description="PEM file that checks peers (mTLS).")
    tls_certificate: Path | None = Field(None, description="PEM file of our certificate.")
    tls_key: Path | None = Field(None, description="PEM file of our key.")
    otlp_endpoint: str = Field(
        "",
        description="Where spans go by OTLP over gRPC, such as http://127.0.0.1:4317; none are "
        "made without it. OTEL_EXPORTER_OTLP_ENDPOINT is read, too.",
        json_schema_extra={"variables": [*ENDPOINT_VARIABLES]},
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest level of log lines."
    )
    log_format: LogFormat = Field("auto", description="auto, json or text.")

    @property
    def tls(self) -> Tls | None:
        """The TLS files, or None when none is named."""
        given = (self.tls_ca, self.tls_certificate, self.tls_key)
        return Tls(*given) if any(given) else None
