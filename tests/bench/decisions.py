"""Prints events per second of the decision core: estimator and multi-level queue, in one process on one core.

    python -m tests.bench.decisions [--live 20000] [--events 20000] [--repeats 5] [--profile]

An event is a report coming in: estimator and queue are updated, the decision comes out and is carried out. The mix is
that of 64 engines in three levels under 20,000 live trajectories of a few turns each: turns with a tool's return, ends
(eight of them bring the next group), and each engine's load report after every 960 others. Three fleets: `full` has
places for about half of them, so that the queue is long and aged and stops work past its quantum; `tight` has the same
and a KV cache that runs full first, so that every turn asks for an estimate; `even` has a place for each on engines of
one kind, so that nothing waits and every turn asks whether a move would pay.

The reference decides from scratch: all estimates, the view, `cmlfq.decide`. What the driver itself does is not timed.
"""

import argparse
import cProfile
import heapq
import pstats
import random
import statistics
import time
from collections import Counter
from dataclasses import replace

from services.scheduler.core import cmlfq
from services.scheduler.core.cmlfq import Assign, EngineView, Preempt, QueueSettings
from services.simulator.decisions import DecisionCore, Followed

SETTINGS = QueueSettings(quantum_tokens=(1_024, 8_192), max_wait_s=20.0)
GROUP = 8
TOOLS = ("search", "python", "shell")
OUTCOMES = ("OK",) * 17 + ("TOOL_ERROR",) * 2 + ("TIMEOUT",)
SIZES = ("short", "long")
LOAD_EVERY = 1_024
FLEETS = {"full": ((192, 128, 64), 2_500_000), "tight": ((192, 128, 64), 250_000), "even": ((352,), 2_500_000)}
"""Slots of an engine by level, and the tokens that its KV cache holds: a quarter of the engines are of higher levels,
where there are any."""


class World:
    """Draws what happens next, and knows what each trajectory needs."""

    def __init__(self, live: int, fleet: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.core = DecisionCore(SETTINGS)
        self.clock = time.perf_counter
        self.times: list[float] = []
        """That turns took."""
        self.now = 0.0
        self.due: list[tuple[float, int, str]] = []
        """When each leased trajectory reports next."""
        self.turns: dict[str, int] = {}
        self.live = live
        self.serial = self.number = self.seen = 0
        self.used: Counter[str] = Counter()
        """KV tokens on each engine when loads were last reported."""
        self.kinds: Counter[str] = Counter()
        self.decided: Counter[str] = Counter()
        self.engines = [self.place(i, *FLEETS[fleet]) for i in range(64)]
        for engine in self.engines:
            self.core.engine(engine, 0.0)
        while len(self.core.followed) < live:
            self.carry(self.core.scheduled(self.group(), self.now))

    def place(self, index: int, slots: tuple[int, ...], kv: int) -> EngineView:
        level = 0 if index < 48 or len(slots) == 1 else 1 if index < 60 else 2
        rate = 0.03 / 2**level * self.rng.uniform(0.95, 1.05)
        return EngineView(f"e{index}", "run", level, slots[level], 0, kv, 0, rate, 20 / rate, True)

    def group(self) -> list[Followed]:
        self.number += 1
        prompt, hard = int(self.rng.lognormvariate(6, 0.5)), self.rng.lognormvariate(1.8, 0.6)
        made = [Followed(f"t{self.number}-{i}", "run", f"g{self.number}", self.number, 0, prompt) for i in range(GROUP)]
        for one in made:
            self.turns[one.name] = 1 + min(60, int(hard * self.rng.lognormvariate(0, 0.5)))
        return made

    def carry(self, actions: list[Assign | Preempt]) -> None:
        """The leased ones will report."""
        for action in actions:
            self.decided[action.reason.code] += 1
            if isinstance(action, Assign):
                self.report(action.trajectory)

    def report(self, name: str) -> None:
        self.serial += 1
        heapq.heappush(self.due, (self.now + self.rng.lognormvariate(1.5, 0.6), self.serial, name))

    def event(self) -> float:
        """One event; seconds that the core took."""
        self.seen += 1
        if self.seen % LOAD_EVERY == 0:
            self.used.clear()
            for one in self.core.followed.values():
                self.used[one.engine] += one.tokens
        if self.seen % LOAD_EVERY < len(self.engines):
            return self.load(self.engines[self.seen % LOAD_EVERY])
        while True:
            self.now, _, name = heapq.heappop(self.due)
            one = self.core.followed.get(name)
            if one is not None and one.engine:
                break
        tokens = int(self.rng.lognormvariate(5, 0.8)) + 1
        if one.turns + 1 >= self.turns[name]:
            return self.end(one, tokens)
        tool, size, outcome = self.rng.choice(TOOLS), self.rng.choice(SIZES), self.rng.choice(OUTCOMES)
        began = self.clock()
        actions = self.core.turned(name, tokens, 150, tool, size, outcome, self.now)
        took = self.clock() - began
        self.times.append(took)
        self.kinds["turn"] += 1
        self.carry(actions)
        if one.engine:
            self.report(name)
        return took

    def end(self, one: Followed, tokens: int) -> float:
        del self.turns[one.name]
        fresh = self.group() if len(self.core.followed) + GROUP <= self.live + 1 else []
        began = self.clock()
        actions = self.core.finished(one.name, tokens, self.now)
        if fresh:
            actions = actions + self.core.scheduled(fresh, self.now)
        took = self.clock() - began
        self.kinds["end"] += 1
        self.carry(actions)
        return took

    def load(self, engine: EngineView) -> float:
        rate = 0.03 / 2**engine.level * self.rng.uniform(0.95, 1.05)
        view = replace(
            engine, seconds_per_token=rate, prefill_tokens_per_second=20 / rate, reported_at=self.now,
            kv_used_tokens=self.used[engine.name],
        )  # fmt: skip
        began = self.clock()
        actions = self.core.engine(view, self.now)
        took = self.clock() - began
        self.kinds["load"] += 1
        self.carry(actions)
        return took

    def from_scratch(self) -> float:
        """Seconds of the reference for a decision on the present content."""
        began = self.clock()
        for name in self.core.followed:
            self.core._estimate(name)
        view = self.core.queue.view(self.now)
        cmlfq.decide(view, SETTINGS)
        return self.clock() - began


def measure(world: World, events: int, repeats: int) -> None:
    """Prints the medians over the repeats."""
    median = statistics.median
    for name, clock in (("wall clock", time.perf_counter), ("CPU time", time.thread_time)):
        world.clock = clock
        rates, turns, p50s, p99s = [], [], [], []
        for _ in range(repeats):
            world.times.clear()
            times = sorted(world.event() for _ in range(events))
            rates.append(events / sum(times))
            turns.append(len(world.times) / sum(world.times))
            p50s.append(1e6 * times[events // 2])
            p99s.append(1e6 * times[events * 99 // 100])
        print(
            f"  live, {name}: {median(rates):,.0f} events/s (lowest {min(rates):,.0f}, highest {max(rates):,.0f}); "
            f"turn reports alone {median(turns):,.0f}/s; a decision: p50 {median(p50s):.0f} us, "
            f"p99 {median(p99s):.0f} us"
        )
    world.clock = time.perf_counter
    slow = sorted(world.from_scratch() for _ in range(5))
    print(f"  reference: {1 / slow[2]:,.2f} events/s; a decision: median {1e6 * slow[2]:,.0f} us")
    queued = sum(not one.engine for one in world.core.followed.values())
    total = sum(world.kinds.values())
    mix = ", ".join(f"{kind} {count / total:.0%}" for kind, count in world.kinds.most_common())
    decided = ", ".join(f"{code} {count / total:.2%}" for code, count in world.decided.most_common())
    print(
        f"  {len(world.core.followed):,} live, {queued:,} of them waiting; events: {mix}; decided per event: {decided}"
    )


def main() -> None:
    """Runs the benchmark."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--live", type=int, default=20_000)
    parser.add_argument("--events", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--fleet", choices=FLEETS)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    for fleet in [options.fleet] if options.fleet else FLEETS:
        world = World(options.live, fleet, seed=1)
        for _ in range(5 * options.live):  # until ages, levels and estimates are mixed
            world.event()
        world.kinds.clear()
        world.decided.clear()
        print(f"{fleet}:")
        if options.profile:
            profile = cProfile.Profile()
            profile.runcall(lambda world=world: [world.event() for _ in range(options.events)])
            pstats.Stats(profile).sort_stats("tottime").print_stats(28)
        measure(world, options.events, options.repeats)


if __name__ == "__main__":
    main()
