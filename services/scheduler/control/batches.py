"""Training steps: freezing a manifest, deciding that a step counts, giving it back, publishing its weights."""

import asyncio
import hashlib
import struct
from collections.abc import Sequence as Many

from services.common import errors, wire
from services.scheduler.control import trajectories
from services.scheduler.control.ledger import Change, Ledger
from services.scheduler.core import admission
from services.scheduler.core.lifecycle import GROUP, MANIFEST, TRAJECTORY, VERSION
from services.scheduler.core.model import Fleet, Manifest, MaskedSpan, Replica, Run, WeightVersion

POLL_SECONDS = 0.5
"""Longest wait between looks at the clock; changes wake a waiting TakeBatch at once."""
LOOK_AHEAD_GROUPS = 16
"""Groups beyond the batch among which closed ones may be taken before an older open one."""

TRAINER_STATES = ("STARTING", "ACTIVE", "SUSPECT", "CORDONED")
"""States of a trainer replica in which it belongs to the roster."""


def roster(fleet: Fleet, run: Run | None) -> list[Replica]:
    """Trainer replicas that may take part in steps of the run, oldest generation first."""
    members = [
        r
        for r in fleet.replicas.values()
        if r.role == "TRAINER" and r.state in TRAINER_STATES and (not r.runs or run is None or run.name in r.runs)
    ]
    return sorted(members, key=lambda r: r.generation)


def roster_of(fleet: Fleet, run: Run, manifest: Manifest) -> list[Replica]:
    """Who may take part in this manifest's step: the replicas that were there when it was taken.

    A later one would wait for a group that has formed without it and is at work; it joins at the next step. Only if all
    of the others are gone do the newcomers do the step.
    """
    members = roster(fleet, run)
    return [r for r in members if r.create_time <= manifest.create_time] or members


def live_manifest(fleet: Fleet, run: Run, policy: str, step: int) -> Manifest | None:
    """The manifest of this step that was not returned or abandoned, if it is in memory."""
    for manifest in fleet.manifests.values():
        if (
            (manifest.run, manifest.policy, manifest.step) == (run.name, policy, step)
            and manifest.lineage == run.lineage
            and manifest.state in ("TAKEN", "COMMITTED", "COVERED")
        ):
            return manifest
    return None


async def take(
    ledger: Ledger, *, caused_by: str, run: Run, policy: str, step: int, size: wire.BatchSize, wait: float
) -> Manifest:
    """One manifest for each (run, policy, step): the live one, or a new one as soon as there is enough for it.

    Waits up to `wait` seconds for `groups`, then takes `min_groups`; NO_PROGRESS with the cause if not even those.
    """
    groups, least, multiple = (
        size.groups or run.batch_groups,
        size.min_groups or size.groups or run.batch_groups,
        size.multiple_of or 1,
    )
    started = ledger.clock.monotonic()
    while True:
        if run.state in ("FINISHED", "CANCELLED"):
            raise errors.LibraError(
                "RUN_NOT_ACTIVE", f"{run.name} is {run.state}: {run.reason_text}", resource=run.name
            )
        if step > run.head + 1:
            raise errors.illegal_transition(
                f"{run.name}: step {step} was asked for; the next one is {run.head + 1}", expected=str(run.head + 1)
            )
        manifest = live_manifest(ledger.fleet, run, policy, step)
        if manifest is not None:
            asked = (groups, least, multiple)
            frozen = (manifest.wanted_groups, manifest.wanted_min, manifest.wanted_multiple)
            if manifest.state == "TAKEN" and asked != frozen:
                raise errors.inconsistent(f"{manifest.name} was taken with {frozen}, asked again with {asked}")
            await ledger.barrier()
            return manifest
        if step <= run.head:
            raise errors.LibraError(
                "STEP_TAKEN", f"step {step} of {run.name} is over; the head is {run.head}", version=str(run.head)
            )
        waited = ledger.clock.monotonic() - started
        change = ledger.change(caused_by)
        rules = admission.BatchRules(
            groups=groups, min_groups=least, multiple_of=multiple, max_versions=run.max_versions,
            on_exceed=run.on_exceed, look_ahead=LOOK_AHEAD_GROUPS, hold_timeout=run.hold_timeout,
        )  # fmt: skip
        choice = admission.choose_batch(
            group_views(ledger.fleet, run), run.head, rules, waited, wait, nothing_more_comes(ledger, run),
            held=ledger.clock.monotonic() - ledger.held_since.get(run.name, ledger.clock.monotonic()),
        )  # fmt: skip
        if choice.hold:
            ledger.held_since.setdefault(run.name, ledger.clock.monotonic())
        with ledger.guard(change):
            for name in choice.stale:
                group = ledger.fleet.groups[name]
                trajectories.drop_group(change, group, "go_stale", "STALE", choice.reason.text)
            if choice.take:
                ledger.held_since.pop(run.name, None)
                manifest = _freeze(change, run, policy, step, choice, (groups, least, multiple))
            elif nothing_more_comes(ledger, run):
                _drop_remainder(change, run, least)
        if manifest is not None:
            await ledger.commit(change)
            return manifest
        if not change.empty:
            await ledger.commit(change)
            continue
        if waited >= wait:
            raise errors.LibraError(
                "NO_PROGRESS", f"{run.name} step {step}: {why_no_batch(ledger, run)} ({choice.reason.text})",
                resource=run.name, cause=why_no_batch(ledger, run),
            )  # fmt: skip
        await ledger.wait_change(min(POLL_SECONDS, wait - waited))
        await asyncio.sleep(0)


def group_views(fleet: Fleet, run: Run) -> list[admission.GroupView]:
    """Open and closed groups as admission sees them."""
    views = []
    for group in fleet.groups.values():
        if group.run != run.name or group.state not in ("OPEN", "CLOSED"):
            continue
        members = [fleet.trajectories[m] for m in group.members]
        counted = [m for m in members if m.state in ("READY", "SCORED", "LEASED", "QUEUED")]
        oldest = [m.oldest_version for m in counted if m.oldest_version >= 0]
        spans = []
        if run.on_exceed == "MASK_TOKENS" and group.state == "CLOSED":
            for member in counted:
                for segment in fleet.segments.get((member.name, member.attempt), ()):
                    spans += [
                        admission.TokenSpan(member.name, segment.sequence, s.first_position, s.tokens, s.number)
                        for s in segment.spans
                        if s.lineage == run.lineage and s.trainable_tokens
                    ]
        views.append(
            admission.GroupView(
                name=group.name,
                admission_number=group.admission_number,
                closed=group.state == "CLOSED",
                oldest_version=min(oldest) if oldest else None,
                spans=tuple(spans),
            )
        )
    return views


def nothing_more_comes(ledger: Ledger, run: Run) -> bool:
    """True if no group of the run is open and none will be admitted."""
    open_groups = any(g.run == run.name and g.state == "OPEN" for g in ledger.fleet.groups.values())
    return run.exhausted and not open_groups


def why_no_batch(ledger: Ledger, run: Run) -> str:
    """The first thing that keeps a batch from filling, in words."""
    fleet = ledger.fleet
    if run.state == "PAUSED":
        return f"the run is paused: {run.reason_text}"
    engines = [r for r in fleet.live_replicas() if r.role == "ROLLOUT"]
    serving = [r for r in engines if r.state == "ACTIVE" and fleet.sessions[r.owner_session].state == "ALIVE"]
    groups = [g for g in fleet.groups.values() if g.run == run.name]
    closed = sum(g.state == "CLOSED" for g in groups)
    have = f"{closed} groups are ready"
    if not serving:
        return f"no rollout engine serves ({len(engines)} exist); {have}"
    if not groups and run.exhausted:
        return "the tasks are exhausted"
    leased = sum(t.run == run.name and t.state == "LEASED" for t in fleet.trajectories.values())
    queued = sum(t.run == run.name and t.state == "QUEUED" for t in fleet.trajectories.values())
    return f"{have}, {leased} trajectories run on {len(serving)} engines, {queued} are queued"


def _drop_remainder(change: Change, run: Run, least: int) -> None:
    rest = [g for g in change.fleet.groups.values() if g.run == run.name and g.state == "CLOSED"]
    for group in rest:
        text = f"{len(rest)} groups are left at the end of the tasks; a step takes at least {least}"
        trajectories.drop_group(change, group, "filter", "REMAINDER", text)


def _freeze(
    change: Change, run: Run, policy: str, step: int, choice: admission.BatchChoice, asked: tuple[int, int, int]
) -> Manifest:
    fleet = change.fleet
    manifest = Manifest(
        name=f"{run.name}/manifests/{step}-{change.ledger.fleet.revision + 1}",
        run=run.name, policy=policy, step=step, lineage=run.lineage, base=run.head,
        max_versions=run.max_versions, wanted_groups=asked[0], wanted_min=asked[1], wanted_multiple=asked[2],
        groups=list(choice.take), create_time=change.now,
        masked=[MaskedSpan(s.trajectory, s.sequence, s.first_position, s.tokens) for s in choice.masked],
    )  # fmt: skip
    masked = {(m.trajectory, m.sequence, m.first_position) for m in manifest.masked}
    digest = hashlib.sha256()
    for name in choice.take:
        group = fleet.groups[name]
        for member in group.members:
            trajectory = fleet.trajectories[member]
            if trajectory.state != "READY":
                continue
            manifest.members.append(member)
            manifest.attempts.append(trajectory.attempt)
            bits = struct.pack(">d", trajectory.reward or 0.0).hex()
            trained: dict[int, int] = {}
            segments = fleet.segments.get((member, trajectory.attempt), [])
            for segment in sorted(segments, key=lambda s: (s.sequence, s.first_position)):
                digest.update(
                    f"{member} {trajectory.attempt} {bits} {segment.sequence} {segment.first_position} "
                    f"{segment.sha256}\n".encode()
                )
                count = segment.trainable_tokens - sum(
                    s.trainable_tokens for s in segment.spans if (member, segment.sequence, s.first_position) in masked
                )
                trained[segment.sequence] = trained.get(segment.sequence, 0) + count
            manifest.trainable_tokens += sum(trained.values())
            manifest.sequences += sum(v > 0 for v in trained.values())
            trajectory.manifest = manifest.name
            change.move(TRAJECTORY, trajectory, "take", "BATCHED", manifest.name)
        group.manifest = manifest.name
        change.move(GROUP, group, "take", "BATCHED", manifest.name)
    manifest.members_sha256 = digest.hexdigest()
    fleet.manifests[manifest.name] = manifest
    change.put(manifest)
    change.record(
        "MANIFEST", manifest.name, "", "TAKEN", choice.reason.code, choice.reason.text,
        {"step": step, "groups": len(manifest.groups), "trainable_tokens": manifest.trainable_tokens},
    )  # fmt: skip
    return manifest


def commit(
    change: Change,
    manifest: Manifest,
    *,
    lineage: int,
    base: int,
    trainable_tokens: int,
    members: Many[tuple[str, str, int]],
) -> WeightVersion:
    """Makes a step count: consumes its trajectories and raises the version, in one transaction.

    `members` are (worker, replica, generation). The same commit again returns the same version; anything that differs
    from the manifest is COMMIT_REFUSED and changes nothing.
    """
    fleet = change.fleet
    run = fleet.runs[manifest.run]
    name = version_name(run, manifest.policy, manifest.lineage, manifest.base + 1)

    def refuse(what: str, expected: object, actual: object) -> errors.LibraError:
        return errors.LibraError(
            "COMMIT_REFUSED", f"{manifest.name}: {what} is {actual}, expected {expected}",
            resource=manifest.name, expected=str(expected), actual=str(actual),
        )  # fmt: skip

    if (lineage, base) != (manifest.lineage, manifest.base):
        raise refuse("base version", f"{manifest.lineage}-{manifest.base}", f"{lineage}-{base}")
    if trainable_tokens != manifest.trainable_tokens:
        raise refuse("sum of trained tokens", manifest.trainable_tokens, trainable_tokens)
    if manifest.state in ("COMMITTED", "COVERED"):
        return fleet.versions[name]
    if manifest.state != "TAKEN":
        raise refuse("state", "TAKEN", manifest.state)
    if manifest.lineage != run.lineage or manifest.base != run.head:
        raise refuse("head of the run", f"{manifest.lineage}-{manifest.base}", f"{run.lineage}-{run.head}")
    if not members:
        raise refuse("number of members", "at least 1", 0)
    if len(set(members)) != len(members):
        raise refuse("number of different members", len(members), len(set(members)))
    for worker, replica_name, generation in members:
        replica = fleet.replicas.get(replica_name)
        if replica is None or replica.generation != generation or replica.role != "TRAINER":
            raise refuse("member", f"a trainer replica of the roster, not {replica_name}", f"{worker}@{generation}")
        owner = fleet.sessions.get(replica.owner_session)
        if owner is not None and owner.worker != worker:
            raise refuse(f"worker of {replica_name}", owner.worker, worker)
        if replica.state in ("UNCONFIRMED", "QUARANTINED", "RELEASED", "RETIRED"):
            raise refuse(f"member {worker}@{generation}", "in the roster", replica.state)
    consumed = [fleet.trajectories[m] for m in manifest.members]
    too_old = admission.check_commit([(t.name, t.oldest_version) for t in consumed], base, run.max_versions)
    if too_old and run.on_exceed != "MASK_TOKENS":
        raise refuse("age of members", f"at most {run.max_versions} versions", f"older: {', '.join(too_old[:3])}")
    run.head += 1
    run.etag += 1
    for row in fleet.lineages.values():
        if row.run == run.name and row.number == run.lineage:
            row.head = run.head
            change.put(row)
    version = WeightVersion(
        name=name, run=run.name, policy=manifest.policy, lineage=run.lineage, number=run.head,
        manifest=manifest.name, commit_time=change.now,
    )  # fmt: skip
    fleet.versions[name] = version
    for trajectory in consumed:
        trajectory.trained_lineage, trajectory.trained_number = run.lineage, run.head
        change.unit.consume(run.name, manifest.policy, run.lineage, trajectory.name, run.head, manifest.name)
        change.move(TRAJECTORY, trajectory, "commit", "TRAINED", f"version {run.lineage}-{run.head}")
    for group_name in manifest.groups:
        group = fleet.groups[group_name]
        change.move(GROUP, group, "finish", "TRAINED", f"version {run.lineage}-{run.head}")
        trajectories.forget_group(change, group)
    manifest.end_time = change.now
    change.put(run, version)
    workers = ", ".join(f"{w}@{g}" for w, _, g in members)
    change.move(
        MANIFEST, manifest, "commit", "COMMITTED", f"step {manifest.step} by {workers}",
        {"trainable_tokens": trainable_tokens, "members": len(members), "version": run.head},
    )  # fmt: skip
    change.record("WEIGHT_VERSION", name, "", "COMMITTED", "COMMITTED", manifest.name, related=[manifest.name])
    return version


def give_back(change: Change, manifest: Manifest, broken: Many[str], code: str, text: str) -> None:
    """Returns a manifest uncommitted; its groups keep their place, unreadable trajectories end VOID."""
    fleet = change.fleet
    change.move(MANIFEST, manifest, "return", code or "RETURNED", text)
    manifest.end_time = change.now
    lost = set(broken)
    for name in manifest.groups:
        group = fleet.groups[name]
        group.manifest = ""
        change.move(GROUP, group, "return", code or "RETURNED", text)
        members = [fleet.trajectories[m] for m in group.members]
        for member in members:
            if member.state == "BATCHED":
                member.manifest = ""
                change.move(TRAJECTORY, member, "return", code or "RETURNED", text)
        # a name that was not in the batch (a surplus member, a typing error) says nothing of the batch
        gone = [m for m in members if m.name in lost and m.state == "READY"]
        for member in gone:
            change.move(TRAJECTORY, member, "void", "DATA_LOSS", "its segments are gone or differ from their hash")
        if gone:
            # the group's rewards were frozen; without a member they are no longer what was closed
            trajectories.drop_group(change, group, "filter", "GROUP_DROPPED", f"{len(gone)} members were unreadable")


def publish(change: Change, version: WeightVersion, files: bytes, checksum: str, checkpoint: bytes) -> None:
    """Makes a committed version loadable; a checkpoint that contains it shortens the redo log."""
    if version.files and files and version.files != files:
        raise errors.LibraError("IMMUTABLE_FIELD", f"{version.name} was published with other files")
    if version.state == "COMMITTED":
        version.files, version.checksum, version.publish_time = files, checksum, change.now
        change.move(VERSION, version, "publish", "PUBLISHED", f"checksum {checksum[:12]}")
    elif version.state != "PUBLISHED":
        raise errors.LibraError("VERSION_UNUSABLE", f"{version.name} is {version.state}")
    if checkpoint and not version.checkpoint:
        version.checkpoint = checkpoint
        change.put(version)
        for manifest in change.fleet.manifests.values():
            if (manifest.run, manifest.lineage, manifest.policy) == (version.run, version.lineage, version.policy):
                if manifest.state == "COMMITTED" and manifest.base + 1 <= version.number:
                    change.move(MANIFEST, manifest, "cover", "CHECKPOINTED", version.name)


def version_name(run: Run, policy: str, lineage: int, number: int) -> str:
    """Resource name of a version."""
    return f"{run.name}/policies/{policy or 'default'}/lineages/{lineage}/versions/{number}"
