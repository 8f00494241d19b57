"""Compares a scheduler's live queue with the content built from its fleet, and its decision with the reference's."""

from collections import Counter
from dataclasses import asdict, replace

import pytest

from services.scheduler.control import commands
from services.scheduler.control.ledger import Change
from services.scheduler.control.queueing import Queueing, _tokens
from services.scheduler.core import cmlfq
from services.scheduler.core.cmlfq import EngineView, QueuedTrajectory, QueueView, RunningTrajectory

HELD = ("estimate_p50", "estimate_p90")
"""Held until a trajectory's own next event, so that a rebuild may see newer ones."""
WAVERS = 0.05
"""A little more than the share by which rates may differ and count as the same."""


class Reservations:
    """KV tokens that each lease keeps room for, worked out from what a live queue is told and what it is answered."""

    def __init__(self, queueing: Queueing) -> None:
        self.kept: dict[str, float] = {}
        self._growth = queueing._settings.kv_growth
        self._expected: dict[str, float] = {}
        self._tokens: dict[str, int] = {}
        self._engine: dict[str, str] = {}
        self._bounded: dict[str, bool] = {}
        live = queueing.live
        self._estimate, live._estimate = live._estimate, self._answered
        for event, after in (
            ("queued", self._queued), ("leased", self._leased), ("turned", self._turned), ("engine", self._engine_told),
            ("drop_engine", self._dropped),
        ):  # fmt: skip
            setattr(live, event, self._watched(getattr(live, event), after))

    @staticmethod
    def _watched(event, after):
        def watched(*args, **given):
            event(*args, **given)
            after(*args, **given)

        return watched

    def _answered(self, name):
        answer = self._estimate(name)
        self._expected[name] = answer[0]
        return answer

    def _engine_told(self, view):
        self._bounded[view.name] = view.kv_capacity_tokens > 0

    def _dropped(self, name):
        del self._bounded[name]

    def _queued(self, name, *, tokens, **_):
        self._tokens[name] = tokens
        self.kept.pop(name, None)

    def _leased(self, name, *, engine, **_):
        self._engine[name] = engine
        self._keep(name)

    def _turned(self, name, *, tokens, **_):
        self._tokens[name] = tokens
        self._keep(name)

    def _keep(self, name):
        bounded = self._bounded.get(self._engine[name], False)
        self.kept[name] = self._tokens[name] + self._growth * self._expected[name] if bounded else 0.0


def built(queueing: Queueing, change: Change) -> QueueView:
    """What is waiting, running and serving, from the fleet alone."""
    fleet = change.fleet
    queued, running = [], []
    pending = {c.subject for c in commands.open_commands(queueing._ledger, kind="preempt")}
    for item in fleet.trajectories.values():
        p50, p90 = queueing._estimate(item.name) if item.state in ("QUEUED", "LEASED") else (0.0, 0.0)
        if queueing._waits(change, item):
            queued.append(
                QueuedTrajectory(
                    name=item.name, run=item.run, group=item.group, admission_number=item.admission_number,
                    priority=queueing._priority(change, item), level=item.level, waiting_since=item.queued_at,
                    tokens=_tokens(item), generated=item.generated_tokens, estimate_p50=p50, estimate_p90=p90,
                    last_engine=item.prefer or item.replica,
                )
            )  # fmt: skip
        elif item.state == "LEASED":
            running.append(
                RunningTrajectory(
                    name=item.name, run=item.run, engine=item.replica, level=item.level, since=item.leased_at,
                    generated=item.generated_tokens, quantum_used=item.generated_tokens - item.lease_generated,
                    in_tool_wait=item.in_tool_wait, estimate_p50=p50, estimate_p90=p90, tokens=_tokens(item),
                    preempt_pending=item.name in pending, admission_number=item.admission_number,
                    moves=item.preempted, target=item.prefer,
                    reserved=queueing.reservations.kept.get(item.name, 0.0),
                )
            )  # fmt: skip
    leased = Counter(t.engine for t in running)
    engines = [replace(view, running=leased[view.name]) for view in queueing._engines(change)]
    return QueueView(now=change.at, queued=queued, running=running, engines=engines)


def _rows(rows, without=()):
    return sorted(
        ({k: v for k, v in asdict(row).items() if k not in without} for row in rows), key=lambda row: row["name"]
    )


def _same_curve(mine: EngineView, told: EngineView) -> None:
    """What the live queue goes on with is the same speed as was measured, at the load at which it was measured."""
    for rate in ("seconds_per_token", "seconds_per_sequence", "prefill_tokens_per_second"):
        kept, measured = getattr(mine, rate), getattr(told, rate)
        assert kept == (None if measured is None else pytest.approx(measured, rel=WAVERS)), rate
    if told.seconds_per_token is None:
        return
    more = told.measured_load - mine.measured_load
    expected = cmlfq.pace(mine.seconds_per_token, mine.seconds_per_sequence, more)
    assert expected == pytest.approx(told.seconds_per_token, rel=WAVERS)


def same_queue(queueing: Queueing, change: Change) -> None:
    """AssertionError unless both have the same content, and the reference decides the same on the live one's."""
    live, wanted = queueing.live.view(change.at), built(queueing, change)
    assert _rows(live.queued, HELD) == _rows(wanted.queued, HELD)
    pending = [r.name for r in wanted.running if r.preempt_pending]
    for mine, row in zip(_rows(live.running, HELD), _rows(wanted.running, HELD), strict=True):
        if mine["name"] not in pending:
            assert mine["target"] == "", "nobody sends it anywhere"
            row["target"] = ""  # where it was once sent says nothing any more
        assert mine == row, {k: (v, row.get(k)) for k, v in mine.items() if v != row.get(k)}
    speeds = ("seconds_per_token", "seconds_per_sequence", "prefill_tokens_per_second", "measured_load")
    for mine, row in zip(_rows(live.engines, speeds), _rows(wanted.engines, speeds), strict=True):
        assert mine.pop("kv_used_tokens") <= row.pop("kv_used_tokens")  # less what left since the report
        assert mine == row, {k: (v, row.get(k)) for k, v in mine.items() if v != row.get(k)}
    told = {view.name: view for view in wanted.engines}
    for mine in live.engines:
        _same_curve(mine, told[mine.name])
    decision = cmlfq.decide(live, queueing._settings)
    assert queueing.live.decide(change.at) == decision
