"""Prints tokens per second of the reference engine: bare, and in its thread with episodes' streams beside it.

    OMP_NUM_THREADS=1 python -m tests.bench.rollout_engine [--sequences 64 128] [--requests 400] [--profile]

A random Qwen3 of the demo's size; generated lengths are drawn, so that newcomers are prefilled all the time. Rates are
per second of wall clock and of CPU time; the latter holds on a busy machine too. Not a test: it asserts only that what
was asked for was generated.
"""

import argparse
import asyncio
import cProfile
import pstats
import sys
import tempfile
import time

import numpy as np

from services.rollout.engine.base import DrawKey, EngineLimits, GenerationRequest, Sampling, Version, Weights
from services.rollout.engine.thread import Engine
from services.rollout.engine.transformers import TransformersCore
from tests.support.tiny_model import write_tiny_model

VERSION = Version(1, 0)


def requests(count: int, seed: int = 0) -> list[GenerationRequest]:
    """Requests with prompts of 8 to 24 and outputs of 20 to 220 tokens."""
    rng = np.random.default_rng(seed)
    made = []
    for n in range(count):
        length = int(rng.integers(8, 24))
        prompt = rng.integers(9, 60, length).astype(np.int32)
        tokens = int(rng.integers(20, 220))
        made.append(GenerationRequest(f"r{n}", prompt, tokens, Sampling(), {}, DrawKey(1, n, 0, 0, length)))
    return made


def core(model: str, sequences: int) -> TransformersCore:
    """A loaded core."""
    made = TransformersCore(EngineLimits(max_sequences=sequences, max_context=512, max_waiting=100_000))
    made.prepare(VERSION, Weights(model))
    made.switch(VERSION)
    return made


def bare(model: str, sequences: int, work: list[GenerationRequest]) -> tuple[float, float]:
    """Tokens per second of the core alone."""
    engine = core(model, sequences)
    for request in work:
        engine.submit(request)
    started, cpu = time.perf_counter(), time.process_time()
    while engine.has_work():
        engine.step()
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    tokens = engine.stats().generated_tokens
    assert tokens == sum(r.max_tokens for r in work)
    return tokens / seconds, tokens / cpu


async def threaded(model: str, sequences: int, work: list[GenerationRequest]) -> tuple[float, float]:
    """Tokens per second through the thread and the streams."""
    engine = Engine(core(model, sequences))
    engine.start()

    async def read(request: GenerationRequest) -> int:
        return sum([len(chunk) async for chunk in engine.submit(request)])

    started, cpu = time.perf_counter(), time.process_time()
    tokens = sum(await asyncio.gather(*(read(r) for r in work)))
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    assert tokens == sum(r.max_tokens for r in work)
    await engine.stop()
    return tokens / seconds, tokens / cpu


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--sequences", type=int, nargs="+", default=[64, 128])
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    sys.setswitchinterval(0.0005)
    with tempfile.TemporaryDirectory() as folder:
        model = str(write_tiny_model(folder, hidden=128, layers=3, heads=4, kv_heads=2, context=512, spread=0.3))
        work = requests(options.requests)
        for sequences in options.sequences:
            for name, run in (("bare core", bare), ("in its thread", lambda *a: asyncio.run(threaded(*a)))):
                wall, cpu = run(model, sequences, work)
                print(f"{sequences:4d} sequences, {name:14s} {wall:7.0f} tokens/s, {cpu:7.0f} per CPU second")
        if options.profile:
            profile = cProfile.Profile()
            profile.runcall(bare, model, options.sequences[-1], work)
            pstats.Stats(profile).sort_stats("tottime").print_stats(30)


if __name__ == "__main__":
    main()
