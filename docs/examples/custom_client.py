"""A custom client: creates a run, submits its groups itself, watches them, and preempts one trajectory.

    libra up &                                   # a cluster on this machine
    python docs/examples/custom_client.py --model path/to/model

The run is of kind EVAL: its trajectories are handed to us (DELIVERED) instead of to a trainer. What is preempted keeps
its tokens and its environment session, queues again and goes on, perhaps on another worker.
"""

import argparse
import asyncio
import uuid
from pathlib import Path

from services.client import LibraClient
from services.common import wire

SUMS = {"31+14-20+55-12+47": "115", "80-35+41+16-22+19": "99", "27+56-13+62-48+11": "95", "64-19+23+38-51+70": "125"}
TASKS = [{"id": sum_, "question": f"{sum_}=?", "answer": answer, "max_ops": 1} for sum_, answer in SUMS.items()]
GROUP_SIZE = 2
TERMINAL = ("DELIVERED", "VOID", "CANCELLED")


async def main(scheduler: str, model: str, environment: str, timeout_s: float) -> int:
    """Runs the example; returns the number of trajectories that were delivered."""
    async with LibraClient(scheduler) as libra:
        run = await libra.create_run(
            f"custom-{uuid.uuid4().hex[:8]}",
            wire.Run(
                kind=wire.RUN_KIND_EVAL,
                policies=[wire.Policy(model=model)],
                environment=environment,
                group_size=GROUP_SIZE,
                sampling=wire.SamplingParams(temperature=1.0),
                limits=wire.TrajectoryLimits(max_generated_tokens=200, max_turns=12),
                seed=7,
            ),
        )
        print(f"created {run.name}: {run.group_size} trajectories a group")

        submitted = await libra.submit_groups(run.name, TASKS)
        print(f"submitted {len(submitted.groups)} groups at revision {submitted.revision}")

        async with asyncio.timeout(timeout_s):
            delivered, preempted = await watch(libra, run.name, submitted.revision)

        for trajectory in await libra.list_trajectories(run.name):
            reward = f"reward {trajectory.reward.value:g}" if trajectory.HasField("reward") else trajectory.reason.text
            leases = sum(attempt.leases for attempt in trajectory.attempts)
            mark = ", was preempted" if trajectory.name == preempted else ""
            print(f"{trajectory.name}: {trajectory.tokens.generated} tokens in {leases} leases, {reward}{mark}")
        return delivered


async def watch(libra: LibraClient, run: str, revision: int) -> tuple[int, str]:
    """Follows the run's trajectories until all have ended; returns (delivered, name of the preempted one)."""
    delivered, ended, preempted = 0, 0, ""
    # from the revision of the submission on, so that nothing between the two calls is missed
    events = libra.watch_run(run, start_revision=revision + 1, kinds=[wire.RESOURCE_KIND_TRAJECTORY])
    async for event in events:
        if event.from_state == event.to_state:
            continue
        print(f"  {event.revision} {event.name}: {event.from_state or 'new'} -> {event.to_state} ({event.reason.text})")
        if event.to_state == "LEASED" and not preempted:
            preempted = event.name
            command = (await libra.preempt([preempted], note="custom client example"))[0]
            print(f"  asked to preempt {preempted}: {command or 'it was not running any more'}")
        if event.to_state in TERMINAL:
            ended += 1
            delivered += event.to_state == "DELIVERED"
            if ended == len(TASKS) * GROUP_SIZE:
                break
    return delivered, preempted


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheduler", default="127.0.0.1:7070", help="host:port")
    parser.add_argument("--model", required=True, help="folder in Hugging Face format")
    parser.add_argument("--environment", default="calculator", help="tool environment type")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for the whole")
    arguments = parser.parse_args()
    folder = str(Path(arguments.model).resolve())
    count = asyncio.run(main(arguments.scheduler, folder, arguments.environment, arguments.timeout))
    print(f"{count} of {len(TASKS) * GROUP_SIZE} trajectories were delivered")
