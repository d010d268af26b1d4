"""What the server says of itself on both surfaces. Knows no transport."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from graft.gateway.core import Gateway
from graft.gateway.replicas import Replicas


def server_info(gateway: Gateway) -> dict[str, Any]:
    """The body of /server_info."""
    metrics = gateway.metrics
    accept_length = metrics.num_round_tokens / metrics.num_rounds if metrics.num_rounds else 0.0
    tier = gateway.tier(None).tier
    readiness = gateway.readiness()
    return {
        "version": server_version(),
        "model": gateway.model,
        "state": readiness.state,
        "detail": readiness.detail,
        "speculation": gateway.speculation_body(),
        "internal_states": [
            {
                "speculative_num_steps": tier.num_steps,
                "avg_spec_accept_length": accept_length,
            }
        ],
        "num_in_flight": gateway.num_in_flight,
        "verify": _replicas(gateway.verify),
        "draft": _replicas(gateway.drafts),
    }


def server_version() -> str:
    """The version of the installed distribution."""
    try:
        return version("graft-serve")
    except PackageNotFoundError:
        return "0.0.0"


def _replicas(replicas: Replicas[Any]) -> list[dict[str, Any]]:
    return [
        {
            "address": replica.address,
            "state": replica.state.value,
            "detail": replica.detail,
            "sessions": replica.num_sessions,
        }
        for replica in replicas
    ]
