"""The live state in numbers, for /metrics: who holds what, what waits and runs, how far each run is.

Called once a second on the event loop, so each table is passed over once and what is over is not looked at.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from prometheus_client.metrics_core import Metric

from services.common.metrics import gauge, short
from services.scheduler.control.observe import Step
from services.scheduler.core.lifecycle import COMMAND, SESSION, TRAJECTORY
from services.scheduler.core.model import Fleet, Run

SHOWN_SECONDS = 60.0
"""A run that ended is shown for so long, so that its last step is scraped."""
LIVE_RUNS = ("ACTIVE", "PAUSED")
LIVE_STATES = tuple(sorted(s.lower() for s in TRAJECTORY.states - TRAJECTORY.terminal))
SESSION_STATES = tuple(sorted(s.lower() for s in SESSION.states))
ROLES = ("none", "rollout", "trainer")
FREE = "free"
QUEUE_STATES = {"QUEUED": "queued", "LEASED": "running"}


def shown_runs(fleet: Fleet, now: float) -> list[Run]:
    """Runs that are live, or ended within SHOWN_SECONDS before `now` (wall clock)."""
    return [r for r in fleet.runs.values() if r.state in LIVE_RUNS or now - r.update_time < SHOWN_SECONDS]


def accelerators(fleet: Fleet) -> Iterable[Metric]:
    """Accelerators by the role that they serve now."""
    pools = {a.pool.lower() for a in fleet.accelerators.values()}
    # a series that comes and goes would break a stacked graph
    counts: dict[tuple[str, ...], float] = {
        (pool, role, FREE if role == "none" else "active"): 0.0 for pool in pools for role in ROLES
    }
    roles: dict[tuple[str, ...], float] = {}
    for item in fleet.accelerators.values():
        replica = fleet.replica_on(item.name)
        pool, role = item.pool.lower(), replica.role.lower() if replica else "none"
        key = (pool, role, replica.state.lower() if replica else FREE)
        counts[key] = counts.get(key, 0.0) + 1
        roles[short(item.name), pool, role] = 1.0
    yield gauge(
        "libra_accelerators", "Accelerators by the role of the replica on them and its state.",
        ["pool", "role", "state"], counts,
    )  # fmt: skip
    yield gauge(
        "libra_accelerator_role", "1 for the role that the accelerator serves now.", ["accelerator", "pool", "role"],
        roles,
    )  # fmt: skip


def trajectories(fleet: Fleet, runs: Iterable[Run], levels: Iterable[int]) -> Iterable[Metric]:
    """Trajectories by run and by level of the queue; `levels` are shown also when they are empty."""
    names = [r.name for r in runs]
    states: Counter[tuple[str, str]] = Counter()
    queue: Counter[tuple[int, str]] = Counter()
    # there are few of these, whatever the number of trajectories
    for (run, state, level), count in Counter((t.run, t.state, t.level) for t in fleet.trajectories.values()).items():
        states[run, state] += count
        if state in QUEUE_STATES:
            queue[level, state] += count
    yield gauge(
        "libra_trajectories", "Trajectories that have not ended, by state.", ["run", "state"],
        {(short(n), s): float(states[n, s.upper()]) for n in names for s in LIVE_STATES},
    )  # fmt: skip
    shown = sorted({0, *levels, *(level for level, _ in queue)})
    yield gauge(
        "libra_queue_trajectories", "Trajectories by level of the queue: queued, or running on an engine.",
        ["level", "state"],
        {(str(n), label): float(queue[n, s]) for n in shown for s, label in QUEUE_STATES.items()},
    )  # fmt: skip


def runs(shown: Iterable[Run], newest: Mapping[str, Step]) -> Iterable[Metric]:
    """How far each run is; `newest` has the newest committed step by run."""
    train = [r for r in shown if r.kind == "TRAIN"]
    by = ["run"]
    yield gauge(
        "libra_policy_version", "Newest committed version.", by, {(short(r.name),): float(r.head) for r in train}
    )
    yield gauge(
        "libra_staleness_bound_versions", "Most versions that a trained token may be behind its step's base.", by,
        {(short(r.name),): float(r.max_versions) for r in train},
    )  # fmt: skip
    steps = {(short(r.name),): newest[r.name] for r in train if r.name in newest}
    yield gauge(
        "libra_step_staleness_versions",
        "Versions by which the oldest trained token of the newest step was behind its base.", by,
        {run: float(step.staleness) for run, step in steps.items()},
    )  # fmt: skip
    yield gauge(
        "libra_reward_mean", "Mean reward of the newest committed step's trajectories.", by,
        {run: step.reward for run, step in steps.items()},
    )  # fmt: skip


def workers(fleet: Fleet) -> Iterable[Metric]:
    """Newest sessions of all workers, and commands under way."""
    kinds = {w.kind.lower() for w in fleet.workers.values()}
    counts: dict[tuple[str, ...], float] = {(kind, state): 0.0 for kind in kinds for state in SESSION_STATES}
    for worker in fleet.workers.values():
        session = fleet.sessions.get(f"{worker.name}/sessions/{worker.epoch}")
        if session is not None:
            counts[worker.kind.lower(), session.state.lower()] += 1
    yield gauge("libra_sessions", "Workers by the state of their newest session.", ["kind", "state"], counts)
    open_ = sum(c.state not in COMMAND.terminal for c in fleet.commands.values())
    yield gauge("libra_commands_open", "Commands that no worker has finished yet.", rows={(): float(open_)})


def planner(fleet: Fleet) -> Iterable[Metric]:
    """What the newest move of the planner promised, and what the newest judged one brought."""
    moves = [r for r in fleet.reassignments.values() if r.cause == "planner"]
    judged = [r for r in moves if r.rate_after]
    gains: dict[tuple[str, ...], float] = {}
    if moves:
        gains["predicted",] = moves[-1].predicted_gain
    if judged:
        gains["observed",] = judged[-1].rate_after - judged[-1].rate_before
    yield gauge(
        "libra_planner_gain_tokens_per_second", "Trained tokens a second more by the newest move of the planner.",
        ["which"], gains,
    )  # fmt: skip
