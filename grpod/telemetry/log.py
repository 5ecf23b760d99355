"""Logs are events with fields: `log.info("adapter_published", version=7)`. Lines on a terminal, JSON otherwise."""

from __future__ import annotations

import logging
import sys
from typing import Literal

import structlog


def configure(*, fmt: Literal["auto", "console", "json"] = "auto", level: str = "info") -> None:
    pretty = fmt == "console" or (fmt == "auto" and sys.stderr.isatty())
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S" if pretty else "iso", utc=not pretty),
            structlog.processors.StackInfoRenderer(),
            *([] if pretty else [structlog.processors.format_exc_info]),
            # plain: rich would print the values of locals, and with them secrets
            structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback)
            if pretty
            else structlog.processors.JSONRenderer(),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        # looked up at each line: a progress bar puts itself in its place while it is shown
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
        cache_logger_on_first_use=False,
    )


def get_logger(**bound: object) -> structlog.typing.FilteringBoundLogger:
    logger: structlog.typing.FilteringBoundLogger = structlog.get_logger(**bound)
    return logger
