"""Steps for trainers: manifests with members whose segments are real blobs, of whatever lengths a test wants."""

from collections.abc import Sequence

import numpy as np

from services.common import segment, wire
from services.common.blobs import BlobStore
from services.trainer import batches

RUN = "runs/r"
VOCABULARY = 60


def segment_of(store: BlobStore, key: str, rng, first: int, length: int, trainable: int, number: int) -> wire.Segment:
    """A segment of `length` tokens, the last `trainable` of which a model generated at version (1, number)."""
    mask = np.zeros(length, np.uint8)
    mask[length - trainable :] = 1
    versions = np.full((length, 2), -1, np.int64)
    versions[mask.astype(bool)] = (1, number)
    data = segment.encode(
        {
            "ids": rng.integers(3, VOCABULARY, length),
            "loss_mask": mask,
            "logprob": (np.where(mask, rng.normal(-4.0, 0.4, length), 0.0)),
            "weight_version": versions,
        }
    )
    spans = []
    if trainable:
        version = wire.VersionRef(lineage=1, number=number)
        start = first + length - trainable
        spans = [wire.VersionSpan(version=version, first_position=start, tokens=trainable, trainable_tokens=trainable)]
    return wire.Segment(
        blob=store.put(f"r/{key}.safetensors", data),
        first_position=first,
        tokens=length,
        trainable_tokens=trainable,
        versions=spans,
        logprob_kind=wire.LOGPROB_KIND_SAMPLED,
        sampling=wire.SamplingParams(temperature=1.0),
        engine_build="test-1",
        dtype="float32",
    )


def make_step(
    store: BlobStore, number: int, lengths: Sequence[int], *, group_size: int = 2, seed: int = 0, policy: str = ""
) -> tuple[wire.Manifest, list[wire.ManifestMember]]:
    """Step `number` (base version number - 1) with one member for each length: generated tokens, in two segments."""
    rng = np.random.default_rng((seed, number))
    members = []
    for index, length in enumerate(lengths):
        name = f"{number}-{index}-{seed}"
        first_part = max(1, length // 2)
        parts = [segment_of(store, f"{name}-a", rng, 0, 3 + first_part, first_part, max(0, number - 2))]
        if length > first_part:
            rest = length - first_part
            parts.append(segment_of(store, f"{name}-b", rng, 3 + first_part, 2 + rest, rest, number - 1))
        members.append(
            wire.ManifestMember(
                trajectory=f"{RUN}/trajectories/{name}",
                attempt=1,
                sample=index % group_size,
                group=f"{RUN}/groups/{number}-{index // group_size}",
                reward=wire.Reward(value=float(rng.integers(0, 2)) if index % group_size else 1.0),
                finish=wire.FINISH_REASON_STOP,
                tokens=wire.TokenCounts(prompt=3, generated=length, trainable=length),
                sequences=[wire.Sequence(index=0, segments=parts)],
            )
        )
    trainable = sum(s.trainable_tokens for m in members for q in m.sequences for s in q.segments)
    manifest = wire.Manifest(
        name=f"{RUN}/manifests/{number}",
        policy=policy,
        step=number,
        base_version=wire.VersionRef(policy=policy, lineage=1, number=number - 1),
        state=wire.MANIFEST_STATE_TAKEN,
        groups=len(lengths) // group_size,
        divisors=wire.Divisors(
            trainable_tokens=trainable, sequences=len(members), trajectories=len(members),
            groups=len(lengths) // group_size,
        ),
        members_sha256=batches.members_sha256(members),
        max_versions=2,
    )  # fmt: skip
    return manifest, members


UNEQUAL = [
    [120, 1, 3, 1, 40, 2, 1, 7],
    [1, 1, 1, 90, 2, 2, 60, 1],
    [5, 100, 1, 1, 1, 1, 33, 2],
    [80, 80, 1, 1, 1, 1, 1, 1],
    [2, 110, 3, 1, 50, 20, 10, 5],
]
"""Generated tokens of the members of five steps: one sequence outweighs the rest."""
