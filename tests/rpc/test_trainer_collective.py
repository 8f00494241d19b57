"""Replicas as real processes over torchft and gloo: equal results, joining, leaving, crashing."""

import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from services.common.blobs import BlobStore
from services.trainer import batches, step
from services.trainer.collective import SoloCollective, StepLost, Times, TorchftCollective
from services.trainer.engine.fake import FakeEngine
from services.trainer.engine.torch import TorchEngine
from services.trainer.metrics import Phases
from services.trainer.version import Version
from tests.support.tiny_model import write_tiny_model
from tests.support.trainer_lighthouse import Lighthouse
from tests.support.trainer_member import GRPO
from tests.support.trainer_steps import UNEQUAL, make_step

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ROOT = Path(__file__).parents[2]


class Fleet:
    """Lighthouse and members of one test."""

    def __init__(self, folder, model, min_replicas):
        self.folder, self.model = folder, model
        self.processes = []
        self.lights = Lighthouse(folder, min_replicas=min_replicas)
        self.lighthouse = self.lights.start()

    def _start(self, argv):
        log = (self.folder / f"{len(self.processes)}.log").open("wb")
        process = subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.PIPE, stderr=log)
        self.processes.append(process)
        return process

    def member(self, name, generation, until, **more):
        asked = {
            "lighthouse": self.lighthouse, "worker": name, "generation": generation, "until": until,
            "model": str(self.model), "blobs": str(self.folder / f"blobs-{name}"),
            "out": str(self.folder / name), **more,
        }  # fmt: skip
        return self._start([sys.executable, "-m", "tests.support.trainer_member", json.dumps(asked)])

    def state(self, name):
        return safetensors.numpy.load((self.folder / name).read_bytes())

    def stop(self):
        for process in self.processes:
            process.kill()
            process.wait()
            process.stdout.close()
        self.lights.stop()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, layers=2, heads=2, kv_heads=1)


@pytest.fixture
def fleet(tmp_path, model):
    made = []

    def make(min_replicas=1):
        made.append(Fleet(tmp_path, model, min_replicas))
        return made[-1]

    yield make
    for one in made:
        one.stop()


def alone(folder, model, steps, engine=None):
    """The same steps by one replica in this process."""
    store, engine = BlobStore(str(folder / "alone")), engine or TorchEngine("float64")
    engine.load(model, GRPO)
    for number in range(1, steps + 1):
        laid = batches.batch(*make_step(store, number, UNEQUAL[(number - 1) % len(UNEQUAL)]), GRPO)
        worker = step.Worker(engine, store, Phases(), lambda: None, lambda: None)
        reduced = step.reduce(worker, laid, laid.shard(0, 1), GRPO, SoloCollective())
        engine.apply(reduced.gradient, GRPO.rate_of(number))
    return engine.state()


def largest_difference(a, b):
    return max(float(np.abs(a[k] - b[k]).max()) for k in a if k == "w" or k.startswith("model."))


def lines(process):
    """Steps that a member took; read to its end."""
    out, _ = process.communicate(timeout=100)
    # the collective's native code logs to standard output as well
    return [json.loads(line) for line in out.decode().splitlines() if line.startswith("{")]


def next_step(process, number):
    """Returns once the member has taken the step."""
    for raw in process.stdout:
        line = raw.decode()
        if line.startswith("{") and json.loads(line).get("step") == number:
            return json.loads(line)
    raise AssertionError(f"the member ended before step {number}")


@pytest.mark.parametrize("count", [2, 3])
def test_five_steps_by_real_replicas_equal_those_of_one(fleet, model, tmp_path, count):
    group = fleet(min_replicas=count)
    members = [group.member(f"t{i}", 10 + i, 5) for i in range(count)]
    taken = [lines(m) for m in members]
    assert [m.returncode for m in members] == [0] * count
    for rank, steps in enumerate(taken):
        assert [s["step"] for s in steps] == [1, 2, 3, 4, 5]
        assert {s["count"] for s in steps} == {count}
        assert {s["rank"] for s in steps} == {rank}
        assert steps[0]["generations"] == [10 + i for i in range(count)]
    expected = alone(tmp_path, model, 5)
    states = [group.state(f"t{i}") for i in range(count)]
    assert largest_difference(expected, states[0]) < 1e-9
    for other in states[1:]:
        assert all(np.array_equal(states[0][k], other[k]) for k in other)


def test_a_replica_joins_and_leaves_without_stopping_the_core(fleet, model, tmp_path):
    group = fleet()
    joined = tmp_path / "joined"
    core = group.member("core", 1, 12, fake=True, hold={"4": str(joined)})
    next_step(core, 2)
    hybrid = group.member("hybrid", 2, 12, fake=True, steps=2, ready=str(joined))
    # the joiner's process is up long after the file; the core takes steps alone until it asks for the quorum
    visits = lines(hybrid)
    rest = lines(core)
    assert core.returncode == hybrid.returncode == 0
    assert visits[0]["healed"]
    assert {v["count"] for v in visits} == {2}
    together = [s["step"] for s in rest if s.get("count") == 2]
    assert together == [v["step"] for v in visits]
    assert [s["count"] for s in rest if "count" in s][-1] == 1
    # it left: the core waited for the heartbeat timeout (1 s) and went on
    after = next(s for s in rest if s.get("step") == together[-1] + 1)
    assert after["seconds"] < 4.0
    assert largest_difference(alone(tmp_path, model, 12, FakeEngine()), group.state("core")) < 1e-9


def test_a_replica_that_dies_in_a_step_costs_that_try_and_nothing_else(fleet, model, tmp_path):
    group = fleet(min_replicas=1)
    joined = tmp_path / "joined"
    core = group.member("core", 1, 6, fake=True, hold={"2": str(joined)})
    next_step(core, 1)
    victim = group.member("victim", 2, 6, fake=True, die_in=4, ready=str(joined), steps=9)
    lines(victim)
    rest = lines(core)
    assert victim.returncode == 9
    assert core.returncode == 0
    assert [s["step"] for s in rest if "step" in s][-1] == 6
    assert largest_difference(alone(tmp_path, model, 6, FakeEngine()), group.state("core")) < 1e-9


def test_who_waited_in_vain_is_not_paired_with_its_own_ghost(fleet):
    """A newcomer that gives up on a group at work and asks again must meet the group, not its former self."""
    address = fleet().lighthouse

    def seat(name, generation, quorum):
        return TorchftCollective(
            address, name, generation, state=dict, load_state=lambda arrays, counter: None,
            times=Times(collective=5.0, quorum=quorum),
        )  # fmt: skip

    old, new = seat("old", 1, 20.0), seat("new", 2, 0.7)
    version = Version(1, 1)
    try:
        assert old.quorum(version).generations == (1,)  # and is at work from now on
        for _ in range(2):
            with pytest.raises(StepLost, match="no quorum"):
                new.quorum(version)
        new._times = Times(collective=5.0, quorum=20.0)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(new.quorum, version)
            time.sleep(3.0)  # the lighthouse has time for a wrong idea
            old.finish(version, committed=True)
            assert sorted(old.quorum(version).generations) == [1, 2]
            assert sorted(waiting.result(timeout=20).generations) == [1, 2]
    finally:
        new.close()
        old.close()
