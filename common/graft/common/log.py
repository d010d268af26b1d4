"""Logs: one event a line, fields not prose; JSON for machines, colours on a terminal."""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog

LogFormat = Literal["auto", "json", "text"]


def get(part: str) -> structlog.stdlib.BoundLogger:
    """The logger of one part of a service; every line carries `part`."""
    logger: structlog.stdlib.BoundLogger = structlog.get_logger(part=part)
    return logger


def setup(service: str, level: str = "info", fmt: LogFormat = "auto") -> None:
    """Configures logging of this process, once, at its start."""
    human = fmt == "text" or (fmt == "auto" and sys.stderr.isatty())
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if human else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.getLevelNamesMapping()[level.upper()]
        ),
        # Looked up line by line: what stood there at first may be closed by now.
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
        cache_logger_on_first_use=False,
    )
    structlog.contextvars.bind_contextvars(service=service)
