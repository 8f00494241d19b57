"""Acceptance: five steps on 1, 2 and 3 replicas, whatever the shards, give the same parameters; so does a resume."""

import threading

import numpy as np
import pytest

from services.common.blobs import BlobStore
from services.trainer import batches, step
from services.trainer.algorithm import Grpo
from services.trainer.checkpoints import Checkpoints
from services.trainer.collective import SoloCollective
from services.trainer.engine.torch import TorchEngine
from services.trainer.metrics import Phases
from services.trainer.version import Version
from tests.support.tiny_model import write_tiny_model
from tests.support.trainer_steps import UNEQUAL, make_step

GRPO = Grpo(
    learning_rate=1e-2, decay_steps=9, kl_coef=0.05, max_grad_norm=0.5, weight_decay=0.01, micro_batch_tokens=150
)


class ThreadGroup:
    """Members in one process whose sums meet at a barrier; ranks add in rank order, as a real reduction would."""

    def __init__(self, count):
        self.count = count
        self.barrier = threading.Barrier(count, timeout=60)
        self.slots = [None] * count

    def member(self, rank):
        group = self

        class Member(SoloCollective):
            def sum(self, array):
                group.slots[rank] = array.copy()
                group.barrier.wait()
                total = sum(group.slots[1:], start=group.slots[0])
                group.barrier.wait()
                array[:] = total

        return Member()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("model"), hidden=32, layers=2, heads=2, kv_heads=1)


@pytest.fixture
def store(tmp_path):
    return BlobStore(str(tmp_path / "blobs"))


def worker(store, engine):
    return step.Worker(engine, store, Phases(), lambda: None, lambda: None)


def laid_out(store, number, grpo=GRPO):
    manifest, members = make_step(store, number, UNEQUAL[number - 1])
    return batches.batch(manifest, members, grpo)


def take_step(store, engine, laid, rank, count, member, grpo=GRPO):
    reduced = step.reduce(worker(store, engine), laid, laid.shard(rank, count), grpo, member)
    assert reduced.trainable_tokens == laid.manifest.divisors.trainable_tokens
    return reduced, engine.apply(reduced.gradient, grpo.rate_of(laid.manifest.step))


def train(store, model, count, steps=range(1, 6), engines=None, grpo=GRPO):
    group = ThreadGroup(count)
    if engines is None:
        engines = [TorchEngine("float64") for _ in range(count)]
        for engine in engines:
            engine.load(model, grpo)
    errors = []

    def member(rank):
        try:
            for number in steps:
                take_step(store, engines[rank], laid_out(store, number, grpo), rank, count, group.member(rank), grpo)
        except BaseException as error:  # noqa: BLE001 - raised again in the test's thread
            errors.append(error)
            group.barrier.abort()

    threads = [threading.Thread(target=member, args=(rank,)) for rank in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return engines


def largest_difference(a, b):
    return max(float(np.abs(a[name] - b[name]).max()) for name in a)


def test_parameters_are_equal_on_1_2_and_3_replicas_within_1e_9(store, model):
    alone = train(store, model, 1)[0].weights()
    fresh = TorchEngine("float64")
    fresh.load(model, GRPO)
    assert largest_difference(alone, fresh.weights()) > 1e-3  # something was learnt
    for count in (2, 3):
        engines = train(store, model, count)
        assert largest_difference(alone, engines[0].weights()) < 1e-9
        for other in engines[1:]:
            assert largest_difference(engines[0].weights(), other.weights()) == 0.0


def test_micro_batches_do_not_change_the_gradient(store, model):
    laid = laid_out(store, 1)
    gradients = []
    for budget in (1, 150, 100_000):
        engine = TorchEngine("float64")
        engine.load(model, GRPO)
        grpo = Grpo(**{**{f: getattr(GRPO, f) for f in GRPO.__slots__}, "micro_batch_tokens": budget})
        reduced = step.reduce(worker(store, engine), laid, laid.shard(0, 1), grpo, SoloCollective())
        gradients.append(reduced.gradient.copy())
    assert np.abs(gradients[0] - gradients[1]).max() < 1e-14
    assert np.abs(gradients[0] - gradients[2]).max() < 1e-14


def test_an_empty_shard_contributes_zeros(store, model):
    """Eight sequences on eleven replicas: three have nothing, and their sum still is the whole gradient."""
    laid = laid_out(store, 1)
    engine = TorchEngine("float64")
    engine.load(model, GRPO)
    whole = step.reduce(worker(store, engine), laid, laid.shard(0, 1), GRPO, SoloCollective()).gradient.copy()
    total = np.zeros_like(whole)
    empty = 0
    for rank in range(11):
        places = laid.shard(rank, 11)
        part = step.reduce(worker(store, engine), laid, places, GRPO, SoloCollective())
        if not places:
            empty += 1
            assert not part.gradient.any()
            assert part.trainable_tokens == 0
        total += part.gradient
    assert empty == 3
    assert np.abs(total - whole).max() < 1e-14


def test_gradients_are_clipped_after_the_reduction_by_the_global_norm(store, model):
    engine = TorchEngine("float64")
    grpo = Grpo(learning_rate=1e-3, max_grad_norm=1e-3)
    engine.load(model, grpo)
    laid = laid_out(store, 1, grpo)
    reduced = step.reduce(worker(store, engine), laid, laid.shard(0, 1), grpo, SoloCollective())
    norm = float(np.linalg.norm(reduced.gradient))
    assert norm > 1e-3
    assert engine.apply(reduced.gradient, 1e-3) == pytest.approx(norm)
    (first, *_) = engine.state().items()
    moments = [v for k, v in engine.state().items() if k.startswith("optimizer.exp_avg.")]
    clipped = np.sqrt(sum(float((m / 0.1).ravel() @ (m / 0.1).ravel()) for m in moments))
    assert clipped == pytest.approx(1e-3)
    assert first[0].startswith("model.")


def test_a_resume_from_a_checkpoint_equals_an_uninterrupted_run(store, model):
    straight = train(store, model, 1)[0]
    engine = train(store, model, 1, steps=range(1, 3))[0]
    checkpoints = Checkpoints(store, "r")
    checkpoints.save(Version(1, 2), engine.state(), {})
    resumed = TorchEngine("float64")
    resumed.load(model, GRPO)
    version, state = Checkpoints(store, "r").newest(Version(1, 5))
    assert version == Version(1, 2)
    resumed.load_state(state)
    train(store, model, 1, steps=range(3, 6), engines=[resumed])
    a, b = straight.state(), resumed.state()
    assert a.keys() == b.keys()
    for name in a:
        assert np.array_equal(a[name], b[name]), name


def test_a_broken_newest_checkpoint_is_passed_over(store, model, tmp_path):
    engine = TorchEngine("float64")
    engine.load(model, GRPO)
    checkpoints = Checkpoints(store, "r")
    checkpoints.save(Version(1, 2), engine.state(), {})
    checkpoints.save(Version(1, 4), engine.state(), {})
    (path,) = (tmp_path / "blobs" / "r" / "checkpoints" / "1-4").glob("state-*.safetensors")
    path.write_bytes(b"x" + path.read_bytes()[1:])
    assert checkpoints.newest(Version(1, 9))[0] == Version(1, 2)
    assert checkpoints.newest(Version(1, 1)) is None
    assert checkpoints.newest(Version(2, 9)) is None


def test_state_of_another_model_is_refused(model, tmp_path):
    engine = TorchEngine("float64")
    engine.load(model, GRPO)
    other = TorchEngine("float64")
    other.load(write_tiny_model(tmp_path / "other", hidden=16, layers=1, heads=2, kv_heads=1), GRPO)
    with pytest.raises(ValueError, match=r"shape|another model"):
        engine.load_state(other.state())


def test_freed_memory_holds_no_model(model):
    engine = TorchEngine("float64")
    engine.load(model, GRPO)
    engine.free()
    assert not engine.loaded
    with pytest.raises(Exception, match="no model is resident"):
        engine.zero()
