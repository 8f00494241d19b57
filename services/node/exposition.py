"""What a node agent shows at /metrics: its accelerators as last measured, and its worker processes."""

from collections import Counter
from collections.abc import Iterable

from prometheus_client.metrics_core import Metric

from services.common.metrics import Exposition, counter, gauge, short
from services.node.agent import NodeAgent

STATES = ("idle", "starting", "ready", "paused", "stopped", "retired")
"""Of a worker process, see common/processes.Supervised."""


def expose(agent: NodeAgent) -> Exposition:
    """The agent's exposition. It measures nothing of its own: a measurement counts from the one before it."""
    return Exposition("node", lambda: _figures(agent))


def _figures(agent: NodeAgent) -> Iterable[Metric]:
    by = ["accelerator"]
    seen = {(short(o.accelerator),): o for o in agent.observed}
    yield gauge(
        "libra_node_accelerator_memory_bytes", "Memory of the accelerator.", by,
        {(short(s.name),): float(s.memory_bytes) for s in agent.slots.values()},
    )  # fmt: skip
    yield gauge(
        "libra_node_accelerator_free_memory_bytes", "Of its memory, what no worker holds above its idle memory.", by,
        {name: float(o.free_memory_bytes) for name, o in seen.items()},
    )  # fmt: skip
    yield gauge(
        "libra_node_accelerator_utilization_ratio", "Share of the accelerator's capacity used, 0 to 1.", by,
        {name: o.utilization for name, o in seen.items()},
    )  # fmt: skip
    yield gauge(
        "libra_node_accelerator_held_generation", "Generation whose lock is held; 0 if none is.", by,
        {name: float(o.locked_generation) for name, o in seen.items()},
    )  # fmt: skip
    workers = agent.workers.by_name.values()
    states = Counter(w.state.lower() for w in workers)
    yield gauge("libra_node_workers", "Worker processes by state.", ["state"], {(s,): float(states[s]) for s in STATES})
    yield counter(
        "libra_node_worker_restarts_total", "Restarts of a worker process after it ended by itself.", ["worker"],
        {(w.name,): float(w.restarts) for w in workers},
    )  # fmt: skip
