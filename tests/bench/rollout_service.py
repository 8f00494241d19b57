"""Tokens per second of the rollout service at work, beside the bare engine core on the same sequences.

    OMP_NUM_THREADS=1 python -m tests.bench.rollout_service [--sequences 128] [--tasks 384] [--operations 12]

Service: scheduler, toolenv, node agent and one rollout worker as processes, episodes of about `operations` tool calls
with the demo's model, every turn registered durably. Bare: the same model decodes as many sequences of the same length
without episodes around them. Neither is held to a share of the processor. Not a test: it asserts only that all ended.
"""

import argparse
import asyncio
import json
import logging
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from services.client import LibraClient
from services.common import wire
from services.common.blobs import BlobStore
from services.ops import jobs, workload
from services.ops.cluster import Cluster
from services.ops.clusterfile import ClusterConfig
from services.rollout.engine.base import DrawKey, EngineLimits, GenerationRequest, Sampling, Version, Weights
from services.rollout.engine.transformers import TransformersCore


def cluster(folder: Path, sequences: int) -> ClusterConfig:
    """One rollout worker with the whole processor."""
    return ClusterConfig.model_validate(
        {
            "name": "bench",
            "run_dir": str(folder),
            "scheduler": {"listen": "127.0.0.1:0"},
            "nodes": [{"name": "n0", "accelerators": [{"index": 0, "pool": "CORE_ROLLOUT", "memory_mib": 4096}]}],
            "workers": [
                {"name": "rollout", "kind": "rollout", "node": "n0", "accelerators": [0], "concurrency_cap": sequences}
            ],
            "toolenvs": [{"environment": jobs.ENVIRONMENT, "listen": "127.0.0.1:0"}],
        }
    )


async def service(sequences: int, tasks: int, operations: int) -> tuple[float, float]:
    """Tokens per second over the middle of the run, and mean tokens of an episode."""
    with tempfile.TemporaryDirectory() as folder:
        started = Cluster(cluster(Path(folder) / "run", sequences))
        try:
            await started.start()
            await started.wait_workers(60.0)
            blobs = BlobStore(started.blobs)
            job = jobs.Job(0, 1, drift=False, model=jobs.model_folder())
            run = jobs.evaluation(job, job.model, blobs)
            data = "".join(json.dumps(t) + "\n" for t in work(tasks, operations)).encode()
            run.tasks.file.CopyFrom(blobs.put("tasks/bench.jsonl", data))
            async with LibraClient(started.scheduler) as client:
                await client.create_run("bench", run)
                return await measure(client, tasks)
        finally:
            await started.stop()


def work(tasks: int, operations: int) -> list[dict[str, object]]:
    """Tasks of one length, without latency of the tool."""
    rng = random.Random(0)
    made = []
    for _ in range(tasks):
        terms, totals = workload.expression(rng, operations)
        made.append({"question": "".join(terms) + "=?", "answer": str(totals[-1]), "max_ops": 1})
    return made


async def measure(client: LibraClient, tasks: int) -> tuple[float, float]:
    """Waits for the end; the rate is taken between a quarter and three quarters of all generated tokens."""
    samples: list[tuple[float, int]] = []
    while True:
        found = await client.get_run("runs/bench")
        items = await client.list_trajectories("runs/bench")
        samples.append((time.monotonic(), sum(t.tokens.generated for t in items)))
        if found.state == wire.RUN_STATE_FINISHED:
            break
        await asyncio.sleep(0.5)
    total = samples[-1][1]
    middle = [s for s in samples if 0.25 * total <= s[1] <= 0.75 * total]
    assert sum(t.count for t in found.counts.terminal) == tasks
    rate = (middle[-1][1] - middle[0][1]) / (middle[-1][0] - middle[0][0])
    return rate, total / tasks


def bare(sequences: int, tasks: int, prompt: int, tokens: int) -> float:
    """Tokens per second of the core alone."""
    core = TransformersCore(EngineLimits(max_sequences=sequences, max_context=512, max_waiting=tasks + 1))
    core.prepare(Version(1, 0), Weights(str(jobs.model_folder())))
    core.switch(Version(1, 0))
    rng = np.random.default_rng(0)
    for n in range(tasks):
        ids = rng.integers(9, 60, prompt).astype(np.int32)
        core.submit(GenerationRequest(f"r{n}", ids, tokens, Sampling(), {}, DrawKey(1, n, 0, 0, prompt)))
    started = time.perf_counter()
    while core.has_work():
        core.step()
    return core.stats().generated_tokens / (time.perf_counter() - started)


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--tasks", type=int, default=384)
    parser.add_argument("--operations", type=int, default=12)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    sys.setswitchinterval(0.0005)
    rate, tokens = asyncio.run(service(options.sequences, options.tasks, options.operations))
    alone = bare(options.sequences, options.tasks, 3 * options.operations + 4, max(1, round(tokens)))
    print(
        f"{options.sequences} sequences, tasks of {options.operations} calls, {tokens:.0f} generated tokens an episode"
    )
    print(f"service {rate:7.0f} tokens/s")
    print(f"bare    {alone:7.0f} tokens/s, service / bare {rate / alone:.2f}")


if __name__ == "__main__":
    main()
