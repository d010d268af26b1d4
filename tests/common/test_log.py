"""Logs go where standard error is now, not where it was when logging was set up."""

from __future__ import annotations

import io
import json
import sys

import pytest
import structlog

from graft.common import log


def test_a_line_goes_to_the_standard_error_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    former = structlog.get_config()
    first, second = io.StringIO(), io.StringIO()
    try:
        monkeypatch.setattr(sys, "stderr", first)
        log.setup("verify", fmt="json")
        first.close()
        monkeypatch.setattr(sys, "stderr", second)
        log.get("engine").info("ready", rows=3)
    finally:
        structlog.configure(**former)
        structlog.contextvars.unbind_contextvars("service")
    line = json.loads(second.getvalue())
    assert (line["event"], line["part"], line["rows"]) == ("ready", "engine", 3)
