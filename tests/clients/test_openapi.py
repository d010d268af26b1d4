"""Requests made up from our own OpenAPI description: all are answered, none by a fault of ours."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings

from graft.testing.actor import actor
from graft.testing.front import running_front

_ROUTES = {
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/models",
    "/tokenize",
    "/detokenize",
    "/health",
}


def ask_everything(description: dict[str, Any], url: str, num_cases: int) -> Counter[int]:
    """Asks each operation for its share of `num_cases`; the statuses that came."""
    statuses: Counter[int] = Counter()
    operations = [
        found.ok() for found in schemathesis.openapi.from_dict(description).get_all_operations()
    ]
    assert {operation.path for operation in operations} >= _ROUTES
    bodies = [operation for operation in operations if operation.method.upper() == "POST"]
    with httpx.Client(base_url=url, timeout=60) as client:
        for operation in operations:
            share = num_cases // len(bodies) if operation in bodies else 3

            @seed(20)
            @settings(
                max_examples=share,
                deadline=None,
                database=None,
                phases=[Phase.generate],
                suppress_health_check=list(HealthCheck),
            )
            @given(operation.as_strategy())
            def ask(case: schemathesis.Case) -> None:
                response = send(client, case)
                statuses[response.status_code] += 1
                assert response.status_code < 500, (case.formatted_path, case.body, response.text)
                if response.status_code >= 400:
                    error = response.json()["error"]
                    assert set(error) == {"message", "type", "param", "code"}, error

            ask()
    return statuses


def send(client: httpx.Client, case: schemathesis.Case) -> httpx.Response:
    """The case over a real connection; a body is at most a few tokens of answer."""
    content = None
    if isinstance(case.body, dict | list | str | int | float | bool):
        body = case.body
        if isinstance(body, dict):
            body = {**body, "max_completion_tokens": 3} if "model" in body else body
        content = json.dumps(body).encode()
    return client.request(
        case.method,
        case.formatted_path,
        params={key: str(value) for key, value in (case.query or {}).items()},
        content=content,
        headers={"content-type": "application/json"},
    )


async def asked(folder: Path, num_cases: int) -> Counter[int]:
    async with running_front(folder, [actor()], silent_s=60.0) as front:
        description = (await front.client.get("/openapi.json")).json()
        url = str(front.client.base_url)
        statuses = await asyncio.to_thread(ask_everything, description, url, num_cases)
        await front.server.gateway.closings.drain()
        assert front.server.gateway.num_in_flight == 0
    return statuses


@pytest.mark.timeout(900)
async def test_two_hundred_made_up_requests_are_answered(tmp_path: Path) -> None:
    statuses = await asked(tmp_path, 200)
    assert sum(statuses.values()) >= 150 and statuses[200] > 0 and statuses[400] > 0


@pytest.mark.slow
@pytest.mark.timeout(3600)
async def test_two_thousand_made_up_requests_are_answered(tmp_path: Path) -> None:
    assert sum((await asked(tmp_path, 2000)).values()) >= 1500
