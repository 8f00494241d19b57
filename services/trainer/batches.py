"""From a manifest to what is trained: members checked, shards chosen, segments read and joined to sequences."""

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from services.common import packing, segment, wire
from services.common.blobs import BlobStore
from services.common.errors import LibraError
from services.trainer.advantage import advantages
from services.trainer.algorithm import Grpo
from services.trainer.engine.base import Array, TrainSequence


class BrokenMembers(Exception):
    """Trajectories whose segments are gone, differ from their hash, or do not say what the manifest says."""

    def __init__(self, names: Sequence[str], text: str) -> None:
        super().__init__(text)
        self.names = list(names)


@dataclass(frozen=True, slots=True)
class Place:
    """One sequence of a step, before its segments are read."""

    member: int
    sequence: int
    tokens: int
    """Length with its parent's part."""


@dataclass(frozen=True, slots=True)
class Statistics:
    """What a step's manifest says about itself; the same on every replica."""

    reward_mean: float
    reward_std: float
    length_mean: float
    """Generated tokens of a trajectory."""
    length_max: int
    truncated_share: float
    staleness_mean: float
    """Base version minus a token's version, over trained tokens."""
    staleness_max: int
    zero_groups_share: float
    """Groups whose rewards are all equal: they carry no gradient."""


@dataclass(frozen=True, slots=True)
class Batch:
    """A whole step: members in manifest order, their advantages, and the sequences that have something to train."""

    manifest: wire.Manifest
    members: tuple[wire.ManifestMember, ...]
    advantages: tuple[float, ...]
    places: tuple[Place, ...]

    def shard(self, rank: int, count: int) -> list[Place]:
        """The replica's part: a pure function of token counts, rank and count."""
        return [self.places[i] for i in packing.shard([p.tokens for p in self.places], rank, count)]


def batch(manifest: wire.Manifest, members: Sequence[wire.ManifestMember], grpo: Grpo) -> Batch:
    """Checks the members against the manifest's hash and lays out the step. LibraError INTERNAL if they differ."""
    found = members_sha256(members)
    if found != manifest.members_sha256:
        raise LibraError(
            "INTERNAL",
            f"{manifest.name}: its members hash to {found[:12]}, the header says {manifest.members_sha256[:12]}; "
            "the scheduler gave something else than it froze",
            resource=manifest.name,
        )
    places: list[Place] = []
    for index, member in enumerate(members):
        lengths = {s.index: s.fork_position + sum(g.tokens for g in s.segments) for s in member.sequences}
        places.extend(
            Place(index, s.index, lengths[s.index])
            for s in member.sequences
            if any(g.trainable_tokens for g in s.segments)
        )
    groups = [m.group for m in members]
    rewards = [m.reward.value for m in members]
    values = advantages(groups, rewards, divide_by_std=grpo.advantage_std)
    return Batch(manifest, tuple(members), tuple(values), tuple(places))


def members_sha256(members: Sequence[wire.ManifestMember]) -> str:
    """SHA-256 as ListManifestMembers defines it: one line for each segment, in order."""
    digest = hashlib.sha256()
    for member in members:
        bits = struct.pack(">d", member.reward.value).hex()
        for sequence in member.sequences:
            for part in sequence.segments:
                line = f"{member.trajectory} {member.attempt} {bits} {sequence.index} {part.first_position} "
                digest.update(f"{line}{part.blob.sha256}\n".encode())
    return digest.hexdigest()


def read(store: BlobStore, step: Batch, places: Sequence[Place]) -> list[TrainSequence]:
    """Reads and joins the segments of these sequences. BrokenMembers names all that cannot be used."""
    result: list[TrainSequence] = []
    broken: dict[str, str] = {}
    cache: dict[tuple[int, int], dict[str, Array]] = {}
    for place in places:
        member = step.members[place.member]
        if member.trajectory in broken:
            continue
        try:
            columns = _columns(store, member, place.member, place.sequence, cache)
            result.append(_train_sequence(step, member, place, columns))
        except LibraError as error:
            if error.reason != "BLOB_MISMATCH":
                raise
            broken[member.trajectory] = error.message
        except (KeyError, ValueError) as error:
            broken[member.trajectory] = f"{member.trajectory} sequence {place.sequence}: {error}"
    if broken:
        raise BrokenMembers(list(broken), "; ".join(list(broken.values())[:3]))
    return result


def _columns(
    store: BlobStore,
    member: wire.ManifestMember,
    number: int,
    index: int,
    cache: dict[tuple[int, int], dict[str, Array]],
) -> dict[str, Array]:
    """Columns of a whole sequence: its parent's first tokens, of which none is trained here, then its own."""
    known = cache.get((number, index))
    if known is not None:
        return known
    sequence = next(s for s in member.sequences if s.index == index)
    parts = [_own(store, sequence)]
    if sequence.HasField("parent"):
        if sequence.parent == index or not any(s.index == sequence.parent for s in member.sequences):
            raise ValueError(f"its parent {sequence.parent} is not among the member's sequences")
        parent = _columns(store, member, number, sequence.parent, cache)
        shared = {k: v[: sequence.fork_position] for k, v in parent.items()}
        if len(shared["ids"]) != sequence.fork_position:
            raise ValueError(f"it forks at {sequence.fork_position}, its parent has {len(parent['ids'])} tokens")
        shared["loss_mask"] = np.zeros_like(shared["loss_mask"])
        parts.insert(0, shared)
    joined = {k: np.concatenate([p[k] for p in parts]) for k in parts[0]}
    cache[(number, index)] = joined
    return joined


def _own(store: BlobStore, sequence: wire.Sequence) -> dict[str, Array]:
    columns: dict[str, list[Array]] = {"ids": [], "loss_mask": [], "logprob": [], "temperature": []}
    position = sequence.fork_position
    for part in sequence.segments:
        if part.first_position != position:
            raise ValueError(f"a segment begins at {part.first_position}, expected {position}")
        data = segment.decode(store.get(part.blob))
        ids, mask = data["ids"], data["loss_mask"]
        if len(ids) != part.tokens or int(mask.sum()) != part.trainable_tokens:
            raise ValueError(
                f"the segment at {position} has {len(ids)} tokens, {int(mask.sum())} trainable; "
                f"the manifest says {part.tokens} and {part.trainable_tokens}"
            )
        if part.trainable_tokens and "logprob" not in data:
            raise ValueError(f"the segment at {position} has trainable tokens and no logprob column")
        columns["ids"].append(ids)
        columns["loss_mask"].append(mask)
        columns["logprob"].append(data.get("logprob", np.zeros(len(ids), dtype=np.float32)))
        columns["temperature"].append(np.full(len(ids), _temperature(part), dtype=np.float32))
        position += part.tokens
    empty: list[Array] = [np.zeros(0, dtype=np.int32)]
    return {k: np.concatenate(v or empty) for k, v in columns.items()}


def _temperature(part: wire.Segment) -> float:
    """What the engine divided logits by before the logprob it reported; greedy and RAW ones are of the plain logits."""
    if part.logprob_kind == wire.LOGPROB_KIND_RAW or not part.sampling.HasField("temperature"):
        return 1.0
    return part.sampling.temperature if part.sampling.temperature > 0 else 1.0


def _train_sequence(step: Batch, member: wire.ManifestMember, place: Place, columns: dict[str, Array]) -> TrainSequence:
    mask: npt.NDArray[np.bool_] = columns["loss_mask"].astype(bool)
    for span in member.masked:
        if span.sequence == place.sequence:
            mask[span.first_position : span.first_position + span.tokens] = False
    if len(mask) and mask[0]:
        raise ValueError("its first token is marked trainable; nothing predicts it")
    sequence = next(s for s in member.sequences if s.index == place.sequence)
    behaviour = columns["logprob"].astype(np.float32)
    if not np.isfinite(behaviour[mask]).all():
        raise ValueError("a trainable token has a logprob that is not finite")
    return TrainSequence(
        trajectory=member.trajectory,
        index=place.sequence,
        ids=columns["ids"].astype(np.int64),
        mask=mask,
        behaviour=behaviour,
        temperature=columns["temperature"].astype(np.float32),
        advantage=step.advantages[place.member],
        engine=sequence.segments[-1].engine_build if sequence.segments else "",
    )


def micro_batches(sequences: Sequence[TrainSequence], budget: int) -> list[list[TrainSequence]]:
    """Sequences of like length together, longest first, each batch at most `budget` tokens with padding.

    Lengths within a batch differ by less than a factor of two, so that one long sequence does not pad many short ones.
    """
    classes: dict[int, list[TrainSequence]] = {}
    for sequence in sequences:
        classes.setdefault(sequence.tokens.bit_length(), []).append(sequence)
    return [
        [alike[i] for i in part]
        for _, alike in sorted(classes.items(), reverse=True)
        for part in packing.pack_padded([s.tokens for s in alike], budget)
    ]


def statistics(step: Batch) -> Statistics:
    """The manifest's own numbers; zeros for an empty one."""
    rewards = np.array([m.reward.value for m in step.members] or [0.0])
    lengths = np.array([m.tokens.generated for m in step.members] or [0])
    by_group: dict[str, set[float]] = {}
    for member in step.members:
        by_group.setdefault(member.group, set()).add(member.reward.value)
    ages, weights = [], []
    for member in step.members:
        masked = {(s.sequence, s.first_position) for s in member.masked}
        for sequence in member.sequences:
            for span in (v for part in sequence.segments for v in part.versions):
                if span.trainable_tokens and (sequence.index, span.first_position) not in masked:
                    ages.append(step.manifest.base_version.number - span.version.number)
                    weights.append(span.trainable_tokens)
    return Statistics(
        reward_mean=float(rewards.mean()),
        reward_std=float(rewards.std()),
        length_mean=float(lengths.mean()),
        length_max=int(lengths.max()),
        truncated_share=sum(m.truncated for m in step.members) / max(1, len(step.members)),
        staleness_mean=float(np.average(ages, weights=weights)) if ages else 0.0,
        staleness_max=max(ages, default=0),
        zero_groups_share=sum(len(v) == 1 for v in by_group.values()) / max(1, len(by_group)),
    )
