"""Compares a scheduler's live queue with the content built from its fleet, and its decision with the reference's."""

from dataclasses import asdict

import pytest

from services.scheduler.control.ledger import Change
from services.scheduler.control.queueing import Queueing
from services.scheduler.core import cmlfq

HELD = ("estimate_p50", "estimate_p90")
"""Held until a trajectory's own next event, so that a rebuild may see newer ones."""


def _rows(rows, without=()):
    return sorted(
        ({k: v for k, v in asdict(row).items() if k not in without} for row in rows), key=lambda row: row["name"]
    )


def same_queue(queueing: Queueing, change: Change) -> None:
    """AssertionError unless both have the same content, and the reference decides the same on the live one's."""
    live, built = queueing.live.view(change.at), queueing.view(change)
    assert _rows(live.queued, HELD) == _rows(built.queued, HELD)
    pending = [r.name for r in built.running if r.preempt_pending]
    for mine, wanted in zip(_rows(live.running, HELD), _rows(built.running, HELD), strict=True):
        if mine["name"] not in pending:
            mine["target"] = wanted["target"] = ""  # where it was once sent says nothing any more
        assert mine == wanted
    for mine, wanted in zip(_rows(live.engines), _rows(built.engines), strict=True):
        for rate in ("seconds_per_token", "prefill_tokens_per_second"):
            measured = wanted.pop(rate)
            assert mine.pop(rate) == (None if measured is None else pytest.approx(measured, rel=0.05))
        for curve in ("seconds_per_sequence", "measured_load"):  # kept while a measurement lies on it
            mine.pop(curve), wanted.pop(curve)
        assert mine.pop("kv_used_tokens") <= wanted.pop("kv_used_tokens")  # less what left since the report
        assert mine == wanted
    wanted = cmlfq.decide(live, queueing._settings)
    assert queueing.live.decide(change.at) == wanted
