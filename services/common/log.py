"""Structured logs on stderr: one line an event, key=value, no payloads."""

import logging
import sys
from typing import Any

import structlog


def setup(service: str, worker: str = "", level: str = "info") -> None:
    """Configures logging once per process; every line carries the service (and worker) it comes from."""
    number = {"debug": 10, "info": 20, "warning": 30, "error": 40}[level]
    logging.basicConfig(stream=sys.stderr, level=max(number, logging.WARNING), format="%(name)s: %(message)s")
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S.%f", utc=False),
            structlog.processors.ExceptionRenderer(),
            structlog.processors.KeyValueRenderer(key_order=["timestamp", "level", "event"], drop_missing=True),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    structlog.contextvars.bind_contextvars(service=service, **({"worker": worker} if worker else {}))


def get(name: str) -> Any:
    """A logger bound to a module's name."""
    return structlog.get_logger(module=name)
