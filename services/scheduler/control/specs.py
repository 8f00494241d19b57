"""The settings of runs as accepted, parsed once for each edit."""

from services.common import wire
from services.scheduler.core.model import Run

_CACHE: dict[tuple[str, int, int], wire.Run] = {}
MAX_CACHED = 256

DEFAULT_ACTIONS = {
    "EPISODE": "RETRY",
    "ENVIRONMENT": "RETRY",
    "ENGINE": "RESUME_OR_RETRY",
    "WORKER": "RESUME_OR_RETRY",
    "REPLAY_DIVERGED": "RETRY",
    "DEADLINE": "VOID",
    "DATA_LOSS": "RETRY",
    "TOKEN_DRIFT": "RETRY",
}
"""What a failure class leads to unless the run says otherwise."""
DEFAULT_MAX_ATTEMPTS = 3


def spec(run: Run) -> wire.Run:
    """The run's settings; do not modify."""
    key = (run.name, run.etag, hash(run.spec))
    known = _CACHE.get(key)
    if known is None:
        known = wire.Run()
        known.ParseFromString(run.spec)
        while len(_CACHE) >= MAX_CACHED:
            del _CACHE[next(iter(_CACHE))]
        _CACHE[key] = known
    return known


def failure_rule(run: Run, failure: str) -> tuple[str, int]:
    """(action, failures allowed) of a failure class in this run."""
    for rule in spec(run).failure_rules:
        if wire.FailureClass.Name(rule.failure) == f"FAILURE_CLASS_{failure}":
            action = wire.FailureAction.Name(rule.action).removeprefix("FAILURE_ACTION_")
            if action == "UNSPECIFIED":
                action = "RESUME_OR_RETRY"
            return action, rule.max_attempts or DEFAULT_MAX_ATTEMPTS
    return DEFAULT_ACTIONS.get(failure, "RETRY"), DEFAULT_MAX_ATTEMPTS
