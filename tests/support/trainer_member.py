"""A replica as a process, without a scheduler: joins quorums over torchft and trains steps that both sides can make.

`python -m tests.support.trainer_member JSON`; one JSON line on standard output for each step taken. "hold" maps a step
to a file that must exist before the step is begun; "until" is the last step; "steps" the most that this member takes.
"""

import json
import sys
import time
from pathlib import Path

import safetensors.numpy

from services.common.blobs import BlobStore
from services.trainer import batches, step
from services.trainer.algorithm import Grpo
from services.trainer.collective import StepLost, Times, TorchftCollective
from services.trainer.engine.fake import FakeEngine
from services.trainer.engine.torch import TorchEngine
from services.trainer.metrics import Phases
from services.trainer.version import Version
from tests.support.trainer_steps import UNEQUAL, make_step

GRPO = Grpo(
    learning_rate=1e-2, decay_steps=9, kl_coef=0.05, max_grad_norm=0.5, weight_decay=0.01, micro_batch_tokens=150
)


def wait_for(path):
    deadline = time.monotonic() + 60
    while not Path(path).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(path)
        time.sleep(0.005)


def say(line):
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def main() -> None:
    asked = json.loads(sys.argv[1])
    store = BlobStore(asked["blobs"])
    # the fake one spares a test the import of a model library
    engine = FakeEngine() if asked.get("fake") else TorchEngine("float64")
    engine.load(Path(asked["model"]), GRPO)
    version = Version(1, 0)

    def load_state(arrays, counter):
        nonlocal version
        engine.load_state(arrays)
        version = Version.of_counter(counter)

    collective = TorchftCollective(
        asked["lighthouse"], asked["worker"], asked["generation"], state=engine.state, load_state=load_state,
        secret=b"a secret of the trainers", times=Times(collective=20.0, quorum=20.0),
    )  # fmt: skip
    if asked.get("ready"):
        Path(asked["ready"]).touch()
    taken = 0
    while version.number < asked["until"] and taken < asked.get("steps", 1 << 30):
        hold = asked.get("hold", {}).get(str(version.number + 1))
        if hold and taken:
            wait_for(hold)
        started = time.monotonic()
        try:
            quorum = collective.quorum(version)
            number = version.number + 1
            if not collective.agree([number]):
                raise AssertionError("members are at different versions after healing")
            manifest, members = make_step(store, number, UNEQUAL[(number - 1) % len(UNEQUAL)])
            laid = batches.batch(manifest, members, GRPO)
            worker = step.Worker(engine, store, Phases(), lambda: None, lambda: None)
            if asked.get("die_in") == number:
                sys.stdout.flush()
                raise SystemExit(9)
            reduced = step.reduce(worker, laid, laid.shard(quorum.rank, quorum.count), GRPO, collective)
        except StepLost as error:
            say({"lost": str(error)[:200], "seconds": time.monotonic() - started})
            collective.finish(version, committed=False)
            continue
        assert reduced.trainable_tokens == manifest.divisors.trainable_tokens
        version = version.next()
        engine.apply(reduced.gradient, GRPO.rate_of(version.number))
        collective.finish(version, committed=True)
        taken += 1
        line = {"step": number, "rank": quorum.rank, "count": quorum.count, "healed": quorum.healed}
        line |= {"generations": quorum.generations, "seconds": time.monotonic() - started}
        say(line)
    Path(asked["out"]).write_bytes(safetensors.numpy.save(engine.state()))
    collective.close()


if __name__ == "__main__":
    main()
