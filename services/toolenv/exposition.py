"""What a tool environment server shows at /metrics."""

from collections.abc import Collection, Iterable, Sized

from prometheus_client import Counter, Histogram
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from services.common.metrics import CALL_BUCKETS, Exposition, gauge
from services.toolenv.envs.base import Outcome

UNKNOWN_TOOL = "unknown"
DURING = ("open", "call", "score")


class Tally:
    """Counts calls as they end. Names of tools come from a model: those that are not offered share one label."""

    def __init__(self, tools: Collection[str]) -> None:
        self._tools = tools
        self._calls = Counter(
            "libra_toolenv_calls_total", "Tool calls that ended, by tool and outcome.", ["tool", "outcome"],
            registry=None,
        )  # fmt: skip
        self._seconds = Histogram(
            "libra_toolenv_call_seconds", "Time of a tool call with its wait for a place to run in.", ["tool"],
            buckets=CALL_BUCKETS, registry=None,
        )  # fmt: skip
        self._infra = Counter(
            "libra_toolenv_infra_errors_total", "Failures of the environment itself, by what was under way.",
            ["during"], registry=None,
        )  # fmt: skip
        # a series that begins with its first call would hide that call from increase()
        for tool in (*tools, UNKNOWN_TOOL):
            self._seconds.labels(tool)
            for outcome in Outcome:
                self._calls.labels(tool, outcome.value.lower())
        for what in DURING:
            self._infra.labels(what)

    @property
    def collectors(self) -> Iterable[Collector]:
        """To be registered."""
        return self._calls, self._seconds, self._infra

    def called(self, tool: str, outcome: Outcome, seconds: float) -> None:
        """A call ended."""
        name = tool if tool in self._tools else UNKNOWN_TOOL
        self._calls.labels(name, outcome.value.lower()).inc()
        self._seconds.labels(name).observe(seconds)
        if outcome is Outcome.INFRA_ERROR:
            self.infra_error("call")

    def infra_error(self, during: str) -> None:
        """The environment failed while it did one of DURING."""
        self._infra.labels(during).inc()


def expose(environment: str, tally: Tally, sessions: Sized) -> Exposition:
    """The exposition of a server of this environment."""

    def figures() -> Iterable[Metric]:
        yield gauge(
            "libra_toolenv_sessions", "Sessions that are open.", ["environment"],
            {(environment,): float(len(sessions))},
        )  # fmt: skip

    return Exposition("toolenv", figures, tally.collectors)
