"""What a trainer worker shows at /metrics: its steps, where its time goes, and the newest batch."""

from collections.abc import Iterable

from prometheus_client.metrics_core import Metric

from services.common.metrics import Exposition, counter, gauge, short
from services.trainer.agent import TrainerAgent
from services.trainer.metrics import PHASES


def expose(agent: TrainerAgent) -> Exposition:
    """The worker's exposition."""
    return Exposition("trainer", lambda: _figures(agent))


def _figures(agent: TrainerAgent) -> Iterable[Metric]:
    phases, loop = agent.phases, agent.loop
    # the training thread replaces these as a whole, never in part
    policy = loop.policy if loop else None
    yield counter("libra_trainer_steps_total", "Committed steps that it took part in.", rows={(): phases.steps})
    yield counter(
        "libra_trainer_tokens_total", "Tokens of the sequences that it trained on, prompts included.",
        rows={(): phases.trained_tokens},
    )  # fmt: skip
    yield counter("libra_trainer_micro_batches_total", "Forward and backward passes.", rows={(): phases.micro_batches})
    spent = dict(zip(PHASES, phases.seconds(), strict=True))
    yield counter(
        "libra_trainer_phase_seconds_total", "Time of the training thread by phase.", ["phase"],
        {(name,): seconds for name, seconds in spent.items()},
    )  # fmt: skip
    yield gauge(
        "libra_trainer_participants", "Replicas in the newest step that it took part in; 0 while it holds none.",
        rows={(): phases.participants if loop else 0},
    )  # fmt: skip
    run = (short(policy.run.name),) if policy else ()
    yield gauge(
        "libra_trainer_version", "Version of the weights in its memory.", ["run"],
        {run: float(policy.version.number)} if policy else {},
    )  # fmt: skip
    metrics = policy.metrics if policy else {}
    yield gauge(
        "libra_trainer_batch_reward_mean", "Mean reward of the newest batch that it trained on.", ["run"],
        {run: metrics["reward_mean"]} if "reward_mean" in metrics else {},
    )  # fmt: skip
