"""What the server says of itself on both surfaces. Knows no transport."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from graft.common.grammar import kind_name
from graft.gateway.core import Gateway
from graft.gateway.replicas import Replicas
from graft.v1 import verify_pb2
from graft.v1.sampling_pb2 import AcceptRule, GrammarKind


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
        "tiers": gateway.steering.as_body(),
        "structured_output": grammar_kinds(gateway),
        "num_in_flight": gateway.num_in_flight,
        "verify": [
            {**body, **_rules(replica.description)}
            for body, replica in zip(_replicas(gateway.verify), gateway.verify, strict=True)
        ],
        "draft": _replicas(gateway.drafts),
    }


def grammar_kinds(gateway: Gateway) -> list[str]:
    """The names of what clients may hold answers to."""
    ours = {GrammarKind.GRAMMAR_KIND_TAGGED_JSON}  # made of strict functions, never asked for
    return [kind_name(kind) for kind in sorted(gateway.grammar_kinds - ours)]


def server_version() -> str:
    """The version of the installed distribution."""
    try:
        return version("graft-serve")
    except PackageNotFoundError:
        return "0.0.0"


def _rules(description: verify_pb2.VerifyServiceDescribeResponse | None) -> dict[str, Any]:
    """How a verify replica accepts; `simulated` only where it does not decide at all."""
    if description is None:
        return {}
    names = [AcceptRule.Name(rule) for rule in description.accept_rules]
    body: dict[str, Any] = {
        "accept_rules": [name.removeprefix("ACCEPT_RULE_").lower() for name in names]
    }
    if description.HasField("simulated"):
        simulated = description.simulated
        body["simulated"] = {
            "accept_length": simulated.accept_length,
            "method": simulated.method,
            "token_mode": simulated.token_mode,
            "clients_allowed": simulated.clients_allowed,
        }
    return body


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
