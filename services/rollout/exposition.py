"""What a rollout worker shows at /metrics: its engine as last asked, its episodes and their tool calls."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from prometheus_client import Counter, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.common.metrics import CALL_BUCKETS, Exposition, Rows, counter, gauge, short

if TYPE_CHECKING:
    from services.rollout.agent import RolloutAgent


class Tally:
    """Counts episodes and tool calls as they end."""

    def __init__(self) -> None:
        self._episodes = Counter(
            "libra_rollout_episodes_total",
            "Leases worked on that ended, by how: reward, a failure class, an interruption, dropped, refused.",
            ["outcome"], registry=None,
        )  # fmt: skip
        self._calls = Counter(
            "libra_rollout_tool_calls_total", "Tool calls that ended, by tool and outcome.", ["tool", "outcome"],
            registry=None,
        )  # fmt: skip
        self._seconds = Histogram(
            "libra_rollout_tool_call_seconds", "Time of a tool call as the episode waits for it, repetitions included.",
            ["tool"], buckets=CALL_BUCKETS, registry=None,
        )  # fmt: skip

    @property
    def collectors(self) -> Iterable[Collector]:
        """To be registered."""
        return self._episodes, self._calls, self._seconds

    def ended(self, how: str) -> None:
        """An episode ended; `how` is Episode.ended_how."""
        self._episodes.labels(how.lower() or "dropped").inc()

    def called(self, tool: str, outcome: str, seconds: float) -> None:
        """A tool call ended."""
        self._calls.labels(tool, outcome.lower()).inc()
        self._seconds.labels(tool).observe(seconds)


def expose(agent: "RolloutAgent") -> Exposition:
    """The worker's exposition. It shows the load that the scheduler is told: the engine is not asked once more."""
    return Exposition("rollout", lambda: _figures(agent), agent.tally.collectors)


def _figures(agent: "RolloutAgent") -> Iterable[Metric]:
    stats, held, version = agent.stats, agent.holding, agent.engine.version
    yield counter(
        "libra_rollout_generated_tokens_total", "Tokens that the engine generated.", rows={(): stats.generated_tokens}
    )
    yield counter(
        "libra_rollout_prefilled_tokens_total", "Prompt and context tokens that the engine computed.",
        rows={(): stats.prefilled_tokens},
    )  # fmt: skip
    yield gauge(
        "libra_rollout_sequences", "Sequences in the engine.", ["state"],
        {("running",): stats.running if held else 0, ("waiting",): stats.waiting if held else 0},
    )  # fmt: skip
    yield gauge(
        "libra_rollout_episodes_running", "Episodes under way, those that wait for a tool included.",
        rows={(): agent.episodes},
    )  # fmt: skip
    yield gauge(
        "libra_rollout_kv_used_tokens", "Tokens in the engine's KV cache.",
        rows={(): stats.kv_used_tokens if held else 0},
    )  # fmt: skip
    yield gauge(
        "libra_rollout_kv_capacity_tokens", "Tokens that the KV cache can hold; 0 while no model is loaded.",
        rows={(): stats.kv_capacity_tokens if held else 0},
    )  # fmt: skip
    served: Rows = {(short(held.run),): float(version.number)} if held and version else {}
    yield gauge("libra_rollout_weight_version", "Version that the engine serves.", ["run"], served)
