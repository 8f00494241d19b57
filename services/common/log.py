"""Structured logs on stderr: one line an event, key=value, no payloads."""

import contextlib
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
        logger_factory=_Stderr,
    )
    structlog.contextvars.bind_contextvars(service=service, **({"worker": worker} if worker else {}))


class _Stderr:
    """Writes to what standard error is at the moment. A line that cannot be written ends nothing."""

    def __init__(self, *_: object) -> None:
        return

    def msg(self, message: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(message, file=sys.stderr, flush=True)  # noqa: T201 - this is where logs go

    log = debug = info = warning = warn = error = critical = fatal = msg


def get(name: str) -> Any:
    """A logger bound to a module's name."""
    return structlog.get_logger(module=name)
