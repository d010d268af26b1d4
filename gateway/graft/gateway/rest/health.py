"""GET /health, /ready, /version, /server_info, /metrics: for probes, scrapers and people."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from graft.gateway.info import server_info, server_version
from graft.gateway.rest.context import gateway_of

router = APIRouter(tags=["health"])
_RETRY = {"retry-after": "1"}


@router.get("/health")
async def health(request: Request) -> Response:
    """200 while the process serves or starts; 503 once every verify replica is lost."""
    gateway = gateway_of(request)
    readiness = gateway.readiness()
    detail = gateway.degraded()
    if readiness.state == "unavailable":
        return JSONResponse({"status": "unavailable", "detail": readiness.detail}, 503, _RETRY)
    status = "ok" if readiness.ready else readiness.state
    if readiness.ready and detail:
        status = "degraded"
    return JSONResponse({"status": status, "detail": detail or readiness.detail})


@router.get("/ready")
async def ready(request: Request) -> Response:
    """200 when a request sent now would be served, else 503 with the reason."""
    readiness = gateway_of(request).readiness()
    body = {
        "state": readiness.state,
        "percent": readiness.percent,
        "detail": readiness.detail,
    }
    return JSONResponse(body) if readiness.ready else JSONResponse(body, 503, _RETRY)


@router.get("/version")
@router.get("/v1/version")
async def show_version() -> dict[str, str]:
    """The version of the server."""
    return {"version": server_version()}


@router.get("/metrics")
async def show_metrics(request: Request) -> Response:
    """The metrics, in Prometheus' text form."""
    return Response(
        gateway_of(request).metrics.exposition(),
        media_type="text/plain; version=0.0.4; charset=utf-8",
    )


@router.get("/server_info")
@router.get("/v1/server_info")
async def show_server_info(request: Request) -> dict[str, Any]:
    """Versions, replicas, and the speculation numbers that load testers read."""
    return server_info(gateway_of(request))
