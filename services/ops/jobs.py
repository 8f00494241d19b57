"""The demonstration's three runs: evaluation, training, the same evaluation again."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.common import wire
from services.common.blobs import BlobStore
from services.common.errors import ConfigError
from services.ops import workload

TRAIN, EVAL_START, EVAL_END = "train", "eval-start", "eval-end"
"""Run ids."""
ENVIRONMENT = "calculator"
GROUPS = 16
"""Prompts of a step."""
GROUP_SIZE = 8
MAX_VERSIONS = 2
HELD_OUT = 256
CONTEXT_TOKENS = 512
"""Positions of the demonstration's model."""
GENERATED_TOKENS = 480
"""Of these, generated at most; the rest is prompt and tool output of the longest episodes."""
MAX_TURNS = 32
LEARNING_RATE = 3e-4
WARMUP_STEPS = 3
"""Adam's first step moves every weight by the whole rate, whatever the gradient says: unwarmed it costs some reward."""
MIN_LR_RATIO = 0.1
"""Over its second half a run's learning rate falls to this share. Of a batch that is almost all right the advantages
are those of a few samples; full steps on them spoilt what was learnt."""
KL_COEFFICIENT = 0.02
"""Weight of the divergence from the base model: without it the last steps at this learning rate are noisy."""
CHECKPOINT_EVERY = 5

MODEL = Path(__file__).parent / "assets" / "demo"
"""The warm-started model, in Hugging Face format."""


@dataclass(frozen=True, slots=True)
class Job:
    """What distinguishes one demonstration from another."""

    seed: int
    steps: int
    drift: bool
    model: Path
    prefix: str = ""
    """Of run ids and task files, where other jobs live beside this one."""

    def run_id(self, run: str) -> str:
        """Id of one of the three runs."""
        return f"{self.prefix}{run}"


def model_folder() -> Path:
    """Where the warm-started model lies; ConfigError if this installation has none."""
    if not (MODEL / "config.json").exists() or not any(MODEL.glob("*.safetensors")):
        raise ConfigError(
            f"the demonstration's model is missing: expected config.json and model.safetensors in {MODEL}; it is part "
            "of the repository, check the clone"
        )
    return MODEL


def training(job: Job, blobs: BlobStore) -> wire.Run:
    """The training run: GRPO over a task file that is used up after exactly `steps` batches."""
    tasks = workload.training_tasks(job.seed, job.steps * GROUPS, job.drift)
    run = _run(job, wire.RUN_KIND_TRAIN, GROUP_SIZE, str(job.model), tasks, blobs, f"{TRAIN}-{job.seed}")
    run.algorithm.name = "grpo"
    run.algorithm.settings.update(settings(job.steps))
    run.staleness.max_versions = MAX_VERSIONS
    run.batch.CopyFrom(wire.BatchSize(groups=GROUPS))
    return run


def settings(steps: int) -> dict[str, float]:
    """The algorithm's settings for a run of so many steps."""
    return {
        "learning_rate": LEARNING_RATE,
        "warmup_steps": WARMUP_STEPS,
        "decay_after": steps // 2,
        "decay_steps": steps - steps // 2,
        "min_lr_ratio": MIN_LR_RATIO,
        "checkpoint_every": CHECKPOINT_EVERY,
        "kl_coef": KL_COEFFICIENT,
    }


def evaluation(job: Job, model: Path, blobs: BlobStore) -> wire.Run:
    """An evaluation of a model folder on the held-out tasks, one sample each at temperature 1."""
    tasks = workload.heldout_tasks(job.seed, HELD_OUT)
    return _run(job, wire.RUN_KIND_EVAL, 1, str(model), tasks, blobs, f"heldout-{job.seed}")


def _run(
    job: Job,
    kind: "wire.RunKind.ValueType",
    group_size: int,
    model: str,
    tasks: Iterable[Mapping[str, Any]],
    blobs: BlobStore,
    file: str,
) -> wire.Run:
    key = f"tasks/{job.prefix}{file}.jsonl"
    data = "".join(json.dumps(task, separators=(",", ":")) + "\n" for task in tasks).encode()
    return wire.Run(
        kind=kind,
        policies=[wire.Policy(model=model)],
        environment=ENVIRONMENT,
        group_size=group_size,
        limits=wire.TrajectoryLimits(
            max_generated_tokens=GENERATED_TOKENS,
            max_sequence_tokens=CONTEXT_TOKENS,
            max_turns=MAX_TURNS,
            max_run_time=wire.duration(300.0),
        ),
        sampling=wire.SamplingParams(temperature=1.0, top_p=1.0),
        tasks=wire.TaskSource(file=blobs.put(key, data), epochs=1),
        seed=job.seed,
    )
