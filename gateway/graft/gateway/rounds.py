"""One round of a choice as it is shown to those who ask. Only values and their checks."""

from __future__ import annotations

from dataclasses import dataclass

from graft.common.errors import GraftError
from graft.common.tier import Tier
from graft.gateway.choice import Committed
from graft.v1 import verify_pb2


@dataclass(frozen=True, slots=True)
class SeenRound:
    """A commit, its number in the choice (the prefill is 0), and when it came.

    millis is counted from the beginning of the request; tier is the one in force.
    """

    number: int
    millis: float
    tier: Tier
    commit: Committed


def check_trace(trace: verify_pb2.RoundTrace) -> None:
    """Refuses a trace that does not describe one tree.

    Raises:
        GraftError: the verify replica sent nonsense.
    """
    num_nodes, num_drafted = len(trace.tokens), len(trace.parents)
    columns = (len(trace.choices), len(trace.choice_logprobs))
    ordered = all(parent <= node for node, parent in enumerate(trace.parents))
    known = all(0 < node < num_nodes for node in trace.accepted_nodes)
    if not (
        num_drafted == len(trace.logprobs) == num_nodes - 1
        and columns in ((0, 0), (num_nodes, num_nodes))
        and ordered
        and known
    ):
        raise GraftError(f"the verify replica sent a trace of {num_nodes} nodes that is no tree")
