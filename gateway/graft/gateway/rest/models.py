"""GET /v1/models and /v1/models/{id}: what is served, and how it can be speculated."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request

from graft.common.errors import NoReplica
from graft.gateway.core import Gateway
from graft.gateway.info import grammar_kinds
from graft.gateway.rest.context import gateway_of

router = APIRouter(tags=["models"])


@router.get("/v1/models")
async def list_models(request: Request) -> dict[str, Any]:
    """The one model of this server."""
    return {"object": "list", "data": [_model(gateway_of(request))]}


@router.get("/v1/models/{model_id:path}")
async def retrieve_model(model_id: str, request: Request) -> dict[str, Any]:
    """The model by its id, which may hold slashes."""
    gateway = gateway_of(request)
    gateway.check_model(model_id)
    return _model(gateway)


def _model(gateway: Gateway) -> dict[str, Any]:
    try:
        context_length: int | None = gateway.target().context_length
    except NoReplica:
        context_length = None
    return {
        "id": gateway.model,
        "object": "model",
        "created": gateway.created,
        "owned_by": "graft",
        "max_model_len": context_length,
        "speculation": gateway.speculation_body(),
        "structured_output": grammar_kinds(gateway),
    }
