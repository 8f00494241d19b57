"""From manifests to sequences: forks, masks, broken blobs, statistics."""

from pathlib import Path

import numpy as np
import pytest

from services.common import wire
from services.common.blobs import BlobStore
from services.common.errors import LibraError
from services.trainer import batches
from services.trainer.algorithm import Grpo
from tests.support.trainer_steps import UNEQUAL, make_step, segment_of


@pytest.fixture
def store(tmp_path):
    return BlobStore(str(tmp_path / "blobs"))


def laid_out(store, lengths=(7, 3), change=None):
    manifest, members = make_step(store, 1, lengths)
    if change:
        change(manifest, members)
        manifest.members_sha256 = batches.members_sha256(members)
    return batches.batch(manifest, members, Grpo())


def test_segments_are_joined_in_order_and_only_generated_tokens_are_trained(store):
    step = laid_out(store)
    sequences = batches.read(store, step, step.shard(0, 1))
    assert [s.trained for s in sequences] == [7, 3]
    assert [s.tokens for s in sequences] == [12, 8]
    assert sequences[0].mask.tolist() == [False] * 3 + [True] * 3 + [False] * 2 + [True] * 4


@pytest.mark.parametrize("count", [1, 2, 3, 11])
def test_shards_hold_every_sequence_exactly_once(store, count):
    step = laid_out(store, UNEQUAL[0])
    places = [p for rank in range(count) for p in step.shard(rank, count)]
    assert sorted(p.member for p in places) == list(range(8))


def test_members_that_differ_from_the_header_are_refused(store):
    manifest, members = make_step(store, 1, [4, 4])
    members[0].reward.value += 1
    with pytest.raises(LibraError, match="something else than it froze"):
        batches.batch(manifest, members, Grpo())


def test_a_fork_shares_its_parents_tokens_and_trains_only_its_own(store):
    rng = np.random.default_rng(1)

    def fork(manifest, members):
        part = segment_of(store, "fork", rng, 5, 4, 2, 0)
        members[0].sequences.append(wire.Sequence(index=1, parent=0, fork_position=5, segments=[part]))

    step = laid_out(store, change=fork)
    root, child, _ = sorted(batches.read(store, step, step.shard(0, 1)), key=lambda s: (s.trajectory, s.index))
    assert child.ids[:5].tolist() == root.ids[:5].tolist()
    assert (child.tokens, child.trained) == (9, 2)
    assert not child.mask[:5].any()


def test_masked_spans_leave_the_loss(store):
    def mask(manifest, members):
        members[0].masked.append(wire.MaskedSpan(sequence=0, first_position=3, tokens=3))

    step = laid_out(store, change=mask)
    first = min(batches.read(store, step, step.shard(0, 1)), key=lambda s: s.trajectory)
    assert first.trained == 4
    assert batches.statistics(step).staleness_max == 0


def test_a_broken_blob_names_its_trajectory(store):
    step = laid_out(store)
    path = Path(step.members[1].sequences[0].segments[0].blob.uri.removeprefix("file://"))
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(batches.BrokenMembers) as caught:
        batches.read(store, step, step.shard(0, 1))
    assert caught.value.names == [step.members[1].trajectory]


def test_a_segment_that_differs_from_the_manifest_is_broken(store):
    def lie(manifest, members):
        members[0].sequences[0].segments[1].trainable_tokens -= 1

    step = laid_out(store, change=lie)
    with pytest.raises(batches.BrokenMembers, match="the manifest says"):
        batches.read(store, step, step.shard(0, 1))


def test_temperature_and_logprob_kind_say_what_logits_are_divided_by(store):
    def heat(manifest, members):
        members[0].sequences[0].segments[0].sampling.temperature = 0.5
        members[0].sequences[0].segments[1].sampling.temperature = 0.5
        members[0].sequences[0].segments[1].logprob_kind = wire.LOGPROB_KIND_RAW
        members[1].sequences[0].segments[0].sampling.temperature = 0.0

    step = laid_out(store, change=heat)
    first, second = sorted(batches.read(store, step, step.shard(0, 1)), key=lambda s: s.trajectory)
    assert first.temperature.tolist() == [0.5] * 6 + [1.0] * 6
    assert set(second.temperature.tolist()) == {1.0}


def test_case_61_finish_reason_and_truncation_reach_the_step(store):
    def cut(manifest, members):
        members[0].finish, members[0].truncated = wire.FINISH_REASON_LENGTH, True

    step = laid_out(store, change=cut)
    assert step.members[0].finish == wire.FINISH_REASON_LENGTH
    assert batches.statistics(step).truncated_share == 0.5


def test_micro_batches_respect_the_budget_with_padding(store):
    step = laid_out(store, UNEQUAL[0])
    sequences = batches.read(store, step, step.shard(0, 1))
    parts = batches.micro_batches(sequences, 64)
    assert sum(len(p) for p in parts) == len(sequences)
    for part in parts:
        assert len(part) == 1 or max(s.tokens for s in part) * len(part) <= 64
