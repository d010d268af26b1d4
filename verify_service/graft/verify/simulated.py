"""Simulated acceptance of a whole replica, for benchmarks: what is set, and how loudly it shows.

Its text means nothing, so no client is let in unless that was asked for as well.
"""

from __future__ import annotations

from graft.common.errors import InvalidArgument
from graft.kernels.cpu.simulate import FIXED_TOKEN, SimulatedMethod, SimulatedTokens, Simulation
from graft.v1 import verify_pb2
from graft.verify.settings import VerifySettings


def simulation_of(settings: VerifySettings, vocab_size: int) -> Simulation | None:
    """What the settings ask for; None accepts as the target says.

    Raises:
        InvalidArgument: the token that is written has no place in the vocabulary.
    """
    if not settings.simulate_accept_length:
        return None
    tokens = SimulatedTokens(settings.simulate_token_mode)
    if tokens is SimulatedTokens.FIXED and vocab_size <= FIXED_TOKEN:
        raise InvalidArgument(
            f"simulated acceptance writes token {FIXED_TOKEN}, "
            f"the target's ids end at {vocab_size - 1}",
            field="simulate_token_mode",
        )
    method = SimulatedMethod(settings.simulate_method)
    return Simulation(settings.simulate_accept_length, method, tokens)


def simulation_message(
    settings: VerifySettings, simulation: Simulation | None
) -> verify_pb2.SimulatedAcceptance | None:
    """What peers are told; None when nothing is simulated."""
    if simulation is None:
        return None
    return verify_pb2.SimulatedAcceptance(
        accept_length=simulation.accept_length,
        method=simulation.method.value,
        token_mode=simulation.tokens.value,
        clients_allowed=settings.simulate_allow_clients,
    )


def closed_to_clients(settings: VerifySettings) -> str:
    """Why this replica takes no session; empty when it does."""
    if not settings.simulate_accept_length or settings.simulate_allow_clients:
        return ""
    return (
        f"this replica simulates an accept length of {settings.simulate_accept_length:g}, so its "
        "text means nothing; start it with simulate_allow_clients to use it all the same"
    )
