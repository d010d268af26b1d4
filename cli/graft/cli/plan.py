"""What `graft up` starts: three kinds of children, their flags, ports and cores. Starts nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from graft.cli import threads
from graft.cli.child import child_command
from graft.cli.drafter import Drafter, drafter_for
from graft.cli.flags import arguments_of
from graft.cli.health import degraded_at, trouble_at
from graft.cli.ports import check_free, free_port
from graft.cli.service import settings_of
from graft.cli.supervisor import ChildSpec
from graft.common.channel import Tls
from graft.common.config import Settings
from graft.common.errors import InvalidArgument

_PROBE_TIMEOUT_S = 2.0
_VERIFY_NICENESS = 5
_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}


class UpSettings(Settings):
    """Settings of `graft up`; what is not given here is taken from each service's own settings."""

    section: ClassVar[str] = "up"

    host: str | None = Field(None, description="Address the gateway listens on.")
    port: int | None = Field(None, ge=0, le=65535, description="REST port; 0 picks a free one.")
    grpc_port: int | None = Field(
        None, ge=0, le=65535, description="gRPC port of the gateway; 0 picks a free one."
    )
    verify_port: int | None = Field(
        None, ge=0, le=65535, description="Port of verify; 0 picks a free one."
    )
    draft_port: int | None = Field(
        None, ge=0, le=65535, description="Port of draft; 0 picks a free one."
    )
    model: str | None = Field(
        None, description="Target: embedded name, Hugging Face id, folder or GGUF file."
    )
    precision: str | None = Field(
        None, description="How weights are held: auto, fp32, q8_0 or q4_1 (a GGUF file's blocks)."
    )
    served_name: str | None = Field(None, description="Name of the model in the API.")
    speculation: str | None = Field(
        None, description="How requests that do not say are speculated: auto, off or a proposer."
    )
    tiers: str | None = Field(
        None, description="Who chooses tiers of requests that name none: fixed, field or goodput."
    )
    tier_config: str | None = Field(
        None, description="For tiers=field: a preset's name or an SGLang JSON file."
    )
    draft: bool = Field(True, description="Start a draft service.")
    proposers: list[str] = Field(
        [], description="Proposers of the draft service; the first is the default."
    )
    draft_model_path: str | None = Field(
        None, description="Checkpoint of the model proposers: a folder or a Hugging Face id."
    )
    trained_drafter: bool = Field(
        True,
        description="Draft with the blocks of the target's own GGUF file where it is served in "
        "float32, else with the best drafter that comes with Graft for it, if any; --proposers "
        "takes others.",
    )
    enable_multi_layer_eagle: bool | None = Field(
        None, description="Run a layer set of its own for every token ahead (MTP checkpoints)."
    )
    drafts: int = Field(1, ge=1, le=16, description="Number of draft replicas.")
    threads: int | None = Field(
        None, ge=1, description="Threads of verify; all cores if not given."
    )
    insecure: bool = Field(
        False, description="Allow plain-text gRPC on a --host that others can reach."
    )
    otlp_endpoint: str | None = Field(
        None, description="Where all three send spans by OTLP over gRPC; none by default."
    )
    log_level: str = Field("warning", description="Lowest level of log lines shown.")
    drain_s: float = Field(10.0, ge=0, description="Seconds running answers get at the end.")


@dataclass(frozen=True, slots=True)
class Plan:
    """The children in the order they depend on each other, and where clients reach them.

    drafter: what is drafted with by default, for people; "" where they chose it themselves.
    """

    children: tuple[ChildSpec, ...]
    url: str
    model: str
    served_name: str
    drain_s: float
    drafter: str = ""


def make_plan(settings: UpSettings, config: Path | None) -> Plan:
    """Reads every service's settings, picks ports, and checks that all of them are free.

    Raises:
        InvalidArgument: a setting is wrong, or a port is in use; nothing has been started.
    """
    verify = _loaded(
        "verify",
        config,
        {
            "model": settings.model,
            "port": settings.verify_port,
            "precision": settings.precision,
        },
    )
    threads_given = settings.threads is not None or "threads" in verify.model_fields_set
    verify_flags: dict[str, Any] = {
        "model": settings.model,
        "precision": settings.precision,
        "port": _port(verify.host, verify.port, "verify-port"),
        "threads": settings.threads or (verify.threads if threads_given else threads.cores()),
    }
    draft_flags: list[dict[str, Any]] = []
    drafter = Drafter(None)
    if settings.draft:
        drafting = {
            "proposers": settings.proposers or None,
            "draft_model_path": settings.draft_model_path,
            "enable_multi_layer_eagle": settings.enable_multi_layer_eagle,
        }
        draft = _loaded("draft", config, {"port": settings.draft_port, **drafting})
        if settings.trained_drafter and not draft.draft_model_path:
            chosen = draft.proposers if "proposers" in draft.model_fields_set else []
            drafter = drafter_for(draft.model or verify.model, verify.precision, chosen)
            drafting["proposers"] = drafter.proposers
            drafting |= _unset(draft, drafter.draft)
        for replica in range(settings.drafts):
            wanted = draft.port + replica if draft.port else 0
            draft_flags.append(
                {
                    **drafting,
                    # Drafters that borrow of the target are told which one it is.
                    "model": draft.model or verify.model,
                    "port": _port(draft.host, wanted, "draft-port"),
                    "threads": draft.threads
                    if "threads" in draft.model_fields_set
                    else min(threads.cores(), _DRAFTER_THREADS if drafter.ours else 1),
                }
            )
    gateway_flags: dict[str, Any] = {
        "host": settings.host,
        "model": settings.model,
        "served_name": settings.served_name,
        "speculation": settings.speculation if settings.draft else "off",
        "tiers": settings.tiers,
        "tier_config": settings.tier_config,
        "insecure": settings.insecure or None,
    }
    gateway = _loaded(
        "gateway",
        config,
        {**gateway_flags, "port": settings.port, "grpc_port": settings.grpc_port},
    )
    ours = _unset(gateway, drafter.gateway)
    if "tiers" not in ours:
        ours.pop("tier_config", None)
    gateway_flags |= ours
    gateway_flags["port"] = _port(gateway.host, gateway.port, "port")
    gateway_flags["grpc_port"] = _port(gateway.host, gateway.grpc_port, "grpc-port")
    _check_distinct([verify_flags, *draft_flags, gateway_flags])
    gateway_flags["verify"] = [address_of(verify.host, verify_flags["port"])]
    gateway_flags["draft"] = [address_of(draft.host, flags["port"]) for flags in draft_flags]

    common = {
        "otlp_endpoint": settings.otlp_endpoint,
        "log_level": settings.log_level,
        "log_format": "json",
        "drain_s": settings.drain_s,
    }
    build = _Builder(config, common)
    children = [
        build.child("verify", "verify", verify, verify_flags, niceness=_VERIFY_NICENESS),
        *(
            build.child(
                "draft" if replica == 0 else f"draft {replica + 1}",
                "draft",
                draft,
                flags,
                essential=False,
            )
            for replica, flags in enumerate(draft_flags)
        ),
        build.child("gateway", "gateway", gateway, gateway_flags),
    ]
    return Plan(
        children=tuple(children),
        url=f"http://{address_of(gateway.host, gateway_flags['port'])}",
        model=verify.model,
        served_name=gateway.served_name or name_of(verify.model),
        drain_s=settings.drain_s,
        drafter=drafter.said,
    )


def name_of(model: str) -> str:
    """The name a model is served under: that of its folder or file, or the given one."""
    path = Path(model).expanduser()
    if path.is_file():
        return path.stem
    return path.resolve().name if path.is_dir() else model


def address_of(host: str, port: int) -> str:
    """Where a server on `host` is reached from this machine."""
    host = _WILDCARDS.get(host, host)
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


# It drafts while verify waits, so both may have the cores.
_DRAFTER_THREADS = 2


def _unset(settings: Settings, wanted: dict[str, Any]) -> dict[str, Any]:
    """Those of `wanted` that nobody has set."""
    return {name: one for name, one in wanted.items() if name not in settings.model_fields_set}


@dataclass(frozen=True, slots=True)
class _Builder:
    config: Path | None
    common: Mapping[str, Any]

    def child(
        self,
        name: str,
        service: str,
        settings: Any,
        flags: Mapping[str, Any],
        *,
        niceness: int = 0,
        essential: bool = True,
    ) -> ChildSpec:
        values = {**flags, **self.common}
        words = arguments_of({key: value for key, value in values.items() if value is not None})
        if self.config is not None:
            words.append(f"--config={self.config}")
        address = address_of(settings.host, flags["port"])
        return ChildSpec(
            name=name,
            command=child_command(niceness, [service, *words]),
            environment=threads.pool_variables(flags.get("threads", 1)),
            address=address,
            trouble=_probe(service, address, settings),
            essential=essential,
        )


def _probe(service: str, address: str, settings: Any) -> Callable[[], str | None]:
    if service == "gateway":
        return GatewayProbe(f"http://{address}")
    tls = None
    if settings.tls_certificate:
        tls = Tls(settings.tls_ca, settings.tls_certificate, settings.tls_key)
    return lambda: trouble_at(address, timeout_s=_PROBE_TIMEOUT_S, tls=tls)


class GatewayProbe:
    """Asks whether the gateway serves, and then for a while whether it has seen the drafters."""

    def __init__(self, url: str, patience_s: float = 10.0) -> None:
        self._url = url
        self._patience_s = patience_s
        self._patience_ends: float | None = None

    def __call__(self) -> str | None:
        """What it waits for; None when there is no more to wait for."""
        trouble = trouble_at(self._url, timeout_s=_PROBE_TIMEOUT_S)
        if trouble is not None:
            self._patience_ends = None
            return trouble
        now = time.monotonic()
        if self._patience_ends is None:
            self._patience_ends = now + self._patience_s
        if now >= self._patience_ends or not degraded_at(self._url, timeout_s=_PROBE_TIMEOUT_S):
            return None
        return "waiting for the drafter"


def _loaded(service: str, config: Path | None, flags: Mapping[str, Any]) -> Any:
    return settings_of(service).load(config, flags)


def _port(host: str, port: int, setting: str) -> int:
    if port == 0:
        return free_port(host)
    check_free(host, port, setting)
    return port


def _check_distinct(flags: list[dict[str, Any]]) -> None:
    ports = [group[key] for group in flags for key in ("port", "grpc_port") if key in group]
    for port in ports:
        if ports.count(port) > 1:
            raise InvalidArgument(f"port {port} is wanted by two services", field="port")
