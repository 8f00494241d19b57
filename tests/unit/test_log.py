"""Logs never stand in the way of the work."""

import io

import structlog

from services.common import log


def test_a_line_goes_to_what_standard_error_is_now_and_a_closed_one_ends_nothing(monkeypatch):
    try:
        first, second = io.StringIO(), io.StringIO()
        monkeypatch.setattr("sys.stderr", first)
        log.setup("service", "worker-1")
        log.get("module").warning("one", number=1)
        assert "event='one'" in first.getvalue()
        assert "service='service'" in first.getvalue()
        monkeypatch.setattr("sys.stderr", second)
        first.close()
        log.get("module").error("two")
        assert "event='two'" in second.getvalue()
        second.close()
        log.get("module").error("three")
    finally:
        structlog.reset_defaults()
        structlog.contextvars.clear_contextvars()
