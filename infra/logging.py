"""structlog set-up: JSON lines for services, colours on a terminal."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import structlog


def configure_logging(service: str = "", *, json_lines: bool | None = None, default_level: str = "info") -> None:
    """Log to stderr. JSON unless stderr is a terminal; `ROLLSTREAM_LOG` sets the level."""
    as_json = not sys.stderr.isatty() if json_lines is None else json_lines
    level = getattr(logging, os.environ.get("ROLLSTREAM_LOG", default_level).upper(), logging.INFO)
    shared: list[Any] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.StackInfoRenderer(),
    ]
    if as_json:
        renderer: list[Any] = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        renderer = [structlog.dev.ConsoleRenderer()]
    structlog.configure(
        processors=shared + renderer,
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    logging.basicConfig(
        stream=sys.stderr, level=max(level, logging.WARNING), format="%(name)s: %(message)s", force=True
    )
    if service:
        structlog.contextvars.bind_contextvars(service=service)
