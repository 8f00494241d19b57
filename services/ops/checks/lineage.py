"""P3 and P4: per lineage, the surviving weights contain each trained trajectory exactly once; versions rise by one.

A trajectory is in the weights through the manifest that its version was made from. So: each surviving version has one
surviving manifest and the other way round, no trajectory is in two of them, every consumption in the record agrees, and
what the trainers wrote down as it happened names the same version for each manifest.
"""

import hashlib
import struct
from collections import defaultdict

from services.common import wire
from services.ops.archive import (
    SURVIVING_MANIFESTS,
    SURVIVING_VERSIONS,
    Archive,
    manifest_state,
    run_of,
    trajectory_state,
    version_state,
)
from services.ops.checks.finding import Finding

Line = tuple[str, str, int]
"""(run, policy, lineage)."""


def check(archive: Archive) -> Finding:
    """Counts `trained_twice`: trajectories and manifests that the surviving weights contain more than once."""
    finding = Finding({"trained_twice": 0, "manifests_checked": 0})
    _versions(archive, finding)
    _members(archive, finding)
    _consumptions(archive, finding)
    _trainers(archive, finding)
    _engines(archive, finding)
    return finding


def _versions(archive: Archive, finding: Finding) -> None:
    numbers: dict[Line, list[int]] = defaultdict(list)
    made_by: dict[str, list[str]] = defaultdict(list)
    for version in archive.versions:
        if version_state(version) not in SURVIVING_VERSIONS:
            continue
        line = (run_of(version.name), version.version.policy, version.version.lineage)
        numbers[line].append(version.version.number)
        if version.version.number > 0:
            made_by[version.manifest].append(version.name)
            _made_from(archive, version, finding)
    for line, found in numbers.items():
        if sorted(found) != list(range(min(found), min(found) + len(found))):
            finding.add(
                "P4.versions_skip", f"{line[0]} lineage {line[2]}", f"versions {sorted(found)}; expected to rise by one"
            )
    for maker, names in made_by.items():
        if len(names) > 1:
            finding.count("trained_twice")
            finding.add("P3.trained_twice", maker, f"applied in {len(names)} surviving versions: {', '.join(names)}")
    for name, manifest in archive.manifests.items():
        if manifest_state(manifest) in SURVIVING_MANIFESTS and name not in made_by:
            finding.add("P3.step_lost", name, f"{manifest_state(manifest)}, but no surviving version was made from it")


def _made_from(archive: Archive, version: wire.WeightVersion, finding: Finding) -> None:
    manifest = archive.manifests.get(version.manifest)
    if manifest is None or manifest_state(manifest) not in SURVIVING_MANIFESTS:
        state = "unknown" if manifest is None else manifest_state(manifest)
        finding.add(
            "P3.version_without_step", version.name, f"made from {version.manifest or 'nothing'}, which is {state}"
        )
        return
    base = manifest.base_version
    if (base.lineage, base.number + 1) != (version.version.lineage, version.version.number):
        finding.add(
            "P3.wrong_base", version.name,
            f"its manifest starts from {base.lineage}-{base.number}; expected one before "
            f"{version.version.lineage}-{version.version.number}",
        )  # fmt: skip


def _members(archive: Archive, finding: Finding) -> None:
    digest: dict[str, hashlib._Hash] = {name: hashlib.sha256() for name in archive.manifests}
    trainable: dict[str, int] = defaultdict(int)
    holders: dict[tuple[int, str], list[str]] = defaultdict(list)
    for row in archive.members:
        manifest, member = archive.manifests.get(row.manifest), row.member
        if manifest is None:
            finding.add("P3.unknown_manifest", row.manifest, "members name it, the record of manifests does not")
            continue
        bits = struct.pack(">d", member.reward.value).hex()
        for sequence in member.sequences:
            for segment in sequence.segments:
                trainable[row.manifest] += segment.trainable_tokens
                digest[row.manifest].update(
                    f"{member.trajectory} {member.attempt} {bits} {sequence.index} {segment.first_position} "
                    f"{segment.blob.sha256}\n".encode()
                )
        trainable[row.manifest] -= sum(m.tokens for m in member.masked)
        if manifest_state(manifest) in SURVIVING_MANIFESTS:
            holders[manifest.base_version.lineage, member.trajectory].append(row.manifest)
    for (lineage, trajectory), manifests in holders.items():
        if len(manifests) > 1:
            finding.count("trained_twice")
            finding.add(
                "P3.trained_twice", trajectory,
                f"in {len(manifests)} surviving steps of lineage {lineage}: {', '.join(manifests)}",
            )  # fmt: skip
    for name, manifest in archive.manifests.items():
        if manifest_state(manifest) not in SURVIVING_MANIFESTS:
            continue
        finding.count("manifests_checked")
        if digest[name].hexdigest() != manifest.members_sha256:
            finding.add("P3.members_changed", name, "the hash over its members is not the one it was frozen with")
        if trainable[name] != manifest.divisors.trainable_tokens:
            finding.add(
                "P3.token_sum", name,
                f"its members hold {trainable[name]} trainable tokens, it was frozen with "
                f"{manifest.divisors.trainable_tokens}",
            )  # fmt: skip


def _consumptions(archive: Archive, finding: Finding) -> None:
    trained_in = {
        (row.member.trajectory, archive.manifests[row.manifest].base_version.lineage): row.manifest
        for row in archive.members
        if row.manifest in archive.manifests and manifest_state(archive.manifests[row.manifest]) in SURVIVING_MANIFESTS
    }
    for trajectory in archive.trajectories:
        claims = {c.version.lineage: c for c in trajectory.consumptions if not c.abandoned}
        if trajectory_state(trajectory) == "TRAINED" and not claims:
            finding.add("P3.trained_nowhere", trajectory.name, "TRAINED, but no step is recorded that consumed it")
        for lineage, claim in claims.items():
            if trained_in.get((trajectory.name, lineage)) != claim.manifest:
                finding.add(
                    "P3.consumption_differs", trajectory.name,
                    f"the record says {claim.manifest}, the manifests say {trained_in.get((trajectory.name, lineage))}",
                )  # fmt: skip
    known = {t.name: trajectory_state(t) for t in archive.trajectories}
    for (name, _), manifest in trained_in.items():
        if name in known and known[name] != "TRAINED":
            finding.add("P3.not_marked", name, f"trained by {manifest}, but recorded as {known[name]}")


def _trainers(archive: Archive, finding: Finding) -> None:
    """What the trainers wrote down: each manifest makes one version, and no trainer applies it twice as new work."""
    version_of: dict[str, tuple[int, int]] = {}
    for version in archive.versions:
        if version.manifest:
            version_of[version.manifest] = (version.version.lineage, version.version.number)
    fresh: set[tuple[str, str]] = set()
    for fact in archive.facts_of("trained"):
        manifest, made = fact["manifest"], tuple(fact["version"])
        if manifest in version_of and version_of[manifest] != made:
            finding.count("trained_twice")
            finding.add(
                "P3.trained_twice", manifest,
                f"{fact.who} applied it to make {made[0]}-{made[1]}; it belongs to "
                f"{version_of[manifest][0]}-{version_of[manifest][1]}",
            )  # fmt: skip
        if manifest not in version_of and manifest in archive.manifests:
            finding.add("P3.trained_uncommitted", manifest, f"{fact.who} applied it, but no version was made from it")
        if fact.get("redo"):
            continue
        if (fact.who, manifest) in fresh:
            finding.count("trained_twice")
            finding.add("P3.trained_twice", manifest, f"{fact.who} applied it twice as new work")
        fresh.add((fact.who, manifest))


def _engines(archive: Archive, finding: Finding) -> None:
    """P4 at each observer: what an engine serves of a run never falls within a lineage."""
    seen: dict[tuple[str, str, int], int] = {}
    for fact in archive.facts_of("loaded"):
        lineage, number = fact["version"]
        key = (fact.who, str(fact.get("run", "")), int(lineage))
        if number < seen.get(key, -1):
            finding.add(
                "P4.version_fell", f"{key[1]} at {fact.who}", f"loaded {lineage}-{number} after {lineage}-{seen[key]}"
            )
        seen[key] = max(int(number), seen.get(key, -1))
