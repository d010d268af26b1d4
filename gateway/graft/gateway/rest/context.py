"""What a route knows of its request besides the body: the gateway, the caller, the headers owed."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from urllib.parse import quote

from starlette.requests import Request

from graft.gateway.answer import Answer
from graft.gateway.core import Gateway
from graft.gateway.job import ChoiceEvent, Collected
from graft.gateway.prepare import Asked
from graft.gateway.request import Fields
from graft.gateway.rest.follow import Following
from graft.gateway.rest.sse import Cadence

_MAX_HEADER_CHARS = 1024


def gateway_of(request: Request) -> Gateway:
    """The gateway of the application."""
    gateway = request.app.state.gateway
    assert isinstance(gateway, Gateway)
    return gateway


def asked_by(request: Request) -> Asked:
    """The request's id and its caller's tenant, as the middleware found them."""
    state = request.scope["state"]
    return Asked(state["request_id"], state["tenant"])


def cadence_of(gateway: Gateway) -> Cadence:
    """How often this server's streams speak."""
    return Cadence(gateway.settings.stream_interval, gateway.settings.keepalive_s)


def ignored_header(gateway: Gateway, body: Fields) -> dict[str, str]:
    """Counts fields without effect and names them in ``x-ignored-params``."""
    unheeded = gateway.unheeded(body)
    if not unheeded:
        return {}
    gateway.metrics.ignored(len(unheeded))
    names = ",".join(quote(name[:64], safe="[]") for name in unheeded)
    return {"x-ignored-params": names[:_MAX_HEADER_CHARS]}


async def collect(
    answer: Answer, events: AsyncGenerator[ChoiceEvent, None], request: Request
) -> list[Collected]:
    """All choices of an answer, in the order of their index.

    Raises:
        GraftError: the answer failed.
        ClientGone: the client left.
    """
    choices = [Collected() for _ in answer.job.choices]
    async with Following(events, request) as following:
        while (event := await following.next()) is not None:
            choices[event.index].take(event)
    return choices
